# SPDX-License-Identifier: Apache-2.0
"""A federation under faults drawn from a seed, in virtual time; it must end as an undisturbed one.

Server loop, gateways and endpoints of sites, and all files are real. A seed draws the study, the
network, kills of processes, failures of disks at any storage call, power cuts, damaged files, lost
keys, sites and SuperLinks that are away, jumps of the clock, and operators who stop and start the
server, and withdraw, refuse and approve the study late. Faults end after FAULTY_ACTS chances.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from calls import Calls, Killed, Process
from machines import Broken, Machine, SiteMachine
from network import Network, VirtualClock, Weather
from offers import remembered, study_of
from power import PowerDisk
from setting import Setting, agreement_of, start_values

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.evaluation import EvalConfig
from fedplan.federation.ledger import faults, segments
from fedplan.federation.ledger.status import ask_to_stop
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Participation, Timeouts
from fedplan.federation.server import Server
from fedplan.privacy.mechanisms import noise
from fedplan.runners.flower import rpc
from fedplan.runners.flower.server import ServerLoop
from fedplan.sites import approvals
from fedplan.storage import append_log, logs, store
from fedplan.storage import files as storage_files
from fedplan.storage.append_log import read_json_lines

PATIENCE = Timeouts(sites=600.0, updates=1e6, reconnect=1e9, poll_interval=5.0, tries=1000)
FAULTY_ACTS = 40
"""Chances of a fault after which none happens any more."""
STARTS = 80
"""Starts of a server after which the trial fails, since the federation makes no progress."""
MEMORY = Path("/dev/shm")
"""Folder in memory for trials, if it exists."""
ABOUT_SITES = ("start the run again", "sites are not connected")
"""Texts in errors of a server that are about sites, not about its own files."""
UNEQUAL = {"download_bytes", "full", "missed", "rejected", "warnings", "secagg"}
"""Fields of the ledger that disturbances may change."""


@dataclass(frozen=True)
class Plan:
    """Probability of each fault, drawn once for a trial.

    `asks`: a person at each site approves the study, not a rule. `encrypted`: state is encrypted.
    `confused`: after the first round the operator starts the server with another study, once.
    """

    weather: Weather
    asks: bool
    encrypted: bool
    kill_site: float
    kill_server: float
    fail_disk: float
    power: float
    damage: float
    disturb: float
    confused: bool = False

    @staticmethod
    def draw(rng: Random, seed: int = 0) -> Plan:
        """Draw a plan with few or many faults. `seed`: of draws that do not move those of `rng`."""
        rough = rng.choice((0.1, 0.3))
        weather = Weather(rng.choice((0.0, 0.05)), rng.choice((0.0, 0.2)), rng.choice((0.1, 60.0)))
        each = [rng.choice((0.0, rough, 2 * rough)) for _ in range(6)]
        confused = Random(f"confused {seed}").random() < 0.05
        return Plan(weather, rng.random() < 0.3, rng.random() < 0.3, *each, confused)


@dataclass
class Trial:
    """One federation in a folder; continues an existing one. Without `plan` nothing disturbs it.

    `faults`, `codes`: how often each fault and each error code occurred. `reached`: failpoints.
    `running`: name of the machine whose process runs. `stops`: by machine, the failpoint at which
    it dies once. `noticed`: why machines refused to work with damaged files, with the number
    of updates that it had sent before.
    """

    setting: Setting
    folder: Path
    rng: Random = field(default_factory=lambda: Random(0))
    plan: Plan | None = None
    acts: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    codes: Counter[str] = field(default_factory=Counter[str])
    stops: dict[str, str] = field(default_factory=dict[str, str])
    noticed: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    broken: Broken | None = None
    running: str = ""

    def __post_init__(self) -> None:
        names = self.setting.names
        self.clock, self.disk = VirtualClock(), PowerDisk()
        self.calls = Calls(self.disk)
        self.reached = self.calls.reached
        self.server = Machine(self, "server")
        self.sites = {name: SiteMachine(self, name) for name in names}
        self.disk.settle(self.folder)
        answer = {name: site.answer for name, site in self.sites.items()}
        self.network = Network(
            names, self.clock, self.rng, lambda name, *message: answer[name](*message)
        )
        self.agreement, self.mistaken = agreement_of(self.setting), False

    def draws(self, probability: float) -> bool:
        """Whether a fault with this probability happens now."""
        self.acts += 1
        return self.acts < FAULTY_ACTS and self.rng.random() < probability

    def disturb(self, site: SiteMachine) -> None:
        """Perhaps let a fault happen outside of processes, such as an act of an operator."""
        assert self.plan is not None
        if not self.draws(self.plan.disturb / 4):
            return None
        draw, seconds = self.rng.choice, self.rng.choice((10.0, 3000.0, 90000.0))
        act = draw((*DISTURBANCES, *FORBIDDEN)) if site.allowed else draw(DISTURBANCES)
        if act in FORBIDDEN:
            return site.decide(act)
        self.faults[act] += 1
        match act:
            case "site restarts":
                site.restart(seconds)
            case "site disconnected":
                site.disconnect(seconds)
            case "clock jumped":
                self.clock.offset += draw((-86400.0, -3600.0, 3600.0, 86400.0))
            case "link away":
                self.network.link_back = self.clock.now + seconds
            case "Flower run ended":
                self.network.ended = True
            case "disk full":
                draw((self.server, *self.sites.values())).full_until = self.clock.now + seconds
            case "key lost":
                site.harm(("key", "key.hex", "secret"))
                site.restart(seconds)
            case "older copy":
                if not self.setting.secure:  # a forgotten masked sum may be revealed twice
                    site.restart(seconds)
                    site.go_back()
            case "older copy of the server":
                self.server.wants_copy = not self.setting.secure
            case _:
                with self.calls.running(Process()):
                    ask_to_stop(self.server.place, at_once=act == "operator: stop at once")
        return None

    # -- the run

    def open_server(self, rounds: int) -> Server:
        """The server at its start."""
        fraction = self.setting.fraction
        return Server(
            self.agreement,
            start_values(),
            self.server.place,
            rounds=rounds,
            roster={name: {} for name in self.setting.names},
            participation=Participation(fraction) if fraction < 1 else None,
        )

    def run(self) -> Trial:
        """Run to the end: start the server again after each kill or error, as an operator does.

        Raises AssertionError if there is no progress, or if an error has no text for operators.
        """
        with virtual_machine(self):
            if self.plan is not None:
                self.network.weather = self.plan.weather
            if self.setting.joins:
                late = self.setting.names[-1]
                self.network.down.add(late)
                self.serve(self.setting.joins - 1, self.setting.quorum - 1)
                self.network.down.discard(late)
            if self.plan is not None and self.plan.confused:
                self.confuse()
            self.serve(self.setting.rounds, self.setting.quorum)
        return self

    def confuse(self) -> None:
        """Let an operator start the server with a changed study, and stop it after an hour."""
        self.serve(1, self.setting.quorum)
        self.faults["operator: another study"] += 1
        self.mistaken = True
        self.clock.at(3600.0, lambda: ask_to_stop(self.server.place, at_once=True))
        committed = self.serve_once(self.setting.rounds, self.setting.quorum)
        # A round that hides who takes part is closed with noise alone, too.
        assert not committed or self.setting.unit == "client", "sites answer another study"
        self.mistaken = False

    def run_to_stop(self) -> None:
        """Run until the server dies at its failpoint in `stops`; then all machines are off."""
        with virtual_machine(self):
            self.serve_once(self.setting.rounds, self.setting.quorum)
        assert not self.stops, "the server did not reach the point where it stops"
        for site in self.sites.values():
            site.gateway = None
        gc.collect(0)

    def serve(self, rounds: int, quorum: int) -> None:
        """Start servers until one has committed all `rounds`."""
        for _ in range(STARTS):
            if self.acts >= FAULTY_ACTS:
                self.network.weather = Weather()
            done = self.serve_once(rounds, quorum)
            gc.collect(0)
            if self.server.wants_copy and not done:
                self.server.go_back()
            self.server.wants_copy = False
            self.clock.sleep(60.0)
            if done:
                return
        raise AssertionError(f"no progress after {STARTS} starts: {self.faults} {self.codes}")

    def serve_once(self, rounds: int, quorum: int) -> bool:
        """Run a server until it ends or dies; return whether it has committed all rounds."""
        try:
            with self.server.process(self.plan.kill_server if self.plan else 0.0) as process:
                server, events = self.open_server(rounds), EventStream(self.server.place)
                study = study_of(self.setting.rounds, changed=self.mistaken)
                scoring = EvalConfig(on_clients=True, keep_best="global")
                loop = ServerLoop(
                    self.network,
                    server,
                    PATIENCE,
                    quorum=quorum,
                    study=study,
                    events=events,
                    scoring=scoring if self.setting.scores else None,
                )
                loop.rpc.renew_grid = self.network.renew
                with events.track_run(server, "simulated", PATIENCE, has_examples=False):
                    loop.run()
                return server.global_state.round == rounds
        except Killed:
            if self.plan is not None and self.draws(self.plan.damage):
                self.server.harm()
        except (FedplanError, OSError) as error:
            of_sites = any(text in str(error) for text in ABOUT_SITES)
            of_damage = self.server.damaged and not (process.happened or of_sites)
            if self.server.is_old or of_damage:
                self.server.restore(str(error))
            assert isinstance(error, FedplanError) or error.filename, repr(error)
            self.codes[f"server {getattr(error, 'code', 'disk')}"] += 1
        return False

    # -- what must hold at the end

    def outcome(self) -> dict[str, Any]:
        """Everything that must equal the undisturbed run."""
        place, server = self.server.place, self.open_server(self.setting.rounds)
        state, files = server.global_state, server._files
        lines = [json.loads(line) for line in segments.ledger_lines(place, files)]
        wrong = verify_ledger(self.agreement, lines)
        wrong += segments.closed_segment_faults(place, files).values()
        assert not wrong, wrong[:3]
        rounds = [line for line in lines if line["kind"] == "round"]
        found: dict[str, Any] = {"aggregated": [line["aggregated"] for line in rounds]}
        found |= {f"global {k}": v.numpy().tobytes() for k, v in state.values.items()}
        for line in lines:
            kept = {k: v for k, v in line.items() if k not in UNEQUAL}
            if self.setting.secure:  # a repeated attempt sends its masked input again
                kept.pop("upload_bytes", None)
            found[f"line {line['round']} {line.get('client', '')}"] = kept
        for line in read_json_lines(place / "metrics.jsonl"):
            for name, scores in line["sites"]["by"].items():
                found[f"scores {line['round']} {name}"] = scores
        for site in self.sites.values():
            found |= site.outcome()
        return found


DISTURBANCES = (
    *("site restarts", "site disconnected", "clock jumped", "link away", "Flower run ended"),
    *(
        "disk full",
        "key lost",
        "older copy",
        "older copy",
        "operator: stop",
        "operator: stop at once",
    ),
    *("older copy of the server", "older copy of the server"),
)
FORBIDDEN = ("withdraw", "refuse", "policy")
"""Acts by which the operator of a site forbids the study for a while."""


def virtual_datetime(clock: VirtualClock) -> type[datetime]:
    """A class `datetime` that reads a virtual clock."""

    class VirtualDatetime(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.fromtimestamp(min(clock.now, 1e9) + clock.offset, tz)

    return VirtualDatetime


class SecretOf:
    """`os` with random bytes made from the running machine: equal secrets draw equal noise."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def __getattr__(self, name: str) -> Any:
        secret = self._trial.running.encode()
        return (lambda size: secret.ljust(size)[:size]) if name == "urandom" else getattr(os, name)


@contextmanager
def virtual_machine(trial: Trial) -> Iterator[None]:
    """Replace time, storage calls and kills by those of the trial."""
    clock, numbers = trial.clock, count()

    def die(*_: object) -> None:
        trial.calls.process.die(trial.calls.process.point)

    with pytest.MonkeyPatch.context() as patch, trial.calls.patched(), remembered(trial.setting):
        patch.setattr(time, "sleep", clock.sleep)
        patch.setattr(time, "monotonic", lambda: clock.now)
        patch.setattr(time, "time", lambda: clock.now + clock.offset)
        for module in (append_log, approvals, logs, rpc):
            patch.setattr(module, "datetime", virtual_datetime(clock))
        patch.setattr(segments, "SEGMENT_BYTES", 1)
        patch.setattr(logs, "LARGEST", 2000)
        patch.setattr(faults, "MAX_LOG_BYTES", 2000)
        patch.setattr(os, "kill", die)
        patch.setattr(noise, "os", SecretOf(trial))
        for module in (storage_files, store):  # so that a seed gives the same trial each time
            patch.setattr(module, "token_hex", lambda n: f"{next(numbers):0{2 * n}x}")
        patch.setattr(tempfile, "_name_sequence", map("{:08}".format, count()))
        yield


@cache
def undisturbed(setting: Setting, root: Path) -> dict[str, Any]:
    """The outcome of a setting without faults."""
    folder = root / f"calm{abs(hash(setting))}"
    try:
        return Trial(setting, folder).run().outcome()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_seed(seed: int, root: Path) -> Trial:
    """Run the trial of a seed and return it. Raises AssertionError if a guarantee is broken."""
    rng = Random(seed)
    setting = Setting.draw(rng)
    plan, expected = Plan.draw(rng, seed), undisturbed(setting, root)
    folder = root / f"seed{seed}"
    try:
        trial = Trial(setting, folder, rng, plan)
        try:
            trial.run()
        except Broken as error:
            raise AssertionError(setting, str(error), trial.faults) from error
        compare(trial, expected)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return trial


def compare(trial: Trial, expected: dict[str, Any]) -> None:
    """Assert that a trial ended as the undisturbed trial of its setting."""
    for machine in (trial.server, *trial.sites.values()):
        if machine.wrong:
            machine.restore()
    setting, outcome = trial.setting, trial.outcome()
    names = expected.keys() | outcome.keys()
    if outcome["aggregated"] != expected["aggregated"]:
        # A masked sum goes on without a site that dropped out, a hidden round without any site. The
        # round of a deleted checkpoint is repeated, with a site that has joined since.
        repeated = bool(setting.joins) and trial.server.lost
        hidden = setting.secure or setting.unit == "client"
        assert hidden or repeated, (setting, outcome["aggregated"])
        trial.faults["other participants"] += 1
        names = set[str]()
    elif setting.secure and setting.unit:  # each attempt of secure aggregation draws noise
        names = {name for name in names if name.endswith("charges")}
    # A site that is away while a round is evaluated has no scores of it. One that joins later has
    # scores of an earlier round, if the server was stopped before it evaluated that round.
    early = {f"scores {i} {setting.names[-1]}" for i in range(1, setting.joins)} - expected.keys()
    names = {n for n in names - early if not n.startswith("scores") or n in outcome}
    different = sorted(n for n in names if expected.get(n) != outcome.get(n))
    assert not different, (setting, different[:4], dict(trial.faults))
    for name, site in trial.sites.items():
        if answers := outcome.get(f"{name} answers"):
            assert answers <= setting.rounds, (name, answers)
            site.check_limit(answers)
