# SPDX-License-Identifier: Apache-2.0
"""Very many clients: what is known of them stands in groups, and costs next to nothing each."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import zoo

from fedplan import seeds
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import AggregationResult
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.events import ClientChanged
from fedplan.federation.ledger.records import TurnRecord
from fedplan.federation.ledger.status import SiteState
from fedplan.federation.ledger.stream import MAX_LISTED_SITES, EventStream
from fedplan.federation.participation import Participation
from fedplan.federation.rounds import (
    RequestBuilder,
    RoundState,
    announce_phase,
    close_round,
    make_request,
)
from fedplan.federation.server import Server
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.language.resolution import class_representatives
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.training.fit import TrainArguments

PLANS = {
    "all": "share()",
    "kept": "chain(share(), keep(head))",
    "later": "chain(share(), when(after(2), keep(head)))",
    "in turn": "cycle(share(), chain(share(), keep(head)), chain(freeze(), share(head)))",
    "by trait": 'by("size", {"small": chain(freeze(), share(head))}, chain(share(), keep(head)))',
    "by name": 'chain(share(), when(client_in("c3", "c7"), keep(head)))',
}


def agreed(plan: str) -> tuple[Agreement, dict[str, torch.Tensor]]:
    model = zoo.build("vit")
    agreement = Agreement("many", describe(model), Method(parse(plan)), TrainArguments())
    return agreement, get_values(model, agreement.params)


def traits(name: str) -> dict[str, str]:
    return {"size": "small"} if name.endswith("1") else {}


def line(client: str, *, anew: bool) -> TurnRecord:
    """As much of a record as the close of a round looks at."""
    return TurnRecord(1, client, "", {}, "", "", "", 0, 0, 1, 0, None, None, anew)


def played(
    agreement: Agreement, global_state: GlobalState, asked: Iterable[str], anew: Iterable[str] = ()
) -> GlobalState:
    """A round in which these answered, each with all of the world moved, and nothing computed."""
    global_state, lost = announce_phase(agreement, global_state), set(anew)
    parcels, names = RequestBuilder(agreement, global_state), list(asked)
    cohort = {n: parcels.request(n, traits(n), full=n in lost) for n in names}
    round_state = RoundState(
        cohort, MeanAggregator(agreement, global_state.values, len(names)), responded=names
    )
    round_state.records = {n: line(n, anew=n in lost) for n in names}
    return close_round(
        agreement,
        global_state,
        round_state,
        AggregationResult(dict(global_state.values), {}, {}, 0.0),
        later=set(),
    )


@dataclass
class OneByOne:
    """What each client has, followed by itself: the obvious way, of which groups are the fast."""

    known: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    settled: dict[str, int] = field(default_factory=dict[str, int])
    heard: dict[str, int] = field(default_factory=dict[str, int])

    def play(
        self, agreement: Agreement, global_state: GlobalState, asked: list[str], anew: set[str]
    ) -> None:
        for name in asked:
            if name in anew:
                self.known.pop(name, None)
                self.settled.pop(name, None)
            turn = Turn(global_state.round + 1, name, global_state.phase, traits(name))
            wanted = agreement.required(turn, self.settled.get(name, 0))
            known = self.known.setdefault(name, {})
            sent = {
                k for k, first in wanted.items() if known.get(k, first) < global_state.versions[k]
            }
            request = make_request(agreement, global_state, name, traits(name), full=name in anew)
            assert request.versions == {k: global_state.versions[k] for k in sent}
            assert request.values.keys() == sent and request.last_update_round == self.heard.get(
                name, 0
            )
            known |= request.versions
            self.settled[name] = self.settled.get(name, 0) | agreement.personal_bits(turn)
            self.heard[name] = global_state.round + 1

    def require_same(self, global_state: GlobalState) -> None:
        assert set(global_state.client_sync) == set(self.heard)
        for name, number in self.heard.items():
            assert global_state.versions_of(name) == self.known[name]
            assert global_state.client_sync[name].personal_bits == self.settled[name]
            assert global_state.last_round_of(name) == number
        assert (
            global_state.versions_of("nobody") == {} and global_state.last_round_of("nobody") == 0
        )


@pytest.mark.parametrize("plan", PLANS)
def test_groups_say_of_each_client_what_it_would_say_by_itself(plan: str) -> None:
    agreement, start = agreed(PLANS[plan])
    global_state, each, draw = GlobalState.initial(agreement, start), OneByOne(), Random(plan)
    names = [f"c{i}" for i in range(12)]
    for _ in range(7):
        asked = [n for n in names if draw.random() < 0.5]
        anew = {n for n in asked if n in global_state.client_sync and draw.random() < 0.2}
        each.play(agreement, announce_phase(agreement, global_state), asked, anew)
        global_state = played(agreement, global_state, asked, anew)
        each.require_same(global_state)
        tensors, meta = global_state.to_tensors()
        global_state = GlobalState.from_tensors(tensors, json.loads(json.dumps(meta)))
        each.require_same(global_state)


def saved_bytes(global_state: GlobalState) -> int:
    tensors, meta = global_state.to_tensors()
    return sum(v.nbytes for v in tensors.values()) + len(json.dumps(meta))


def test_a_client_that_answered_takes_its_name_and_a_number_on_the_disk() -> None:
    agreement, start = agreed(PLANS["kept"])
    sizes = dict[int, int]()
    for count in (200, 2000):
        global_state = GlobalState.initial(agreement, start)
        for _ in range(2):
            global_state = played(agreement, global_state, [f"client-{i:07}" for i in range(count)])
        assert len({id(client_sync) for client_sync in global_state.client_sync.values()}) == 1
        sizes[count] = saved_bytes(global_state)
    # A name of 14 letters, its two marks and a comma, and the number of its group.
    assert (sizes[2000] - sizes[200]) / 1800 <= 14 + 3 + 4


def test_groups_that_nobody_is_in_are_dropped() -> None:
    agreement, start = agreed(PLANS["all"])
    global_state = GlobalState.initial(agreement, start)
    for number in range(6):
        global_state = played(
            agreement, global_state, ["c0", "c1", "c2"] if number != 3 else ["c0", "c1"]
        )
    assert len(global_state.to_tensors()[1]["personal_bits"]) == 1


def test_in_which_order_clients_answered_changes_no_byte() -> None:
    agreement, start = agreed(PLANS["by trait"])
    found = list[Any]()
    for order in (1, -1):
        global_state = GlobalState.initial(agreement, start)
        for asked in (["c1", "c2", "c3"], ["c2", "c4"], ["c4", "c1"]):
            global_state = played(agreement, global_state, asked[::order])
        tensors, meta = global_state.to_tensors()
        found.append(({k: v.tolist() for k, v in tensors.items() if "sync/" in k}, meta))
    assert found[0] == found[1]


def test_a_world_of_an_older_fedplan_is_refused_by_name() -> None:
    agreement, start = agreed(PLANS["all"])
    tensors, meta = GlobalState.initial(agreement, start).to_tensors()
    with pytest.raises(
        Exception, match="of format 1, is of another version of fedplan: read it with that version"
    ):
        GlobalState.from_tensors(tensors, meta | {"format": 1})


def test_clients_that_lack_the_same_share_one_parcel() -> None:
    agreement, start = agreed(PLANS["by trait"])
    global_state = played(
        agreement, GlobalState.initial(agreement, start), [f"c{i}" for i in range(40)]
    )
    parcels = RequestBuilder(agreement, announce_phase(agreement, global_state))
    requests = [parcels.request(f"c{i}", traits(f"c{i}")) for i in range(60)]
    assert len({id(each.values) for each in requests}) == 4  # small or not, heard before or not
    for each in requests:
        alone = make_request(agreement, global_state, each.turn.client, each.turn.traits)
        assert replace(each, values={}) == replace(alone, values={})


@pytest.mark.parametrize("plan", PLANS)
def test_one_client_of_each_kind_says_all_that_a_plan_says(plan: str) -> None:
    said, roster = parse(PLANS[plan]), {f"c{i}": traits(f"c{i}") for i in range(30)}
    kinds = class_representatives(said, roster)
    assert len(kinds) == {"by trait": 2, "by name": 3}.get(plan, 1)
    for number in range(1, 6):
        every = {said.active_steps(Turn(number, name, "", held)) for name, held in roster.items()}
        assert every == {said.active_steps(Turn(number, name, "", held)) for name, held in kinds}
    assert class_representatives(said, {}) == []


def test_a_cohort_is_drawn_from_a_million_names_at_once() -> None:
    roster = [f"client-{i}" for i in range(1_000_000)]
    began = time.process_time()
    drawn = Participation(0.01).cohort("many", 3, roster)
    assert time.process_time() - began < 3
    places = torch.randperm(len(roster), generator=seeds.generator("many", "cohort", 3))
    assert drawn == [roster[int(i)] for i in places[:10_000].sort().values]


def test_a_home_is_made_when_something_is_kept(tmp_path: Path) -> None:
    journals = [
        Journal(client_state_folder(tmp_path, f"c{i}"), keep_replies=False) for i in range(50)
    ]
    assert all(
        journal.client_state() == ({}, {}) and not journal.last_request() for journal in journals
    )
    assert not list(tmp_path.iterdir())
    journals[7].commit("r", {"a": torch.ones(2)}, {}, {}, {})
    assert [p.name for p in (tmp_path / "clients").glob("*/*/*")] == ["c7"]
    assert len({client_state_folder(tmp_path, f"c{i}").parent for i in range(2000)}) > 1900


def test_of_very_many_sites_the_status_lists_none(tmp_path: Path) -> None:
    agreement, start = agreed(PLANS["all"])
    roster = {f"c{i}": dict[str, str]() for i in range(MAX_LISTED_SITES + 1)}
    server = Server(agreement, start, tmp_path, rounds=1, roster=roster)
    events = EventStream(tmp_path)
    with events.track_run(server, "many"):
        for name in list(roster)[:10]:
            events.emit(ClientChanged(name, SiteState.REQUESTED))
            events.emit(ClientChanged(name, SiteState.NOT_AGGREGATED, "away"))
        assert not events.status.sites
    assert (tmp_path / "status.json").stat().st_size < 2000
