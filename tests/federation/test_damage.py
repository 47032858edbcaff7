# SPDX-License-Identifier: Apache-2.0
"""A damaged update leaves the round as if it had never come, sent once or five times."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from clients import GUARANTEES, few, know_secrets, loss
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.private import ClientDPAggregator
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_round import train_round
from fedplan.federation.global_state import GlobalState
from fedplan.federation.messages import Update, update_message
from fedplan.federation.rounds import RoundState
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.runners.flower.records import from_records, to_records
from fedplan.runners.flower.server import ServerLoop
from fedplan.runners.local import Federation
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests, split_aux
from fedplan.tensors.sums import ExactSum
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd

BAD = "client-0"
SAFL = {"k": 1, "joint_choice": True}
METHODS: dict[str, Method] = {
    "fedavg": method_by_name("fedavg"),
    "fedper": method_by_name("fedper"),
    "scaffold": method_by_name("scaffold"),
    "fedadam": method_by_name("fedadam"),
    "together": method_by_name("safl", SAFL),
    "alone": method_by_name("safl", {"k": 1}),
    "veiled": method_by_name("safl", SAFL),
    "weighed": method_by_name("safl", SAFL),
}
WIRES = ("plain()", "delta()", "bf16()", "pipe(delta(), int8())", "pipe(delta(), topk(0.5))")
CASES = [(name, "plain()") for name in METHODS]
CASES += [(name, wire) for wire in WIRES[1:] for name in ("fedper", "scaffold")]


class Round:
    """An open round of a federation, in which every client has answered and none is counted."""

    def __init__(self, name: str, wire: str, folder: Path, *, late: bool = False) -> None:
        made = replace(METHODS[name], compression=parse_codec(wire))
        agreement = Agreement(
            "damage", describe(zoo.build("bert")), made, PACE, GUARANTEES.get(name)
        )
        know_secrets(folder, ())
        self.late = late
        self.fed = Federation(
            agreement,
            zoo.build("bert"),
            few("bert", 3),
            loss,
            folder,
            rounds=3,
        )
        if not late:
            self.fed.commit(self.fed.run_round())
        if self.fed.server.aggregation.guard is not None:
            self.fed.server.aggregation.guard.sample_cohort = lambda roster, number: list(roster)  # type: ignore[method-assign]
        self.round_state = self.fed.server.begin_round()
        self.fed.poll_clients(self.round_state)
        self.updates = {
            n: train_round(self.fed.agreement, self.fed.clients[n], d)
            for n, d in self.round_state.cohort.items()
        }

    def tallied(self) -> RoundState:
        """The same round, open and empty."""
        server, opened = self.fed.server, self.round_state
        scores = next(iter(opened.cohort.values())).turn.scores
        total = server._open_aggregator(scores)
        return RoundState(opened.cohort, total, opened.start_digests, opened.digests)

    def take(self, round_state: RoundState, update: Update) -> None:
        """Count an update, or hear it if all are late."""
        self.fed.server.take(round_state, update, late=self.late)

    def closed(self, round_state: RoundState) -> GlobalState:
        """The world after a round, with the others counted; the round stays open."""
        before = self.fed.global_state
        for name, update in self.updates.items():
            if name != BAD:
                self.take(round_state, update)
        try:
            self.fed.server.close_round(round_state)
            return self.fed.global_state
        finally:
            self.fed.server.global_state = before


PACE = TrainArguments(sgd(), lr=1e-2, batch_size=2, steps=2)


def bits(global_state: GlobalState) -> object:
    """All that a world is."""
    memory = {key: digests(held) for key, held in global_state.memory.items()}
    rest = (
        global_state.versions,
        global_state.client_sync,
        global_state.drift,
        global_state.choice,
        global_state.clipping_norm,
    )
    return digests(global_state.values), memory, rest


def state(round_state: RoundState) -> object:
    """All of a tally but the reasons."""
    held_by = {
        **vars(round_state.aggregator),
        **vars(getattr(round_state.aggregator, "products", round_state)),
    }
    total = {
        name: held.weights() if isinstance(held, ExactSum) else held
        for name, held in held_by.items()
        if name
        not in (
            "agreement",
            "base",
            "guard",
            "_last",
            "_base",
            "mechanism",
            "products",
            "layers",
            "rule",
            *vars(round_state),
        )
    }
    return copy.deepcopy((total, round_state.aggregated, round_state.responded))


def values_with(update: Update, key: str, value: Tensor | None) -> Update:
    sent = {k: v for k, v in {**update.values, **update.aux}.items() if k != key}
    sent |= {key: value} if value is not None else {}
    values, riders = split_aux(sent, ("control",) if update.aux else ())
    return replace(update, values=values, aux=riders)


def filled(tensor: Tensor, number: float) -> Tensor:
    found = tensor.clone()
    found.view(-1)[-1] = number
    return found


def damaged(update: Update) -> Iterator[tuple[str, Update]]:
    """The update with each of its tensors damaged in each way, and with each field wrong."""
    for key, tensor in {**update.values, **update.aux}.items():
        if tensor.is_floating_point():
            for number in (float("nan"), float("inf"), float("-inf"), 3.3e38):
                yield f"{number} in {key}", values_with(update, key, filled(tensor, number))
            yield f"ints in {key}", values_with(update, key, tensor.to(torch.int32))
        yield f"no {key}", values_with(update, key, None)
        yield f"flat {key}", values_with(update, key, tensor.reshape(1, -1, 1))
        yield f"longer {key}", values_with(update, key, tensor.reshape(-1).repeat(2))
        yield f"double {key}", values_with(update, key, tensor.double())
        yield f"renamed {key}", values_with(values_with(update, key, None), key + "x", tensor)
    extra = {"another": torch.ones(2), "another#control": torch.ones(2), "#control": torch.ones(2)}
    for key, tensor in extra.items():
        yield f"extra {key}", values_with(update, key, tensor)
    for weight in (0, -1, update.weight + 1, 2**27 + 1, 2**50, True, 1.0, None, "1"):
        if weight is not update.weight:
            yield f"weight {weight!r}", replace(update, weight=weight)  # type: ignore[arg-type]
    for field in ("client", "request_name", "agreement_digest"):
        for said in ("", "client-9", getattr(update, field) + "x"):
            yield f"{field} {said!r}", replace(update, **{field: said})


def pulled(found: Round, round_state: RoundState, what: str, update: Update, *, times: int) -> None:
    """Have a bad update come so many times, and check each time that nothing was added."""
    before = state(round_state)
    for _ in range(times):
        round_state.rejected.pop(str(update.client), None)
        found.take(round_state, update)
        assert state(round_state) == before, what
        assert round_state.rejected.get(str(update.client)), what
        assert BAD not in round_state.records, what


@pytest.mark.parametrize(("name", "wire"), CASES)
def test_damage_of_any_kind_leaves_the_round_as_it_was(
    name: str, wire: str, tmp_path: Path
) -> None:
    found = Round(name, wire, tmp_path)
    without, round_state = found.closed(found.tallied()), found.tallied()
    clipped = isinstance(
        found.round_state.aggregator, ClientDPAggregator
    )  # then a change of any length is one of the bound's
    changes = [
        each for each in damaged(found.updates[BAD]) if not (clipped and each[0][:7] == "3.3e+38")
    ]
    assert len(changes) > 60
    # Over a lossy wire each is decoded: of its many tensors, some are damaged in each way.
    for i, (what, update) in enumerate(changes if wire == "plain()" else changes[::7]):
        pulled(found, round_state, what, update, times=1 if i % 5 else 5)
    assert bits(found.closed(round_state)) == bits(without)
    honest = found.tallied()
    found.take(honest, found.updates[BAD])
    assert honest.aggregated == [BAD], honest.rejected


def test_damage_between_honest_updates_and_one_that_comes_twice(tmp_path: Path) -> None:
    found = Round("scaffold", "plain()", tmp_path)
    with_it, round_state = found.tallied(), found.tallied()
    found.take(with_it, found.updates[BAD])
    for _ in range(5):
        found.take(round_state, found.updates[BAD])
    for _, update in list(damaged(found.updates["client-1"]))[::9]:
        found.take(round_state, update)
    assert round_state.aggregated == [BAD] and bits(found.closed(round_state)) == bits(
        found.closed(with_it)
    )


@pytest.mark.parametrize("name", ["fedper", "scaffold"])
def test_a_late_answer_is_checked_as_any_other(name: str, tmp_path: Path) -> None:
    found = Round(name, "plain()", tmp_path, late=True)
    without, round_state = found.closed(found.tallied()), found.tallied()
    changes = [*[*damaged(found.updates[BAD])][::5], *forged(found)]
    for what, update in changes:
        before = state(round_state)
        for _ in range(2):
            found.take(round_state, update)
            assert state(round_state) == before and BAD not in round_state.records, what
    assert round_state.rejected[BAD].startswith("late, and ")
    assert bits(found.closed(round_state)) == bits(without)
    good = found.tallied()
    for _ in range(2):
        found.take(good, found.updates[BAD])
    assert good.responded == [BAD] and not good.aggregated and good.rejected[BAD] == "late"


WRONG: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    7,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    [],
    [1],
    {},
    {"a": 1},
)
FREE = {
    "steps": lambda x: type(x) is int and 0 <= x < 2**53,
    "loss": lambda x: x is None or (type(x) is float and x == x),
    "full": lambda x: type(x) is bool,
}
"""What is a client's own word: any value of the right kind."""


def lines(agreement: Agreement, line: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """A turn's line, forged in many ways."""
    capped = agreement.guarantee is not None and agreement.guarantee.max_weight
    lossless = agreement.method.compression.text == "plain()" and not capped
    for field in line:
        yield f"no {field}", {k: v for k, v in line.items() if k != field}
        for wrong in WRONG:
            same = type(wrong) is type(line[field]) and wrong == line[field]
            if not same and not FREE.get(field, lambda x: False)(wrong):
                yield f"{field} {wrong!r}", {**line, field: wrong}
    for field in ("round", "download_bytes", "upload_bytes", "weight", "version"):
        for step in (-1, 1, 1000):
            yield f"{field} by {step}", {**line, field: line[field] + step}
    for extra in ("changed", "aggregated", "rejected", "drift", "attention", "x", ""):
        yield f"extra {extra}", {**line, extra: {}}
    yield "a round's", {**line, "kind": "round", "changed": {}}
    yield "others' roles", {**line, "roles": "S" * len(line["roles"])}
    for place, letter in [*enumerate(line["roles"])][::4]:
        for other in "SKFH?s".replace(letter, ""):
            roles = line["roles"][:place] + other + line["roles"][place + 1 :]
            yield f"role {place} {other}", {**line, "roles": roles}
        own, mark = letter in "KH", slice(16 * place, 16 * place + 16)
        for field in ("before", "after"):
            for put in ("0" * 16, "g" * 16, "A" * 16):
                free = own and put == "0" * 16 and letter == "K"
                said = line[field][: mark.start] + put + line[field][mark.stop :]
                exact = field == "before" or letter != "S" or lossless
                if not free and (exact or put != "0" * 16):
                    yield f"{field} {place} {put[0]}", {**line, field: said}
    for field in ("before", "after", "roles"):
        yield f"shorter {field}", {**line, field: line[field][:-1]}
        yield f"longer {field}", {**line, field: line[field] + line[field][-1:]}
    missed = {**line, "missed": []}
    for change in ({"client": "client-1"}, {"round": 99}, {"round": 1}, {"phase": "another"}):
        yield f"missed {change}", {**line, "missed": [{**missed, **change}]}
    yield "missed itself", {**line, "missed": [missed]}
    yield "missed twice deep", {**line, "missed": [{**missed, "missed": [missed]}]}
    yield "missed forged", {**line, "missed": [{**missed, "roles": "S" * len(line["roles"])}]}
    for scores in ([["encoder", 0, 1e200]], [["encoder", 99, 1.0]], [["encoder", 0, 1.0]] * 2):
        yield f"scores {scores}", {**line, "scores": scores}
    yield "traits", {**line, "traits": {"site": "a"}}
    yield "nothing", {}


def forged(found: Round) -> Iterator[tuple[str, Update]]:
    update = found.updates[BAD]
    for what, line in lines(found.fed.agreement, update.ledger_line):
        if line != update.ledger_line:
            yield what, replace(update, ledger_line=line)


@pytest.mark.parametrize("name", [*METHODS])
def test_a_forged_line_is_a_rejected_update(name: str, tmp_path: Path) -> None:
    found = Round(name, "plain()", tmp_path)
    without, round_state = found.closed(found.tallied()), found.tallied()
    tries = list(forged(found))
    assert len(tries) >= 200
    for what, update in tries:
        found.take(round_state, update)
        assert BAD not in round_state.aggregated, what
        assert round_state.rejected.pop(BAD), what
    assert bits(found.closed(round_state)) == bits(without)


def test_a_line_over_a_lossy_wire_is_held_to_the_rest(tmp_path: Path) -> None:
    found = Round("fedper", "bf16()", tmp_path)
    round_state = found.tallied()
    for what, update in forged(found):
        found.take(round_state, update)
        assert BAD not in round_state.aggregated, what


def carried(message: Message) -> Message:
    """A message as it comes out of Flower's records."""
    return from_records(to_records(message))


@pytest.mark.parametrize("name", ["fedper", "scaffold", "together"])
def test_a_forged_line_that_flower_carries_is_a_rejected_update(name: str, tmp_path: Path) -> None:
    found = Round(name, "plain()", tmp_path)
    without, round_state = found.closed(found.tallied()), found.tallied()
    carrier = ServerLoop(None, found.fed.server)  # type: ignore[arg-type]
    tried = 0
    for what, update in [*forged(found), *[*damaged(found.updates[BAD])][::11]]:
        try:
            message = carried(update_message(update))
        except FedplanError:
            continue  # what no message holds
        carrier._accept_reply(round_state, BAD, message)  # pyright: ignore[reportPrivateUsage]
        assert BAD not in round_state.aggregated, what
        assert round_state.rejected.pop(BAD), what
        tried += 1
    assert tried >= 200
    assert bits(found.closed(round_state)) == bits(without)
    carrier._accept_reply(round_state, BAD, carried(update_message(found.updates[BAD])))  # pyright: ignore[reportPrivateUsage]
    assert BAD in round_state.aggregated


def test_what_is_the_clients_own_word_is_taken_as_such(tmp_path: Path) -> None:
    found = Round("fedper", "plain()", tmp_path)
    update = found.updates[BAD]
    own = update.ledger_line["roles"].index("K")
    after = update.ledger_line["after"]
    said = after[: 16 * own] + "0" * 16 + after[16 * own + 16 :]
    for change in ({"steps": 9}, {"loss": None}, {"loss": -1.0}, {"after": said}):
        round_state = found.tallied()
        found.take(round_state, replace(update, ledger_line={**update.ledger_line, **change}))
        assert round_state.aggregated == [BAD], round_state.rejected


POLLS: dict[str, Callable[[Any], Any]] = {
    "overflow": lambda block: 1.7e308,
    "nan": lambda block: float("nan"),
    "inf": lambda block: float("inf"),
    "-overflow": lambda block: -1.7e308,
}


@pytest.mark.parametrize("kind", POLLS)
def test_a_poll_that_cannot_be_added_is_left_out(kind: str, tmp_path: Path) -> None:
    found = Round("together", "plain()", tmp_path)
    blocks = found.fed.agreement.blocks
    good = {block: float(block.number) for block in blocks}
    bad = {block: POLLS[kind](block) for block in blocks}
    strange = {type(blocks[0])("elsewhere", 3): 1.0, **good}
    polls = {"client-0": bad, "client-1": good, "client-2": bad, "client-3": strange}
    found.fed.server.choose_blocks(found.round_state, polls)
    assert all(dict(d.turn.scores or {}) == good for d in found.round_state.cohort.values())
    with pytest.raises(FedplanError, match="no layers can be chosen"):
        found.fed.server.choose_blocks(found.round_state, {"client-0": bad})


def test_lines_are_written_as_they_are_read(tmp_path: Path) -> None:
    from fedplan.federation.ledger.records import read_record, read_turn

    found = Round("alone", "plain()", tmp_path)
    for update in found.updates.values():
        assert read_turn(update.ledger_line).json() == update.ledger_line
    for line in (tmp_path / "ledger.jsonl").read_text().splitlines():
        assert read_record(json.loads(line)).json() == json.loads(line)
