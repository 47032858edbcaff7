# SPDX-License-Identifier: Apache-2.0
"""Forecast, messages and ledger say the same bytes: for every method, wire and runner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import duals
import pytest
import torch
import zoo
from clients import few, loss
from flwr.app import Context
from grids import InProcess
from settings import PROMPTED, SETTINGS

from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, TrainSetup
from fedplan.federation.endpoint import Endpoint
from fedplan.federation.identity import read_identity
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.records import RoundRecord, TurnRecord
from fedplan.federation.ledger.segments import read_segment
from fedplan.federation.server import Server
from fedplan.language.resolution import Participants
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.registry import METHODS, method_by_name
from fedplan.models.catalog import params_of
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.reports.forecasts import ByteRange, ClientForecast, forecast
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.rpc import Timeouts
from fedplan.runners.flower.server import ServerLoop
from fedplan.runners.local import Federation
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes
from fedplan.tensors.serialization import unpack_message
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import sgd

NIGHT = pytest.mark.nightly
WIRES = ("plain()", "delta()", "bf16()", "int8()", "pipe(delta(), topk(0.3), int8())")
ROUNDS, NAMES = 3, ("client-0", "client-1")
PACE = TrainArguments(sgd(), lr=1e-2, batch_size=2, steps=1)
SOON = Timeouts(sites=2.0, updates=60.0, reconnect=1.0, poll_interval=0.001)


class Played:
    """A method over a wire: its forecast, and each message that its run has really sent."""

    def __init__(self, name: str, wire: str, folder: Path) -> None:
        made = replace(method_by_name(name, SETTINGS.get(name)), compression=parse_codec(wire))
        self.made, self.folder, self.prompted = made, folder, name in PROMPTED
        self.agreement = Agreement("bytes", describe(self.model()), made, PACE)
        rows = duals.pictures_of(*NAMES) if self.prompted else few("bert", 2)
        self.rows, self.loss = rows, duals.ASKED.loss if self.prompted else loss

    def model(self) -> Any:
        torch.manual_seed(0)
        model = duals.build("clip") if self.prompted else zoo.build("bert")
        return self.made.adapt(model) if self.made.adapt else model

    def view(self) -> ClientForecast:
        phase_rule = self.made.phase_rule
        assert isinstance(phase_rule, PlannedPhases)
        phases = {name: number for name, number in phase_rule.after.items() if number < ROUNDS}
        found = forecast(
            self.made.plan, self.agreement.params, rounds=ROUNDS, phases=phases,
            participants=Participants({name: {} for name in NAMES}), wire_cost=self.agreement.wire_cost,
        )  # fmt: skip
        (view,) = found.clients
        return view

    def local(self) -> dict[tuple[str, int], tuple[int, int]]:
        whole = Federation(
            self.agreement, self.model(), self.rows, self.loss, self.folder,
            rounds=ROUNDS, keep_replies=True,
        )  # fmt: skip
        sent = dict[tuple[str, int], tuple[int, int]]()
        for number in range(1, ROUNDS + 1):
            round_state = whole.run_round()
            assert not round_state.rejected, round_state.rejected
            for name, request in round_state.cohort.items():
                answered = whole.clients[name].journal.reply_for(request.name)
                assert answered is not None
                sent[name, number] = nbytes(answered[0]), nbytes(request.values)
            whole.commit(round_state)
        return sent

    def flower(self) -> dict[tuple[str, int], tuple[int, int]]:
        start = get_values(self.model(), self.agreement.params)
        server = Server(
            self.agreement, start, self.folder, rounds=ROUNDS, roster={n: {} for n in NAMES}
        )
        agreed = replace(self.agreement, run=read_identity(self.folder).id)
        endpoints = {name: self._endpoint(agreed, name) for name in NAMES}
        up, down = dict[tuple[str, int], int](), dict[tuple[str, int], int]()

        def answer(context: Context, kind: str, message: Message) -> Message:
            name, number = str(context.node_config["name"]), server.global_state.round + 1
            reply = endpoints[name].answer(kind, message)
            came = nbytes(unpack_message(message)[0])
            down[name, number] = down.get((name, number), 0) + came
            if kind == "train":
                up[name, number] = nbytes(unpack_message(reply)[0])
            return reply

        grid = InProcess(client_app(answer), [{"name": name} for name in NAMES])
        ServerLoop(grid, server, SOON).run()
        return {each: (up[each], down[each]) for each in up}

    def _endpoint(self, agreed: Agreement, name: str) -> Endpoint:
        model = self.model()
        start = get_values(model, agreed.params)
        journal = Journal(client_state_folder(self.folder, name), keep_replies=True)
        setup = TrainSetup(
            model, self.loss, start, digest_initial_model(model, agreed.params, start)
        )
        client = Client(name, self.rows[name], journal, setup)
        return Endpoint(agreed, client, self.folder / "sites" / name)


def within(span: ByteRange, said: int) -> bool:
    """Whether bytes are those forecast: all of them, where nothing is left to choose."""
    return span[0] <= said <= span[1]


# By day each method goes over the plain wire in one process, and over one more by Flower's
# messages; at night over all of them, both ways.
LAWFUL = {
    n: [w for w in WIRES if w == WIRES[0] or method_by_name(n).lora_aggregation.is_separate]
    for n in METHODS
}
DAILY = {
    name: {(wires[0], "local"), (wires[1 + i % 4] if wires[1:] else wires[0], "flower")}
    for i, (name, wires) in enumerate(LAWFUL.items())
}
CASES = [
    pytest.param(name, wire, runner, marks=[] if (wire, runner) in DAILY[name] else [NIGHT])
    for name, wires in LAWFUL.items()
    for wire in wires
    for runner in ("local", "flower")
]


@pytest.mark.parametrize(("name", "wire", "runner"), CASES)
def test_forecast_messages_and_ledger_say_the_same_bytes(
    name: str, wire: str, runner: str, tmp_path: Path
) -> None:
    played = Played(name, wire, tmp_path)
    sent, view = getattr(played, runner)(), played.view()
    assert sent.keys() == {(client, n) for client in NAMES for n in range(1, ROUNDS + 1)}
    for (_, turn), (up, down) in sent.items():
        assert within(view.uploads[turn - 1], up), (wire, turn, view.uploads, up)
        assert within(view.downloads[turn - 1], down), (wire, turn, view.downloads, down)
    _, lines = read_segment(tmp_path / "ledger.jsonl")
    turns = {
        (t.client, t.round): (t.upload_bytes, t.download_bytes)
        for t in lines
        if isinstance(t, TurnRecord)
    }
    assert turns == sent, wire
    for line in lines:
        if isinstance(line, RoundRecord):
            here = [both for (_, n), both in sent.items() if n == line.round]
            assert (line.upload_bytes, line.download_bytes) == tuple(
                map(sum, zip(*here, strict=True))
            )


def test_riders_and_codecs_are_in_the_forecast() -> None:
    """A model of 22.1 MB: SCAFFOLD doubles that, and int8 takes a quarter."""
    params = params_of("vit-tiny-16")

    def up(made: Method) -> float:
        agreed = Agreement("two numbers", params, made, PACE)
        (view,) = forecast(made.plan, params, rounds=2, wire_cost=agreed.wire_cost).clients
        return round(view.uploads[0][1] / 1e6, 1)

    plain, int8 = method_by_name("fedavg"), parse_codec("int8()")
    assert up(plain) == 22.1
    assert up(method_by_name("scaffold")) == 44.2
    assert up(replace(plain, compression=int8)) == 5.5
