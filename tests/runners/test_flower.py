# SPDX-License-Identifier: Apache-2.0
"""Carried by Flower's messages, a federation has the bits that it has in one process."""

from __future__ import annotations

import random
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from clients import GUARANTEES, RUN, Few, few, know_secrets, loss
from flwr.app import Context
from flwr.proto.node_pb2 import NodeInfo
from grids import InProcess
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from torch import nn

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation import messages
from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, ClientPrivacy, TrainSetup, make_example_guard
from fedplan.federation.endpoint import Endpoint
from fedplan.federation.identity import read_identity
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.egress import Account, Limits, bytes_by_part, read_egress
from fedplan.federation.messages import Request, Update
from fedplan.federation.participation import Timeouts
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.language.parser import parse
from fedplan.language.predicates import Turn
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Block
from fedplan.models.values import get_values
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.records import SMALL_BYTES, from_records, to_records
from fedplan.runners.flower.rpc import SiteRpc
from fedplan.runners.flower.server import ServerLoop, hello_message
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.tensors import serialization
from fedplan.tensors.message import BrokenMessage, Message
from fedplan.tensors.named import digests
from fedplan.tensors.serialization import MAX_HEADER_BYTES, SerializationError
from fedplan.training.fit import TrainArguments

PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)
ROUNDS = 5
NAMES = ("client-0", "client-1", "client-2")
METHODS: dict[str, Method] = {
    "fedavg": method_by_name("fedavg"),
    "fedper": method_by_name("fedper"),
    "fedfrozen": method_by_name("fedfrozen", {"warmup": 2}),
    "scaffold": method_by_name("scaffold"),
    "together": method_by_name("safl", {"k": 1, "joint_choice": True}),
    "fedex-lora": method_by_name("fedex-lora", {"rank": 2}),
    "parts": Method(
        parse('chain(freeze(), by("site", {"a": share(blocks(0))}, share(blocks(1))))')
    ),
}
HIDDEN = {name: method_by_name("safl", {"k": 1, "joint_choice": True}) for name in GUARANTEES}
PARTS = 'chain(freeze(), by("site", {"a": share(blocks(0))}, share(blocks(0) | blocks(1))))'
GUARDED = {"ruled": Method(parse(PARTS)), "bounded": Method(parse(PARTS))}
DEFENCES = {
    "ruled": Defence(rule="trimmed-mean", max_norm_ratio=1.01),
    "bounded": Defence(max_weight_fraction=0.4, max_norm_ratio=1.01),
}
TRAITS = {"client-1": {"site": "a"}}
SOON = Timeouts(sites=2.0, updates=60.0, reconnect=1.0, poll_interval=0.01)


def model_of(made: Method) -> nn.Module:
    """The same at every end."""
    torch.manual_seed(0)
    return made.adapt(zoo.build("bert")) if made.adapt else zoo.build("bert")


def make_agreement(made: Method) -> Agreement:
    guarantee = next((GUARANTEES[name] for name, each in HIDDEN.items() if each is made), None)
    defence = next((DEFENCES[name] for name, each in GUARDED.items() if each is made), Defence())
    run, params = RUN if guarantee else "", describe(model_of(made))
    return Agreement("flower", params, made, PACE, guarantee, run=run, defence=defence)


def endpoint(
    made: Method, folder: Path, name: str, limits: Limits | None = None, *, run: str = ""
) -> Endpoint:
    """A site with a model, a disk and rows of its own, in the run of its folder."""
    run = run or read_identity(folder).id
    agreement, model = replace(make_agreement(made), run=run), model_of(made)
    start = get_values(model, agreement.params)
    know_secrets(folder, NAMES)
    account = Account(folder / "privacy" / name, limits)
    site = Client(
        name=name,
        examples=few("bert", 3)[name],
        journal=Journal(client_state_folder(folder, name), keep_replies=True),
        setup=TrainSetup(model, loss, start, digest_initial_model(model, agreement.params, start)),
        traits=TRAITS.get(name, {}),
        privacy=ClientPrivacy(
            guard=make_example_guard(agreement, account.folder, account), account=account
        ),
    )
    return Endpoint(agreement, site, folder / "sites" / name)


class Run:
    """A run over an in-process grid. Sites are there again after each `Run` as after a kill."""

    def __init__(self, made: Method, folder: Path, **limits: Limits) -> None:
        self.folder, self.made = folder, made
        start = get_values(model_of(made), make_agreement(made).params)
        agreement = make_agreement(made)
        # Traits of clients that are hidden stand in the study; others tell theirs.
        public = agreement.guarantee is not None and agreement.guarantee.unit == "client"
        roster = {name: TRAITS.get(name, {}) if public else {} for name in NAMES}
        folder.mkdir(exist_ok=True)
        self.server = Server(agreement, start, folder, rounds=ROUNDS, roster=roster)
        self.endpoints = {
            name: endpoint(made, folder, name, limits.get(name[-1:])) for name in NAMES
        }
        # Nodes come in another order than the roster's.
        nodes = [{"name": name} for name in reversed(NAMES)]
        self.grid = InProcess(client_app(self.answer), nodes)

    def answer(self, context: Context, kind: str, message: Message) -> Message:
        return self.endpoints[str(context.node_config["name"])].answer(kind, message)

    def carry(self, patience: Timeouts | None = None, *, quorum: int = 1) -> Server:
        ServerLoop(self.grid, self.server, patience or SOON, quorum=quorum).run()
        return self.server

    def rounds(self) -> list[dict[str, Any]]:
        return [x for x in read_json_lines(self.folder / "ledger.jsonl") if "changed" in x]

    def clean(self) -> bool:
        lines = read_json_lines(self.folder / "ledger.jsonl")
        return verify_ledger(self.server.agreement, lines) == []


def same(one: Run, other: Run) -> bool:
    """Whether two runs have the same world, ledger and homes, to the bit."""
    homes = (
        [digests(run.endpoints[name].site.journal.client_state()[0]) for name in NAMES]
        for run in (one, other)
    )
    ledgers = ((run.folder / "ledger.jsonl").read_bytes() for run in (one, other))
    worlds = (digests(run.server.global_state.values) for run in (one, other))
    return len(set(ledgers)) == 1 and next(worlds) == next(worlds) and next(homes) == next(homes)


def _after(server: Server, count: int) -> None:
    """Have a server end with its so-maniest answer in hand, uncounted."""
    left, calm = [count], server.take

    def take(round_state: RoundState, update: Update, **more: bool) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        calm(round_state, update, **more)

    server.take = take  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(METHODS["fedper"], tmp_path_factory.mktemp("calm"))
    run.carry()
    return run


@pytest.mark.parametrize("kill", [1, 2, 5, 9, 15])
def test_a_server_that_ends_in_a_round_goes_on_with_the_same_bits(
    kill: int, tmp_path: Path, calm: Run
) -> None:
    killed = Run(METHODS["fedper"], tmp_path)
    _after(killed.server, kill)
    with pytest.raises(KeyboardInterrupt):
        killed.carry()
    del killed
    again = Run(METHODS["fedper"], tmp_path)
    again.carry()
    assert same(again, calm) and again.clean()


@pytest.mark.parametrize("name", ["fedadam", "scaffold"])
def test_rounds_can_be_added_with_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = Run(method_by_name(name), tmp_path / "whole")
    whole.carry()
    for rounds in (1, ROUNDS):
        parts = Run(method_by_name(name), tmp_path / "parts")
        parts.server.rounds = rounds
        parts.carry()
    assert same(parts, whole) and parts.clean()
    assert {k: digests(m) for k, m in parts.server.global_state.memory.items()} == {
        k: digests(m) for k, m in whole.server.global_state.memory.items()
    }


class Failing(Run):
    """A run in which some answers, from the first training on, are lost or spoilt."""

    def __init__(self, made: Method, folder: Path, faults: dict[int, str], name: str) -> None:
        super().__init__(made, folder)
        self.faults, self.name, self.turns, self.rounds_fail = faults, name, 0, False

    def answer(self, context: Context, kind: str, message: Message) -> Message:
        if kind != "train" or context.node_config["name"] != self.name:
            return super().answer(context, kind, message)
        self.turns += 1
        number = messages.read_request(message).turn.round if self.rounds_fail else self.turns
        fault = self.faults.get(number, "")
        if fault == "before":
            raise RuntimeError("killed before its turn")
        found = super().answer(context, kind, message)
        if fault == "after":
            self.endpoints[self.name] = endpoint(self.made, self.folder, self.name)
            raise RuntimeError("killed after its turn, before it could say so")
        if fault == "cache":
            shutil.rmtree(self.endpoints[self.name].folder / "received")
            self.endpoints[self.name] = endpoint(self.made, self.folder, self.name)
        if fault == "spoilt":
            return Message(found.header, (b"no tensors",))
        return found


def test_a_site_that_is_killed_before_or_after_its_turn_has_the_same_bits(
    tmp_path: Path, calm: Run
) -> None:
    faults = {1: "before", 3: "after", 4: "before", 6: "after"}
    run = Failing(METHODS["fedper"], tmp_path, faults, "client-1")
    run.carry()
    assert same(run, calm) and run.clean()


def test_a_site_that_loses_its_cache_says_so_and_is_sent_all(tmp_path: Path) -> None:
    whole = Run(METHODS["fedfrozen"], tmp_path / "whole")
    whole.carry()
    run = Failing(METHODS["fedfrozen"], tmp_path / "lost", {3: "cache"}, "client-1")
    run.carry()
    assert (
        digests(run.server.global_state.values) == digests(whole.server.global_state.values)
        and run.clean()
    )
    lines = read_json_lines(tmp_path / "lost/ledger.jsonl")
    told = [bool(line.get("full")) for line in lines if line.get("client") == "client-1"]
    assert told == [False, False, False, True, False]


@pytest.mark.parametrize("fault", ["before", "after", "spoilt"])
def test_a_turn_that_is_never_heard_of_is_told_with_the_next(fault: str, tmp_path: Path) -> None:
    run = Failing(METHODS["fedper"], tmp_path, {2: fault, 3: fault}, "client-1")
    run.rounds_fail = True
    run.carry(quorum=2)
    assert run.server.global_state.round == ROUNDS and run.clean()
    assert [sorted(x["rejected"]) for x in run.rounds()] == [[], ["client-1"], ["client-1"], [], []]
    lines = [x for x in read_json_lines(tmp_path / "ledger.jsonl") if x.get("client") == "client-1"]
    missed = [m["round"] for line in lines for m in line.get("missed", ())]
    assert missed == ([] if fault == "before" else [2, 3])


def test_a_site_stops_at_the_limits_it_has_set(tmp_path: Path) -> None:
    most = sum(p.nbytes for p in make_agreement(METHODS["fedavg"]).exchanged)
    few_bytes = Limits(bytes=3 * most + 1)
    run = Run(METHODS["fedavg"], tmp_path, **{"1": Limits(rounds=2), "2": few_bytes})
    run.carry(replace(SOON, updates=0.5), quorum=1)
    told = [x["rejected"] for x in run.rounds()]
    assert [sorted(x) for x in told] == [[], [], ["client-1"], *[["client-1", "client-2"]] * 2]
    assert told[2]["client-1"].startswith("refused: limit-rounds (its limit of replies is reached")
    lines = read_egress(tmp_path / "sites/client-2")
    assert (
        sum(bytes_by_part(lines).values())
        == sum(line["upload_bytes"] for line in lines)
        == 3 * most
    )


def test_a_site_stops_at_the_epsilon_it_has_set(tmp_path: Path) -> None:
    cost = GUARANTEES["cloaked"].forecast_epsilon(2)
    low, none = Limits(epsilon=cost), Limits(epsilon=1.0)
    Run(HIDDEN["cloaked"], tmp_path / "a", **{"1": low}).carry()
    run = Run(HIDDEN["cloaked"], tmp_path / "a", **{"1": low})
    counted = [set(line["aggregated"]) for line in run.rounds()]
    assert counted == [set(NAMES)] * 2 + [{NAMES[0], NAMES[2]}] * 3
    why = run.rounds()[2]["rejected"][NAMES[1]]
    assert why.startswith("refused: limit-epsilon") and run.clean()
    other = Run(METHODS["fedavg"], tmp_path / "b", **{"1": none})
    other.carry()
    assert other.rounds()[0]["rejected"][NAMES[1]].startswith("refused: unprotected")


@pytest.mark.parametrize("name", ["veiled", "weighed"])
def test_no_number_of_rows_is_in_any_message(name: str, tmp_path: Path) -> None:
    counts = dict(zip(NAMES, (123_457, 274_177, 380_299), strict=True))
    run, seen = Run(HIDDEN[name], tmp_path), list[bytes]()
    for client, count in counts.items():
        run.endpoints[client].site.examples = Few("bert", 0, count)

    def answer(context: Context, kind: str, message: Message) -> Message:
        said = Run.answer(run, context, kind, message)
        seen.extend((message.header, *message.blobs, said.header, *said.blobs))
        return said

    run.grid = InProcess(client_app(answer), [{"name": client} for client in NAMES])
    run.carry()
    whole = b"".join(seen)
    assert len(whole) > 10**5
    for count in counts.values():
        kinds = (struct.pack(f"<{kind}", count) for kind in "iqfd")
        assert not any(pattern in whole for pattern in (str(count).encode(), *kinds))


@pytest.mark.parametrize("name", [*METHODS, *HIDDEN, *GUARDED])
def test_the_same_bits_as_in_one_process(name: str, tmp_path: Path) -> None:
    made = (METHODS | HIDDEN | GUARDED)[name]
    for where in ("local", "flower"):
        know_secrets(tmp_path / where, NAMES)
    whole = Federation(
        make_agreement(made),
        model_of(made),
        few("bert", 3),
        loss,
        tmp_path / "local",
        rounds=ROUNDS,
        traits=TRAITS,
        keep_replies=True,
    )
    for _ in range(ROUNDS):
        whole.commit(whole.run_round())
    run = Run(made, tmp_path / "flower")
    server = run.carry()
    assert digests(server.global_state.values) == digests(whole.global_state.values)
    assert (server.global_state.choice, server.global_state.clipping_norm) == (
        whole.global_state.choice,
        whole.global_state.clipping_norm,
    )
    one, other = (tmp_path / where / "ledger.jsonl" for where in ("local", "flower"))
    assert one.read_bytes() == other.read_bytes()
    for client in NAMES:
        homes = (
            Journal(
                client_state_folder(tmp_path / where, client), keep_replies=True
            ).client_state()[0]
            for where in ("local", "flower")
        )
        first, second = map(digests, homes)
        assert first == second


class Greedy(Server):
    """A server that asks for what is not its to ask."""

    def __init__(self, run: Run, change: Callable[[Request], Request]) -> None:
        start = next(iter(run.endpoints.values())).site.setup.start
        roster = dict(run.server.roster)
        super().__init__(make_agreement(run.made), start, run.folder, rounds=1, roster=roster)
        self.change = change

    def begin_round(self) -> RoundState:
        round_state = super().begin_round()
        round_state.cohort = {name: self.change(down) for name, down in round_state.cohort.items()}
        return round_state


HEAD = "classifier.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda d: replace(d, values=d.values | {HEAD: torch.zeros(1)}),
            "refused: unexpected-values",
        ),
        (lambda d: replace(d, versions=d.versions | {HEAD: 1}), "refused: unexpected-values"),
        (
            lambda d: replace(d, agreement_digest="another plan"),
            "server and site must run the same one",
        ),
        (lambda d: replace(d, name="flower/other/1/client-0"), "server and site must run"),
        (lambda d: replace(d, turn=replace(d.turn, round=9)), "server and site must run"),
        (
            lambda d: replace(d, values={k: v.double() for k, v in d.values.items()}),
            "refused: unexpected-values",
        ),
    ],
)
def test_a_server_that_asks_for_more_is_refused(
    change: Callable[[Request], Request], words: str, tmp_path: Path
) -> None:
    run = Run(METHODS["fedper"], tmp_path)
    run.server = Greedy(run, change)
    with pytest.raises(FedplanError, match=f"round 1 has 0 answers and needs 1: .*{words}"):
        ServerLoop(run.grid, run.server, SOON).run()
    lines = [x for name in NAMES for x in read_egress(tmp_path / "sites" / name)]
    assert lines and not any(x["upload_bytes"] for x in lines), (
        "no bytes but the greeting have left"
    )


def test_who_does_not_come_is_named(tmp_path: Path) -> None:
    held = endpoint(METHODS["fedavg"], tmp_path, "client-0", run="0" * 16)
    grid = InProcess(client_app(lambda _, kind, message: held.answer(kind, message)), [{}])
    calls = SiteRpc(
        grid, ["client-0", "client-1"], replace(SOON, sites=1.0), hello_message("0" * 16, None)
    )
    with pytest.raises(FedplanError, match="not connected: client-1"):
        calls.wait_for_sites(2)
    calls.registered_names = lambda: ["client-0"]
    calls.wait_for_sites(1)  # who cannot come is not waited for


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool)


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    ),
    st.integers(1, 64),
)
@settings(max_examples=often(300))
def test_what_is_wrapped_comes_out(
    shapes: dict[str, tuple[torch.dtype, list[int]]], size: int
) -> None:
    tensors = {name: torch.ones(shape).to(dtype) for name, (dtype, shape) in shapes.items()}
    before, serialization.BLOB_BYTES = serialization.BLOB_BYTES, size
    try:
        scores = {Block("encoder", 3): 0.25}
        down = Request("r", "a", Turn(3, "c", "frozen", {"x": "y"}, scores), tensors, {"k": 2})
        update = Update("c", "r", "a", tensors, 7, {"weight": 7, "upload_bytes": 1})
        for sent, found in (
            (down, messages.read_request(from_records(to_records(messages.request_message(down))))),
            (
                update,
                messages.read_update(from_records(to_records(messages.update_message(update)))),
            ),
        ):
            assert found.values.keys() == sent.values.keys()
            for name, value in found.values.items():
                assert value.dtype == tensors[name].dtype and torch.equal(value, tensors[name])
        assert messages.read_request(messages.request_message(down)).turn == down.turn
    finally:
        serialization.BLOB_BYTES = before


def test_no_piece_of_a_message_is_larger_than_the_proxy_lets_through() -> None:
    """A record travels in one request, of 8 MiB at most, unless it is one of arrays."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    message = Message(bytes(MAX_HEADER_BYTES), (bytes(SMALL_BYTES),))
    records = to_records(message)
    pieces = [each.deflate() for each in get_all_nested_objects(records).values()]
    assert max(map(len, pieces)) < 2**23 - 2**12
    assert from_records(records) == message


def test_another_apps_message_is_refused() -> None:
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    for records in (
        RecordDict(),
        RecordDict({"arrays": ArrayRecord(), "header": ConfigRecord({"fedplan": 3})}),
        RecordDict({"arrays": ArrayRecord(), "header": ConfigRecord({"fedplan": b"no"})}),
        to_records(messages.pack_message({}, {"client": 3})),
    ):
        with pytest.raises((SerializationError, BrokenMessage)):
            messages.read_update(from_records(records))


def test_a_site_with_another_plan_model_or_run_ends_its_own_part_alone(tmp_path: Path) -> None:
    run = Run(METHODS["fedavg"], tmp_path)
    odd = endpoint(METHODS["fedper"], tmp_path / "other", "client-1", run=run.server.agreement.run)
    run.endpoints["client-1"] = odd
    other = run.endpoints["client-2"]
    other.agreement = replace(other.agreement, start="another model")
    run.carry()
    for line in run.rounds():
        assert line["aggregated"] == ["client-0"]
        assert "agreed to" in line["rejected"]["client-1"]
        assert "agreed to" in line["rejected"]["client-2"]
    assert run.clean()


def test_a_run_of_which_too_few_agreed_says_who_did_not(tmp_path: Path) -> None:
    run = Run(METHODS["fedavg"], tmp_path)
    run.server.agreement = replace(run.server.agreement, start="the model")
    with pytest.raises(FedplanError, match="client-2: not requested: it starts from the model"):
        run.carry()
    assert not (tmp_path / "ledger.jsonl").read_bytes()


def test_a_node_that_takes_the_name_of_another_is_not_heard(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(METHODS["fedavg"], tmp_path)
    thief = {"name": "client-0", "thief": True}
    run.grid = InProcess(client_app(run.answer), [*({"name": n} for n in NAMES), thief])
    run.carry()
    assert run.clean() and all(line["aggregated"] == list(NAMES) for line in run.rounds())
    assert "says that it is 'client-0', as node" in caplog.text


class Registered(InProcess):
    """Nodes that were registered under names, as with keys."""

    names: tuple[str, ...] = ()

    def get_nodes(self) -> list[NodeInfo]:
        pairs = zip(self.contexts, self.names, strict=True)
        return [NodeInfo(node_id=node, name=name) for node, name in pairs]


def test_a_name_belongs_to_the_key_that_it_was_registered_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """West's key with the name of client-0, while the true one is away: nobody answers for it."""
    run = Run(METHODS["fedavg"], tmp_path)
    thief = {"name": "client-0", "thief": True}
    grid = Registered(client_app(run.answer), [{"name": n} for n in NAMES[1:]] + [thief])
    grid.names = (*NAMES[1:], "west")
    run.grid = grid
    run.carry()
    assert all(line["aggregated"] == list(NAMES[1:]) for line in run.rounds())
    assert "says that it is 'client-0'" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: Message(p.header, (*p.blobs, b"0" * 2**23)), "larger than the limit"),
        (lambda p: Message(p.header, p.blobs * 2), "in two blobs of one message"),
        (lambda p: Message(p.header[:-9], p.blobs), "not a message, or only its beginning"),
        (lambda p: Message(p.header), "is missing"),
        (lambda p: Message(b"", p.blobs), "not a message"),
    ],
)
def test_an_answer_that_is_too_large_or_no_answer_is_left_out_by_itself(
    spoil: Callable[[Message], Message], words: str, tmp_path: Path
) -> None:
    run = Run(METHODS["fedavg"], tmp_path)
    calm = run.answer

    def answer(context: Context, kind: str, message: Message) -> Message:
        found = calm(context, kind, message)
        bad = kind == "train" and context.node_config["name"] == "client-1"
        return spoil(found) if bad else found

    run.grid = InProcess(client_app(answer), [{"name": name} for name in NAMES])
    run.carry()
    for line in run.rounds():
        assert line["aggregated"] == ["client-0", "client-2"]
        assert words in line["rejected"]["client-1"]


class Unruly(InProcess):
    """A grid that gives answers late, in any order, twice, and is in trouble now and then."""

    def __init__(self, app: Any, configs: list[dict[str, Any]], seed: int) -> None:
        super().__init__(app, configs)
        self.draw, self.old = random.Random(seed), list[Any]()

    def pull_messages(self, message_ids: Any) -> list[Any]:
        if self.draw.random() < 0.2:
            raise ConnectionError("503, say")
        if self.draw.random() < 0.5:
            return []
        found = super().pull_messages(message_ids)
        self.old += found
        return found * self.draw.choice((1, 2))


@pytest.mark.parametrize("seed", range(4))
def test_answers_that_come_twice_late_and_in_any_order_change_nothing(
    seed: int, tmp_path: Path, calm: Run
) -> None:
    run = Run(METHODS["fedper"], tmp_path)
    run.grid = Unruly(client_app(run.answer), [{"name": name} for name in NAMES], seed)
    run.carry()
    assert same(run, calm) and run.clean()
