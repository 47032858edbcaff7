# SPDX-License-Identifier: Apache-2.0
"""The round under bad input, drop-outs and changes: updates are refused singly, nothing is lost."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from clients import few, know_secrets, loss
from torch import Tensor

from fedplan import parse
from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_round import train_round
from fedplan.federation.global_state import GlobalState
from fedplan.federation.messages import Request, RequestRefused, Update
from fedplan.federation.participation import Participation
from fedplan.federation.rounds import RoundState, accept_update, close_round, make_request
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.methods.server_optimizer import adam
from fedplan.models.description import describe
from fedplan.runners.local import Faults, Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.journal import client_state_folder
from fedplan.tensors.named import digests
from fedplan.training.fit import TrainArguments

PLAN = "chain(freeze(), share(value | head), keep(norm))"
PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)


def federation(
    folder: Path, made: Method | None = None, *, clients: int = 4, **more: Any
) -> Federation:
    model = zoo.build("bert")
    agreement = Agreement("test", describe(model), made or Method(parse(PLAN)), PACE)
    rows = few("bert", clients)
    return Federation(agreement, model, rows, loss, folder, rounds=more.pop("rounds", 5), **more)


def opened(fed: Federation) -> RoundState:
    """The first round, in which all are asked."""
    cohort = {n: make_request(fed.agreement, fed.global_state, n, {}) for n in fed.clients}
    return RoundState(
        cohort, MeanAggregator(fed.agreement, fed.global_state.values, len(fed.clients))
    )


def asked(fed: Federation) -> tuple[RoundState, dict[str, Update]]:
    round_state = opened(fed)
    return round_state, {
        n: train_round(fed.agreement, fed.clients[n], d) for n, d in round_state.cohort.items()
    }


def with_values(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Update], Update]:
    def changed(update: Update) -> Update:
        values = {k: v.clone() for k, v in update.values.items()}
        change(values)
        return replace(update, values=values)

    return changed


def at_first(change: Callable[[Tensor], Tensor]) -> Callable[[Update], Update]:
    def change_one(values: dict[str, Tensor]) -> None:
        key = next(iter(values))
        values[key] = change(values[key])

    return with_values(change_one)


def filled(number: float) -> Callable[[Tensor], Tensor]:
    def fill(tensor: Tensor) -> Tensor:
        tensor.view(-1)[0] = number
        return tensor

    return fill


def having(**fields: Any) -> Callable[[Update], Update]:
    return lambda update: replace(update, **fields)


KEY = "bert.encoder.layer.0.attention.self.value.weight"
NORM = "bert.encoder.layer.0.output.LayerNorm.weight"
MALFORMED: dict[str, Callable[[Update], Update]] = {
    "nan": at_first(filled(float("nan"))),
    "inf": at_first(filled(float("inf"))),
    "-inf": at_first(filled(float("-inf"))),
    "huge": at_first(filled(3e38)),
    "all nan": at_first(lambda t: t * float("nan")),
    "transposed": with_values(lambda v: v.update({KEY: torch.zeros(16, 8)})),
    "broadcastable row": with_values(lambda v: v.update({KEY: torch.zeros(1, 16)})),
    "broadcastable scalar": at_first(lambda t: t.view(-1)[0]),
    "empty": at_first(lambda t: t.view(-1)[:0]),
    "one more dimension": at_first(lambda t: t[None]),
    "flat": with_values(lambda v: v.update({KEY: v[KEY].view(-1)})),
    "float64": at_first(lambda t: t.double()),
    "float16": at_first(lambda t: t.half()),
    "bfloat16": at_first(lambda t: t.bfloat16()),
    "int64": at_first(lambda t: t.long()),
    "bool": at_first(lambda t: t.bool()),
    "complex": at_first(lambda t: t.to(torch.complex64)),
    "extra name": with_values(lambda v: v.update({"x": torch.zeros(2)})),
    "extra frozen param": with_values(
        lambda v: v.update({"bert.embeddings.word_embeddings.weight": torch.zeros(64, 16)})
    ),
    "extra kept param": with_values(lambda v: v.update({NORM: torch.zeros(16)})),
    "extra rider": with_values(lambda v: v.update({f"{KEY}#control": torch.zeros(16, 16)})),
    "odd rider": with_values(lambda v: v.update({f"{KEY}#": torch.zeros(16, 16)})),
    "missing": with_values(lambda v: v.pop(KEY)),
    "nothing": with_values(lambda v: v.clear()),
    "renamed": with_values(lambda v: v.update({KEY.upper(): v.pop(KEY)})),
    "weight zero": having(weight=0),
    "weight negative": having(weight=-3),
    "weight nan": having(weight=float("nan")),
    "weight float": having(weight=2.5),
    "weight bool": having(weight=True),
    "weight string": having(weight="7"),
    "weight none": having(weight=None),
    "weight huge": having(weight=2**60),
    "stranger": having(client="nobody"),
    "another client": having(client="client-1"),
    "another round": lambda u: replace(u, request_name=u.request_name.replace("/1/", "/2/")),
    "another experiment": lambda u: replace(u, request_name=u.request_name.replace("test", "tset")),
    "another plan": having(agreement_digest="0" * 16),
    "empty request": having(request_name=""),
    "too large": with_values(lambda v: v.update({"x": torch.zeros(10**6)})),
    "ten times too many": with_values(
        lambda v: v.update({f"x{i}": torch.zeros(10**5) for i in range(10)})
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, dict[str, Update]]:
    fed = federation(tmp_path_factory.mktemp("good"))
    return fed, asked(fed)[1]


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_update_is_rejected_singly(
    fault: str, good: tuple[Federation, dict[str, Update]]
) -> None:
    fed, updates = good
    honest = {n: u for n, u in updates.items() if n != "client-0"}
    round_state = opened(fed)
    without = opened(fed)
    for i, update in enumerate(honest.values()):
        if i == 1:
            accept_update(
                fed.agreement, fed.global_state, round_state, MALFORMED[fault](updates["client-0"])
            )
        accept_update(fed.agreement, fed.global_state, round_state, update)
        accept_update(fed.agreement, fed.global_state, without, update)
    (reason,) = round_state.rejected.values()
    assert reason
    assert sorted(round_state.aggregated) == sorted(honest)
    made, expected = (
        close_round(fed.agreement, fed.global_state, t, t.aggregator.close(), later=set())
        for t in (round_state, without)
    )
    assert digests(made.values) == digests(expected.values)


def test_at_least_forty_faults_are_tried() -> None:
    assert len(MALFORMED) >= 40


def test_an_update_is_counted_once(good: tuple[Federation, dict[str, Update]]) -> None:
    fed, updates = good
    round_state = opened(fed)
    for _ in range(2):
        accept_update(fed.agreement, fed.global_state, round_state, updates["client-0"])
    assert round_state.aggregated == ["client-0"]
    assert "has an update in this round already" in round_state.rejected["client-0"]


def test_what_was_sent_in_vain_is_counted_of_each_client(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    fed.commit(fed.run_round())
    round_state = fed.server.begin_round()
    sent = [round_state.cohort[name].nbytes for name in ("client-0", "client-1")]
    for name in ("client-0", "client-1"):
        fed.server.resend_all(round_state, name)
    assert min(sent) > 0 and round_state.wasted_bytes == sum(sent)


def test_updates_in_any_order_make_the_same_world(
    good: tuple[Federation, dict[str, Update]],
) -> None:
    fed, updates = good
    worlds = set[tuple[str, ...]]()
    for order in (list(updates), list(reversed(updates))):
        round_state = opened(fed)
        for name in order:
            accept_update(fed.agreement, fed.global_state, round_state, updates[name])
        made = close_round(
            fed.agreement,
            fed.global_state,
            round_state,
            round_state.aggregator.close(),
            later=set(),
        )
        worlds.add(tuple(digests(made.values).values()))
    assert len(worlds) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda d: replace(d, agreement_digest="f" * 16),
        lambda d: replace(d, name=d.name + "0"),
        lambda d: replace(d, turn=replace(d.turn, round=2)),
    ],
)
def test_a_client_refuses_what_it_did_not_agree_to(
    change: Callable[[Request], Request], tmp_path: Path
) -> None:
    fed = federation(tmp_path)
    down = make_request(fed.agreement, fed.global_state, "client-0", {})
    with pytest.raises(RequestRefused):
        train_round(fed.agreement, fed.clients["client-0"], change(down))


def test_another_plan_is_another_agreement() -> None:
    params = describe(zoo.build("bert"))
    one, two = (Agreement("test", params, Method(parse(p)), PACE) for p in (PLAN, "share()"))
    assert one.fingerprint != two.fingerprint
    assert one.fingerprint == replace(one).fingerprint


def test_a_run_with_absences_is_verified_and_repeats_its_bits(tmp_path: Path) -> None:
    absences = {"participation": Participation(0.75), "faults": Faults(dropped=0.2, late=0.2)}
    worlds = list[dict[str, str]]()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        fed = federation(tmp_path / name, clients=8, rounds=6, **absences)
        for _ in range(6):
            fed.commit(fed.run_round())
        worlds.append(digests(fed.global_state.values))
        lines = read_json_lines(tmp_path / name / "ledger.jsonl")
        assert verify_ledger(fed.agreement, lines) == []
        reasons = [r for line in lines for r in line.get("rejected", {}).values()]
        assert {"late", "dropped"} <= set(reasons)
    assert worlds[0] == worlds[1]


@pytest.mark.parametrize("name", ["scaffold", "fedper", "fedadam"])
def test_a_federation_that_is_opened_again_goes_on_with_the_same_bits(
    name: str, tmp_path: Path
) -> None:
    for where in ("whole", "parts"):
        (tmp_path / where).mkdir()
        know_secrets(tmp_path / where, [f"client-{i}" for i in range(8)])
    whole = federation(tmp_path / "whole", method_by_name(name), rounds=4)
    for _ in range(4):
        whole.commit(whole.run_round())
    for _ in range(4):
        part = federation(tmp_path / "parts", method_by_name(name), rounds=4)
        part.run_round()  # a round that is never committed
        part = federation(tmp_path / "parts", method_by_name(name), rounds=4)
        part.commit(part.run_round())
    assert digests(part.global_state.values) == digests(whole.global_state.values)
    for file in ("ledger.jsonl", "metrics.jsonl"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "parts" / file).read_bytes()


def doctored(lines: list[dict[str, Any]], change: Callable[[dict[str, Any]], Any]) -> list[Any]:
    lines = copy.deepcopy(lines)
    change(lines[5])
    return lines


def swap(text: str, at: int, letter: str) -> str:
    return text[:at] + letter + text[at + 1 :]


def other(marks: str) -> str:
    return swap(marks, 0, "0" if marks[0] != "0" else "1")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.update(after=other(x["after"])), "is FREEZE and changed"),
        (lambda x: x.update(after=swap(x["after"], 0, "x")), "not a line of a ledger"),
        (lambda x: x.update(roles=swap(x["roles"], 0, "S")), "the plan says FREEZE"),
        (lambda x: x.update(upload_bytes=x["upload_bytes"] + 1), "bytes were uploaded"),
        (lambda x: x.pop("roles"), "not a line of a ledger"),
        (lambda x: x.update(roles="?"), "not a line of a ledger"),
        (lambda x: x.update(scores=[1]), "not a line of a ledger"),
        (lambda x: x.update(download_bytes=x["download_bytes"] - 1), "bytes were downloaded"),
        (lambda x: x.update(before="0" * len(x["before"])), "did not start from its last value"),
    ],
)
def test_a_doctored_ledger_is_caught(
    change: Callable[[dict[str, Any]], Any], words: str, tmp_path: Path
) -> None:
    fed = federation(tmp_path, rounds=2)
    for _ in range(2):
        fed.commit(fed.run_round())
    lines = read_json_lines(tmp_path / "ledger.jsonl")
    assert verify_ledger(fed.agreement, lines) == []
    assert any(words in fault for fault in verify_ledger(fed.agreement, doctored(lines, change)))


def test_the_serve_forgets_what_freezes_for_good_and_keeps_what_rests(tmp_path: Path) -> None:
    plan = "chain(cycle(share(value), share(mlp)), when(after(2), freeze(mlp)))"
    made = Method(parse(plan), server_optimizer=adam())
    fed = federation(tmp_path, made, rounds=6)
    kinds = {p.key: p.kind for p in fed.agreement.params}
    remembered = list[set[str]]()
    for _ in range(3):
        fed.commit(fed.run_round())
        remembered.append({str(kinds[k]) for k in fed.global_state.memory})
    # Round 2 was the last of mlp; value rests in round 2 and goes on in round 3.
    assert remembered == [{"value"}, {"value"}, {"value"}]


@pytest.mark.parametrize("name", ["../../out", "a/b", ".", "..", "St. Élie", "C:\\x", "%2F"])
def test_a_client_of_any_name_has_one_home_within_the_run(name: str, tmp_path: Path) -> None:
    home = client_state_folder(tmp_path, name)
    assert home.resolve().parents[2] == (tmp_path / "clients").resolve()
    assert client_state_folder(tmp_path, name + "x") != home


def test_world_starts_with_what_may_travel_only(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    global_state = GlobalState.initial(fed.agreement, fed.server.start)
    assert set(global_state.values) == {
        p.key for p in fed.agreement.params if p.kind in ("value", "head")
    }


MADE: dict[str, Any] = {
    "another dtype": lambda old, mean, memory: (mean.double(), {}),
    "another shape": lambda old, mean, memory: (mean[None], {}),
    "no number": lambda old, mean, memory: (mean / 0, {}),
    "a memory of two words": lambda old, mean, memory: (mean, {"sum/all": mean}),
}


@pytest.mark.parametrize("what", MADE)
def test_what_no_later_round_could_go_on_with_is_refused(what: str, tmp_path: Path) -> None:
    fed = federation(tmp_path, Method(parse(PLAN), server_optimizer=MADE[what]))
    before = digests(fed.global_state.values)
    with pytest.raises(FedplanError, match="the server optimizer"):
        fed.run_round()
    assert digests(fed.global_state.values) == before and fed.global_state.round == 0


def test_all_choose_before_anybody_is_heard(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    round_state = fed.server.begin_round()
    fed.server.take(
        round_state,
        train_round(fed.agreement, fed.clients["client-0"], round_state.cohort["client-0"]),
    )
    with pytest.raises(FedplanError, match="before any client has responded"):
        fed.server._set_scores(round_state, {fed.agreement.blocks[0]: 1.0})
