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
from fedplan.federation.aggregation import Outcome, PlainSum
from fedplan.federation.agreement import Agreement
from fedplan.federation.participation import Participation
from fedplan.federation.record import TurnRecord
from fedplan.federation.rounds import Parcels, Tally, announced, close, push
from fedplan.federation.server import Server
from fedplan.federation.states import SiteState
from fedplan.federation.status import LISTED, Status
from fedplan.federation.world import World
from fedplan.language.crowds import told_apart
from fedplan.language.parser import parse
from fedplan.language.turn import Turn
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.models.values import take
from fedplan.storage.journal import Journal, home_of
from fedplan.training.fit import Pace

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
    agreement = Agreement("many", describe(model), Method(parse(plan)), Pace())
    return agreement, take(model, agreement.params)


def traits(name: str) -> dict[str, str]:
    return {"size": "small"} if name.endswith("1") else {}


def line(client: str, *, anew: bool) -> TurnRecord:
    """As much of a record as the close of a round looks at."""
    return TurnRecord(1, client, "", {}, "", "", "", 0, 0, 1, 0, None, None, anew)


def played(
    agreement: Agreement, world: World, asked: Iterable[str], anew: Iterable[str] = ()
) -> World:
    """A round in which these answered, each with all of the world moved, and nothing computed."""
    world, lost = announced(agreement, world), set(anew)
    parcels, names = Parcels(agreement, world), list(asked)
    cohort = {n: parcels.request(n, traits(n), anew=n in lost) for n in names}
    tally = Tally(cohort, PlainSum(agreement, world.values, len(names)), heard=names)
    tally.lines = {n: line(n, anew=n in lost) for n in names}
    return close(agreement, world, tally, Outcome(dict(world.values), {}, {}, 0.0), later=set())


@dataclass
class OneByOne:
    """What each client has, followed by itself: the obvious way, of which groups are the fast."""

    known: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    settled: dict[str, int] = field(default_factory=dict[str, int])
    heard: dict[str, int] = field(default_factory=dict[str, int])

    def play(self, agreement: Agreement, world: World, asked: list[str], anew: set[str]) -> None:
        for name in asked:
            if name in anew:
                self.known.pop(name, None)
                self.settled.pop(name, None)
            turn = Turn(world.round + 1, name, world.phase, traits(name))
            wanted = agreement.wanted(turn, self.settled.get(name, 0))
            known = self.known.setdefault(name, {})
            sent = {k for k, first in wanted.items() if known.get(k, first) < world.versions[k]}
            request = push(agreement, world, name, traits(name), anew=name in anew)
            assert request.versions == {k: world.versions[k] for k in sent}
            assert request.values.keys() == sent and request.heard == self.heard.get(name, 0)
            known |= request.versions
            self.settled[name] = self.settled.get(name, 0) | agreement.owned(turn)
            self.heard[name] = world.round + 1

    def require_same(self, world: World) -> None:
        assert set(world.met) == set(self.heard)
        for name, number in self.heard.items():
            assert world.known_by(name) == self.known[name]
            assert world.settled_by(name) == self.settled[name]
            assert world.heard_from(name) == number
        assert world.known_by("nobody") == {} and world.heard_from("nobody") == 0


@pytest.mark.parametrize("plan", PLANS)
def test_groups_say_of_each_client_what_it_would_say_by_itself(plan: str) -> None:
    agreement, start = agreed(PLANS[plan])
    world, each, draw = World.start(agreement, start), OneByOne(), Random(plan)
    names = [f"c{i}" for i in range(12)]
    for _ in range(7):
        asked = [n for n in names if draw.random() < 0.5]
        anew = {n for n in asked if n in world.met and draw.random() < 0.2}
        each.play(agreement, announced(agreement, world), asked, anew)
        world = played(agreement, world, asked, anew)
        each.require_same(world)
        tensors, meta = world.saved()
        world = World.loaded(tensors, json.loads(json.dumps(meta)))
        each.require_same(world)


def saved_bytes(world: World) -> int:
    tensors, meta = world.saved()
    return sum(v.nbytes for v in tensors.values()) + len(json.dumps(meta))


def test_a_client_that_answered_takes_its_name_and_a_number_on_the_disk() -> None:
    agreement, start = agreed(PLANS["kept"])
    sizes = dict[int, int]()
    for count in (200, 2000):
        world = World.start(agreement, start)
        for _ in range(2):
            world = played(agreement, world, [f"client-{i:07}" for i in range(count)])
        assert len({id(met) for met in world.met.values()}) == 1
        sizes[count] = saved_bytes(world)
    # A name of 14 letters, its two marks and a comma, and the number of its group.
    assert (sizes[2000] - sizes[200]) / 1800 <= 14 + 3 + 4


def test_groups_that_nobody_is_in_are_dropped() -> None:
    agreement, start = agreed(PLANS["all"])
    world = World.start(agreement, start)
    for number in range(6):
        world = played(agreement, world, ["c0", "c1", "c2"] if number != 3 else ["c0", "c1"])
    assert len(world.saved()[1]["settled"]) == 1


def test_in_which_order_clients_answered_changes_no_byte() -> None:
    agreement, start = agreed(PLANS["by trait"])
    found = list[Any]()
    for order in (1, -1):
        world = World.start(agreement, start)
        for asked in (["c1", "c2", "c3"], ["c2", "c4"], ["c4", "c1"]):
            world = played(agreement, world, asked[::order])
        tensors, meta = world.saved()
        found.append(({k: v.tolist() for k, v in tensors.items() if "met/" in k}, meta))
    assert found[0] == found[1]


def test_a_world_of_an_older_fedplan_is_refused_by_name() -> None:
    agreement, start = agreed(PLANS["all"])
    tensors, meta = World.start(agreement, start).saved()
    with pytest.raises(Exception, match="has format 1, not 2: read it with the fedplan it is from"):
        World.loaded(tensors, meta | {"format": 1})


def test_clients_that_lack_the_same_share_one_parcel() -> None:
    agreement, start = agreed(PLANS["by trait"])
    world = played(agreement, World.start(agreement, start), [f"c{i}" for i in range(40)])
    parcels = Parcels(agreement, announced(agreement, world))
    requests = [parcels.request(f"c{i}", traits(f"c{i}")) for i in range(60)]
    assert len({id(each.values) for each in requests}) == 4  # small or not, heard before or not
    for each in requests:
        alone = push(agreement, world, each.turn.client, each.turn.traits)
        assert replace(each, values={}) == replace(alone, values={})


@pytest.mark.parametrize("plan", PLANS)
def test_one_client_of_each_kind_says_all_that_a_plan_says(plan: str) -> None:
    said, roster = parse(PLANS[plan]), {f"c{i}": traits(f"c{i}") for i in range(30)}
    kinds = told_apart(said, roster)
    assert len(kinds) == {"by trait": 2, "by name": 3}.get(plan, 1)
    for number in range(1, 6):
        every = {said.settle(Turn(number, name, "", held)) for name, held in roster.items()}
        assert every == {said.settle(Turn(number, name, "", held)) for name, held in kinds}
    assert told_apart(said, {}) == []


def test_a_cohort_is_drawn_from_a_million_names_at_once() -> None:
    roster = [f"client-{i}" for i in range(1_000_000)]
    began = time.process_time()
    drawn = Participation(0.01).cohort("many", 3, roster)
    assert time.process_time() - began < 3
    places = torch.randperm(len(roster), generator=seeds.generator("many", "cohort", 3))
    assert drawn == [roster[int(i)] for i in places[:10_000].sort().values]


def test_a_home_is_made_when_something_is_kept(tmp_path: Path) -> None:
    journals = [Journal(home_of(tmp_path, f"c{i}"), replies=False) for i in range(50)]
    assert all(journal.home() == ({}, {}) and not journal.last() for journal in journals)
    assert not list(tmp_path.iterdir())
    journals[7].commit("r", {"a": torch.ones(2)}, {}, {}, {})
    assert [p.name for p in (tmp_path / "homes").glob("*/*/*")] == ["c7"]
    assert len({home_of(tmp_path, f"c{i}").parent for i in range(2000)}) > 1900


def test_of_very_many_sites_the_status_lists_none(tmp_path: Path) -> None:
    agreement, start = agreed(PLANS["all"])
    roster = {f"c{i}": dict[str, str]() for i in range(LISTED + 1)}
    server = Server(agreement, start, tmp_path, rounds=1, roster=roster)
    status = Status(tmp_path)
    with status.driving(server, "many"):
        for name in list(roster)[:10]:
            status.site(name, SiteState.ASKED)
            status.site(name, SiteState.LEFT_OUT, "away")
        assert not status.now.sites
    assert (tmp_path / "status.json").stat().st_size < 2000
