# SPDX-License-Identifier: Apache-2.0
"""What a param's value is when its owner changes: all transitions, runners and ways to be away.

The model has a param for each sequence of three roles, two rounds of each, so that every
transition is met with every role before it. What is expected is plain arithmetic on dicts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import pytest
import torch
from flwr.app import Context
from grids import InProcess
from torch import Tensor, nn

import fedplan as fp
from fedplan.audits.ledger import verify_ledger
from fedplan.federation import messages
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, TrainSetup
from fedplan.federation.endpoint import Endpoint, open_journal, read_personal_model
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.events import CommittedRound
from fedplan.federation.messages import Request, Update
from fedplan.federation.participation import Participation, Timeouts
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.language.parts import named
from fedplan.methods.method import Method
from fedplan.models.params import Kind, Param
from fedplan.models.values import get_values
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.server import ServerLoop
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.message import Message
from fedplan.training.fit import Fit, FitResult, Job, TrainArguments

STEPS = {"s": fp.share, "k": fp.keep, "f": fp.freeze, "h": fp.hold}
KEYS = ["p" + "".join(letters) for letters in product(STEPS, repeat=3)]
PARAMS = tuple(Param(key, Kind.MLP, (1,)) for key in KEYS)
ROUNDS = 6
CLIENTS = {
    "mover": 1.0,
    "whole": 2.0,
    "absent": 4.0,
    "newcomer": 8.0,
    "lost": 16.0,
    "forgets": 32.0,
}
AWAY = {("absent", 3), ("absent", 5), *(("newcomer", n) for n in (1, 2, 3))}
LOST = {("lost", n) for n in (1, 3, 5)}
FORGETS = {("forgets", n) for n in (3, 5)}
SOON = Timeouts(sites=2.0, updates=60.0, reconnect=0.1, poll_interval=0.001, tries=2)
Values = dict[str, float]


def letter(key: str, client: str, number: int) -> str:
    """The role of a param: that of its name, but one client shares all, so that all moves."""
    return "s" if client == "mover" else key[1:][(number - 1) // 2]


def plan() -> fp.Plan:
    forms = ("p{}??", "p?{}?", "p??{}")
    stages = [[step(named(form.format(x))) for x, step in STEPS.items()] for form in forms]
    later = [fp.when(fp.after(2 * i), fp.chain(*stages[i])) for i in (1, 2)]
    return fp.chain(*stages[0], *later, fp.when(fp.client_in("mover"), fp.share()))


@dataclass
class Oracle:
    """What each turn starts from, and what all have in the end, in plain numbers."""

    clients: list[str]
    global_state: Values = field(default_factory=lambda: dict.fromkeys(KEYS, 0.0))
    homes: dict[str, Values] = field(default_factory=dict[str, Values])
    starts: dict[tuple[str, int], Values] = field(default_factory=dict[tuple[str, int], Values])
    personal: dict[tuple[str, int], Values] = field(default_factory=dict[tuple[str, int], Values])

    def play(self) -> Oracle:
        for number in range(1, ROUNDS + 1):
            sent: dict[str, list[float]] = {key: [] for key in KEYS}
            for client in (c for c in self.clients if (c, number) not in AWAY):
                start = self.starts[client, number] = self.model(client, number)
                for key, value in start.items():
                    role = letter(key, client, number)
                    after = value + CLIENTS[client] if role in "sk" else value
                    if role in "kh":
                        self.homes[client][key] = after
                    if role == "s" and (client, number) not in LOST:
                        sent[key].append(after)
            self.global_state |= {key: sum(v) / len(v) for key, v in sent.items() if v}
            self.personal |= {(c, number): self.model(c, number) for c in self.clients}
        return self

    def model(self, client: str, number: int) -> Values:
        home = self.homes.setdefault(client, {})
        return {
            key: home.get(key, value) if letter(key, client, number) in "kh" else value
            for key, value in self.global_state.items()
        }


class Rows:
    """Rows that say whose they are."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 1

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {}


class Played:
    """A run whose fit adds a number to all that is trained, and notes what it starts from."""

    def __init__(self, folder: Path, clients: list[str]) -> None:
        self.folder, self.clients, self.number = folder, clients, 0
        self.starts, self.downs = dict[tuple[str, int], Values](), list[Request]()
        self.agreement = Agreement(
            "owners", PARAMS, Method(plan(), client_hooks=(self.noting,)), TrainArguments()
        )

    def noting(self, _: Fit) -> Fit:
        def fit(job: Job) -> FitResult:
            turn = job.examples.name, self.number  # type: ignore[attr-defined]
            start = numbers(job.start)
            assert self.starts.setdefault(turn, start) == start, "the same turn starts the same"
            with torch.no_grad():
                for p, role in job.roles.items():
                    if role.is_trained:
                        job.model.get_parameter(p.name).add_(CLIENTS[turn[0]])
            return FitResult(loss=0.0, steps=1)

        return fit

    def clean(self) -> bool:
        return verify_ledger(self.agreement, read_json_lines(self.folder / "ledger.jsonl")) == []

    def cohort(self, round_state: RoundState) -> None:
        self.downs += round_state.cohort.values()


@dataclass(frozen=True)
class Calendar(Participation):
    """Who takes part, as it is written above."""

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        return [name for name in roster if (name, number) not in AWAY]


def numbers(values: dict[str, Tensor]) -> Values:  # type: ignore[type-arg]
    return {key: round(values[key].item(), 4) for key in KEYS if key in values}


def model() -> nn.Module:
    whole = nn.Module()
    for key in KEYS:
        whole.register_parameter(key, nn.Parameter(torch.zeros(1)))
    return whole


def loss(_: nn.Module, __: object) -> Tensor:
    return torch.zeros(())


class Local(Played):
    """It in one process; `killed`, each round is played twice, the first time for nothing."""

    def play(self, *, killed: bool, replies: bool) -> dict[tuple[str, int], Values]:
        personal = dict[tuple[str, int], Values]()
        whole = self.federation(replies)
        for number in range(1, ROUNDS + 1):
            self.number = number
            if killed:
                self.round(whole)
                whole = self.federation(replies)
            round_state = self.round(whole)
            self.cohort(round_state)
            whole.commit(round_state)
            personal |= {(c, number): numbers(whole.personal_values(c)) for c in self.clients}
        return personal

    def federation(self, replies: bool) -> Federation:
        rows = {name: Rows(name) for name in self.clients}
        made = Federation(
            self.agreement, model(), rows, loss, self.folder,
            rounds=ROUNDS, participation=Calendar(), keep_replies=replies,
        )  # fmt: skip
        made.server.take = self.losing(made.server.take)  # type: ignore[method-assign]
        return made

    def losing(self, calm: Callable[..., None]) -> Callable[..., None]:
        def take(round_state: RoundState, update: Update, **more: bool) -> None:
            if (update.client, self.number) not in LOST:
                calm(round_state, update, **more)

        return take

    def round(self, whole: Federation) -> RoundState:
        for name in (c for c in self.clients if (c, self.number) in FORGETS):
            whole.clients[name] = whole.clients.make_client(name, {}, {})
        round_state = whole.run_round()
        whole.clients.pinned.clear()
        return round_state


class Flower(Played):
    """It over a grid; `killed`, every site and, after each round, the server begins anew."""

    def play(self, *, killed: bool) -> None:
        self.killed, self.agreement = killed, self.server(1).agreement
        self.endpoints = {name: self.endpoint(name) for name in self.clients}
        grid = InProcess(client_app(self.answer), [{"name": name} for name in self.clients])
        for number in range(1, ROUNDS + 1):
            server = self.server(number)
            if killed:
                server.close_round = self.interrupt  # type: ignore[method-assign]
                with pytest.raises(KeyboardInterrupt):
                    ServerLoop(grid, server, SOON).run()
                server = self.server(number)
            server.commit = self.telling(server.commit)  # type: ignore[method-assign]
            ServerLoop(grid, server, SOON).run()

    def telling(self, calm: Callable[..., CommittedRound]) -> Callable[..., CommittedRound]:
        def commit(round_state: RoundState) -> CommittedRound:
            self.cohort(round_state)
            return calm(round_state)

        return commit

    def interrupt(self, round_state: RoundState) -> None:
        raise KeyboardInterrupt

    def server(self, rounds: int) -> Server:
        roster = {name: dict[str, str]() for name in self.clients}
        start = get_values(model(), PARAMS)
        return Server(
            self.agreement,
            start,
            self.folder,
            rounds=rounds,
            roster=roster,
            participation=Calendar(),
        )

    def endpoint(self, name: str) -> Endpoint:
        whole, folder = model(), self.folder / "sites" / name
        start = get_values(whole, PARAMS)
        journal = open_journal(folder)
        setup = TrainSetup(whole, loss, start, digest_initial_model(whole, PARAMS, start))
        site = Client(name, Rows(name), journal, setup)
        return Endpoint(self.agreement, site, folder)

    def answer(self, context: Context, kind: str, message: Message) -> Message:
        name = str(context.node_config["name"])
        if kind != "train":
            return self.endpoints[name].answer(kind, message)
        down = messages.read_request(message)
        self.number = down.turn.round
        if (name, self.number) in FORGETS and not down.full:
            shutil.rmtree(self.folder / "sites" / name / "received", ignore_errors=True)
            self.endpoints[name] = self.endpoint(name)
        if self.killed:
            self.endpoints[name] = self.endpoint(name)
        found = self.endpoints[name].answer(kind, message)
        if (name, self.number) in LOST:
            raise RuntimeError("its answer is lost")
        return found


GROUPS = {"moved": list(CLIENTS), "alone": [c for c in CLIENTS if c != "mover"]}
"""With a client that shares all in each turn, and without it."""


def close(found: dict[tuple[str, int], Values], wanted: dict[tuple[str, int], Values]) -> None:
    assert found.keys() == wanted.keys()
    for turn, values in wanted.items():
        wrong = {k: (found[turn].get(k), v) for k, v in values.items() if found[turn].get(k) != v}
        assert not {k: (f, v) for k, (f, v) in wrong.items() if f is None or abs(f - v) > 2e-3}, (
            turn
        )


def once(run: Played) -> None:
    """Of what is a client's own the federation's value comes down once, and nothing goes up."""
    settled = dict[str, set[str]]()
    for down in run.downs:
        client, number = down.turn.client, down.turn.round
        known = settled.setdefault(client, set())
        if down.full:
            known.clear()
        own = {key for key in KEYS if letter(key, client, number) in "kh"}
        assert not known & own & down.values.keys(), (client, number)
        if (client, number) not in LOST:
            known |= own


@pytest.mark.parametrize("clients", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("replies", [False, True])
def test_in_one_process(clients: list[str], killed: bool, replies: bool, tmp_path: Path) -> None:
    run, wanted = Local(tmp_path, clients), Oracle(clients).play()
    close(run.play(killed=killed, replies=replies), wanted.personal)
    close(run.starts, wanted.starts)
    once(run)
    assert run.clean()


@pytest.mark.parametrize("clients", GROUPS.values(), ids=GROUPS)
@pytest.mark.parametrize("killed", [False, True])
def test_over_flower(clients: list[str], killed: bool, tmp_path: Path) -> None:
    run, wanted = Flower(tmp_path, clients), Oracle(clients).play()
    run.play(killed=killed)
    close(run.starts, wanted.starts)
    once(run)
    assert run.clean()
    for name in clients:
        # A site's own model is what its last turn began with, and what that made of its own.
        last, found = ROUNDS, numbers(read_personal_model(run.agreement, tmp_path / "sites" / name))
        own = [key for key in KEYS if letter(key, name, last) in "kh"]
        model = wanted.starts[name, last] | {key: wanted.homes[name][key] for key in own}
        close({(name, last): found}, {(name, last): {k: model[k] for k in found}})
        assert found.keys() >= {key for key in own if set(key[1:]) & set("sk")}
