# SPDX-License-Identifier: Apache-2.0
"""A federation under faults that one seed draws, in virtual time; it must end as an undisturbed one.

The server loop, the sites' endpoints and all their files are the real ones. Drawn are the study,
the network, deaths of processes at failpoints, power cuts, failing and damaged disks, sites that
are away, jumps of the clock, and an operator who starts the server again. Faults end after a while.
"""

from __future__ import annotations

import gc
import hashlib
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers as hf
from clients import know_secrets, loss
from flwr.app import Context
from flwr.app import Message as FlowerMessage
from masked import directory, node
from network import Network, VirtualClock, Weather
from power import PowerDisk, flipped, inodes
from torch import Tensor, nn

from fedplan.audits.ledger import verify_ledger
from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    ClientPrivacy,
    TrainSetup,
    make_example_guard,
    make_noise_guard,
)
from fedplan.federation.endpoint import Endpoint, open_journal, site_run_folder
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.egress import (
    Account,
    EgressLog,
    Limits,
    require_complete_account,
)
from fedplan.federation.participation import Participation, Timeouts
from fedplan.federation.secure_client import SecAggClient
from fedplan.federation.server import Server
from fedplan.methods.method import Method
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Params
from fedplan.models.values import get_values, set_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.records import reply_fields
from fedplan.runners.flower.rpc import FlowerRunEnded
from fedplan.runners.flower.server import ServerLoop
from fedplan.secagg.config import SecAggConfig
from fedplan.storage import files as storage_files
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.message import Message
from fedplan.training.fit import TrainArguments

RUN = "ab" * 8
MEMORY = Path("/dev/shm")
"""Where folders of trials are quick, if there is such a place."""
PACE = TrainArguments(lr=1e-2, batch_size=2, steps=1)
PATIENCE = Timeouts(sites=600.0, updates=1e6, reconnect=1e9, poll_interval=5.0, tries=1000)
FAULTY_ACTS = 40
"""Drawn faults end after so many acts of the federation."""
STARTS = 60
"""An operator starts a server at most so often: then the federation makes no progress."""
METHODS = ("fedavg", "fedper", "scaffold", "fedfrozen", "fedrep", "local-only", "fedprox", "bitfit")
GUARANTEES = {
    "client": Guarantee("client", 900.0, 1e-5, 1.0, 1.0),
    "example": Guarantee("example", 900.0, 1e-5, 1.0, 1.0, 0.5, 1, 2),
}


class Killed(BaseException):
    """The process that is running dies now."""


class DamageNoticed(BaseException):
    """A site refuses to work with its damaged files."""


@dataclass(frozen=True)
class Setting:
    """What a seed draws of a study; trials of the same setting share the undisturbed run."""

    method: str
    secure: bool
    unit: str
    sites: int
    rounds: int
    fraction: float

    @staticmethod
    def draw(rng: Random) -> Setting:
        """Draw a study that fedplan accepts."""
        secure, unit = rng.random() < 0.3, rng.choice(("", "", "client", "example"))
        method = rng.choice(("fedavg", "fedper") if secure or unit else METHODS)
        unit = "" if secure and unit == "example" else unit
        sites = rng.choice((3, 4)) if secure else rng.choice((2, 3))
        fraction = 1.0 if secure or unit else rng.choice((1.0, 1.0, 0.5))
        return Setting(method, secure, unit, sites, rng.choice((2, 3)), fraction)

    @property
    def names(self) -> list[str]:
        """Names of the sites."""
        return [f"client-{i}" for i in range(self.sites)]

    @property
    def guarantee(self) -> Guarantee | None:
        """Differential privacy of the study."""
        return GUARANTEES.get(self.unit)


@dataclass(frozen=True)
class Plan:
    """How likely each fault is, drawn once for a trial."""

    weather: Weather
    kill_site: float
    kill_server: float
    fail_disk: float
    power: float
    away: float
    damage: float
    jump: float

    @staticmethod
    def draw(rng: Random) -> Plan:
        """Draw calm and rough trials alike."""
        rough = rng.choice((0.0, 0.2, 0.4))
        weather = Weather(rng.choice((0.0, 0.05)), rng.choice((0.0, 0.2)), rng.choice((0.1, 60.0)))
        each = [rng.choice((0.0, rough, 2 * rough)) for _ in range(7)]
        return Plan(weather, *each)


@cache
def tiny_model() -> nn.Module:
    """One model for all ends: each turn loads its values anew."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.BertConfig(
        vocab_size=16, intermediate_size=8, max_position_embeddings=8, num_labels=2, **sizes
    )
    return hf.BertForSequenceClassification(config).eval()


@cache
def params() -> Params:
    """A few params of each kind, so that a trial is short."""
    kinds = {"query", "key", "value", "head", "norm"}
    chosen = [p for p in describe(tiny_model()) if p.kind in kinds]
    return tuple(p for p in chosen if p.kind != "norm" or p.name.endswith("output.LayerNorm.bias"))


@cache
def start_values() -> dict[str, Tensor]:
    """The values that every end starts from."""
    return {k: v.clone() for k, v in get_values(tiny_model(), params()).items()}


class Rows:
    """A few texts of a site."""

    def __init__(self, seed: int) -> None:
        drawn = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(1, 16, (4, 4), generator=drawn)

    def __len__(self) -> int:
        return len(self.ids)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"input_ids": self.ids[indices]}


@cache
def method_of(setting: Setting) -> Method:
    """The method of a setting."""
    return method_by_name(setting.method)


@dataclass
class Trial:
    """One federation in a folder. Without `plan` nothing disturbs it.

    A folder that exists goes on. `stops`: by machine the failpoint where it dies, once.
    `known`: keys and secrets follow from names, so that two trials have the same; else each end
    draws its own, and every site has an account. `damaged`: by machine the damaged files, each with
    its content before and after; `noticed`: why ends refused to work with them, each with the
    number of updates that the site had sent before.
    """

    setting: Setting
    folder: Path
    rng: Random = field(default_factory=lambda: Random(0))
    plan: Plan | None = None
    stops: dict[str, str] = field(default_factory=dict)
    known: bool = True
    acts: int = 0
    faults: Counter[str] = field(default_factory=Counter[str])
    damaged: dict[str, list[tuple[Path, bytes, bytes | None]]] = field(default_factory=dict)
    noticed: list[tuple[str, int]] = field(default_factory=list)
    updates: Counter[str] = field(default_factory=Counter[str])

    def __post_init__(self) -> None:
        setting, made = self.setting, method_of(self.setting)
        secagg = SecAggConfig("secure", threshold=setting.sites // 2 + 1, min_contributors=2)
        self.agreement = Agreement(
            "simulated",
            params(),
            made,
            PACE,
            setting.guarantee,
            secagg=secagg if setting.secure else SecAggConfig(),
            run=RUN,
        )
        self.clock, self.disk = VirtualClock(), PowerDisk()
        self.network = Network(setting.names, self.clock, self.rng, self.answer)
        self.app = client_app(self._handle)
        self.endpoints = dict[str, Endpoint]()
        self.server_folder = self.folder / "server"
        for name in ("server", *setting.names):
            self.site_folder(name).mkdir(parents=True, exist_ok=True)
        if self.known:
            know_secrets(self.server_folder, setting.names)
        for name in setting.names if self.known else ():
            secret = self.site_folder(name) / "account" / "secret"
            secret.parent.mkdir()
            secret.touch(mode=0o600)
            content = name.encode().ljust(32)[:32]
            secret.write_bytes(content + hashlib.sha256(content).digest())
        self.disk.settle(self.folder)

    def site_folder(self, name: str) -> Path:
        """All that a site's machine has."""
        return self.folder / name

    # -- the ends of the federation, opened from their disks alone

    def open_server(self) -> Server:
        """The server as it starts."""
        fraction = self.setting.fraction
        return Server(
            self.agreement,
            start_values(),
            self.server_folder,
            rounds=self.setting.rounds,
            roster={name: {} for name in self.setting.names},
            participation=Participation(fraction) if fraction < 1 else None,
        )

    def open_endpoint(self, name: str) -> Endpoint:
        """A site as it starts."""
        model, agreement, place = tiny_model(), self.agreement, self.site_folder(name)
        set_values(model, start_values(), agreement.params)
        has_account = self.setting.unit or not self.known
        account = Account(place / "account", Limits()) if has_account else None
        if account is not None:
            require_complete_account(account, EgressLog(place / "state"))
        run_folder = site_run_folder(place / "state", RUN)
        site = Client(
            name=name,
            examples=Rows(self.setting.names.index(name)),
            journal=open_journal(run_folder),
            setup=TrainSetup(
                model,
                loss,
                start_values(),
                digest_initial_model(model, agreement.params, start_values()),
            ),
            privacy=ClientPrivacy(
                account=account,
                guard=make_example_guard(agreement, place, account) if account else None,
                noise_guard=make_noise_guard(agreement, account) if account else None,
            ),
        )
        if self.known:
            site.__dict__["digest_key"] = name.encode().ljust(32)[:32]
        masker = None
        if agreement.secagg.active:
            names = self.setting.names
            masker = SecAggClient(
                agreement, site, node(name), directory(names), run_folder, cohort=lambda _: names
            )
        return Endpoint(agreement, site, place / "state", secagg_client=masker)

    # -- faults

    def draws(self, probability: float) -> bool:
        """Whether a fault of a probability happens at this act."""
        self.acts += 1
        return self.acts < FAULTY_ACTS and self.rng.random() < probability

    @contextmanager
    def process(self, place: Path, kill: float) -> Iterator[None]:
        """Run the body as a process of the machine with a folder; it may die, and leave its files.

        Raises Killed after the files are as the death left them.
        """
        plan, old_counts = self.plan, storage_files._reached
        setting = ""
        if plan is not None:
            others = ("secagg", "journal") if place == self.server_folder else ("round",)
            points = [p for p in storage_files.POINTS if p.split(".")[0] not in others]
            point, times = self.rng.choice(points), self.rng.choice((1, 1, 2, 3, 5))
            if self.draws(kill):
                setting = f"{point}:kill@{times}"
            elif self.draws(plan.fail_disk) and point.split(".")[0] in ("store", "log", "journal"):
                setting = f"{point}:{self.rng.choice(('raise', 'enospc'))}@{times}"
        setting = self.stops.get(place.name, setting)
        old = os.environ.get(storage_files.VARIABLE, "")
        # A stop counts over all calls of a machine, any other fault in one call.
        stopping = place.name in self.stops
        storage_files._reached = (
            self._counts.setdefault(place.name, Counter()) if stopping else Counter()
        )
        os.environ[storage_files.VARIABLE] = setting
        snapshot, alive = (
            self.folder.with_name(f"{self.folder.name}.{place.name}"),
            dict[str, int](),
        )

        def die(*_: object) -> None:
            shutil.rmtree(snapshot, ignore_errors=True)
            if plan is not None and self.rng.random() < plan.power:
                self.faults[f"power cut, {self.disk.cut(place, self.rng)}"] += 1
            shutil.copytree(place, snapshot)
            alive.update(inodes(place))
            raise Killed(setting)

        old_kill = self.on_kill
        self.on_kill = die
        try:
            yield
        except Killed:
            self.stops.pop(place.name, None)
            # What `finally` clauses did after the death does not count.
            shutil.rmtree(place)
            shutil.move(snapshot, place)
            self.disk.copied(place, alive)
            self.faults[f"killed at {setting.split(':')[0]}"] += 1
            raise
        finally:
            if (
                setting
                and storage_files._reached.get(setting.split(":")[0])
                and ":kill" not in setting
            ):
                self.faults[f"disk {setting.split(':')[1].split('@')[0]}"] += 1
            self.on_kill = old_kill
            os.environ[storage_files.VARIABLE] = old
            storage_files._reached = old_counts

    on_kill: Any = None
    _counts: dict[str, Counter[str]] = field(default_factory=dict)

    def answer(self, name: str, message: FlowerMessage, context: Context) -> FlowerMessage | None:
        """A site's reply to a message of the network; None if it dies before it replies."""
        plan = self.plan
        context.node_config["name"] = name
        try:
            with self.process(self.site_folder(name), plan.kill_site if plan else 0.0):
                if name not in self.endpoints:
                    self.endpoints[name] = self.open_endpoint(name)
                reply = self.app(message, context)
        except (Killed, DamageNoticed, FedplanError, OSError) as error:
            if name in self.damaged and not isinstance(error, Killed):
                self.noticed.append((str(error), self.updates[name]))
                self.restore(self.site_folder(name))
            elif not isinstance(error, Killed):
                self.faults[f"site did not start: {error}"] += 1
            elif plan is not None and self.draws(plan.damage):
                self.harm(self.site_folder(name))
            self.restart_site(name, self.rng.choice((1.0, 100.0, 5000.0)))
            return None
        if plan is not None and self.draws(plan.away / 4):
            self.faults["site away"] += 1
            self.restart_site(name, self.rng.choice((10.0, 3000.0, 90000.0)))
        if plan is not None and self.draws(plan.jump):
            self.faults["clock jumped"] += 1
            self.clock.offset += self.rng.choice((-3600.0, 3600.0, 86400.0))
        return reply

    def harm(self, place: Path) -> None:
        """Flip a bit of a file of a machine that is off, or delete the file."""
        files = sorted(f for f in place.rglob("*") if f.is_file())
        if not (place / "account" / "replies.jsonl").exists():
            files = [f for f in files if f.name != "secret"]  # unused, it may be drawn anew
        self.damage(place, self.rng.choice(files), flip=self.rng.random() < 0.7)

    def damage(self, place: Path, file: Path, *, flip: bool) -> None:
        """Flip a bit of a machine's file, or delete it; an empty file is deleted."""
        whole = file.read_bytes()
        damaged = flipped(whole, self.rng) if flip else None
        if damaged:
            file.write_bytes(damaged)
        else:
            file.unlink()
        self.damaged.setdefault(place.name, []).append((file, whole, damaged or None))
        self.disk.settle(place)
        self.faults["file damaged"] += 1

    def restore(self, place: Path) -> None:
        """Mend the files of a machine whose damage was noticed, as from a backup of that moment."""
        self.faults["damage noticed and mended"] += 1
        for file, whole, damaged in reversed(self.damaged.pop(place.name)):
            present = file.read_bytes() if file.exists() else None
            if present == damaged or not (present or damaged):
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(whole)
                file.chmod(0o600)
            elif damaged and present and present.startswith(damaged):  # a log that went on
                file.write_bytes(whole + present[len(damaged) :])
        self.disk.settle(place)

    def restart_site(self, name: str, seconds: float) -> None:
        """Let a site be away for some time, and start again with what is on its disk."""
        self.endpoints.pop(name, None)
        gc.collect(0)
        self.network.down.add(name)

        def back() -> None:
            self.network.down.discard(name)
            self.network.since[name] += 1

        self.clock.at(seconds, back)

    def _handle(self, context: Context, kind: str, message: Message) -> Message:
        name = str(context.node_config["name"])
        reply = self.endpoints[name].answer(kind, message)
        fields = reply_fields(reply)
        if name in self.damaged and (codes := fields.keys() & {"refused", "failed"}):
            raise DamageNoticed(" ".join(str(fields[code]) for code in codes))
        self.updates[name] += "ledger_line" in fields
        self.check_reply(name, reply)
        return reply

    # -- the run

    def serve(self) -> bool:
        """Start the server and let it work; return whether the run is complete.

        Raises Killed if it dies, and the server's errors.
        """
        setting = self.setting
        enough = max(1, round(setting.fraction * setting.sites))
        with self.process(self.server_folder, self.plan.kill_server if self.plan else 0.0):
            server = self.open_server()
            quorum = 1 if setting.unit == "client" else enough
            ServerLoop(self.network, server, PATIENCE, quorum=quorum).run()
            return server.global_state.round == setting.rounds

    def run_to_stop(self) -> None:
        """Run until the server dies where `stops` says; then all machines are off."""
        with virtual_machine(self):
            try:
                self.serve()
            except Killed:
                self.endpoints.clear()
                gc.collect(0)
                return
        raise AssertionError("the server did not reach the point where it stops")

    def run(self) -> Trial:
        """Run to the end, as an operator does who starts a server again after each death or error.

        Raises AssertionError if there is no progress, or an error is not one for people.
        """
        with virtual_machine(self):
            if self.plan is not None:
                self.network.weather = self.plan.weather
            for _ in range(STARTS):
                if self.acts >= FAULTY_ACTS:
                    self.network.weather = Weather()
                try:
                    done = self.serve()
                except Killed:
                    done = False
                    if self.plan is not None and self.draws(self.plan.damage):
                        self.harm(self.server_folder)
                except (FedplanError, FlowerRunEnded) as error:
                    done = False
                    if "server" in self.damaged:
                        self.noticed.append((str(error), sum(self.updates.values())))
                        self.restore(self.server_folder)
                    else:
                        self.faults[f"server error: {str(error)[:60]}"] += 1
                gc.collect(0)
                self.clock.sleep(60.0)
                if done:
                    return self
            raise AssertionError(f"no progress after {STARTS} starts: {dict(self.faults)}")

    # -- what must hold

    def check_reply(self, name: str, reply: Message) -> None:
        """Assert that no personal value of a site is in a reply."""
        content = b"".join((reply.header, *map(bytes, reply.blobs)))
        journal = self.endpoints[name].site.journal
        if self.agreement.has_personal and journal.folder.is_dir():
            state, _ = journal.client_state()
            for key, value in state.items():
                raw = value.numpy().tobytes()
                assert len(raw) < 32 or raw not in content, f"{key} of {name} left its site"

    def outcome(self) -> dict[str, Any]:
        """All that must be as in the undisturbed run."""
        server = self.open_server()
        state, lines = server.global_state, read_json_lines(self.server_folder / "ledger.jsonl")
        faults = verify_ledger(self.agreement, lines)
        assert not faults, faults[:3]
        rounds = [line for line in lines if line["kind"] == "round"]
        found: dict[str, Any] = {"aggregated": [line["aggregated"] for line in rounds]}
        found |= {f"global {k}": v.numpy().tobytes() for k, v in state.values.items()}
        for line in lines:
            kept = {k: v for k, v in line.items() if k not in UNEQUAL}
            if self.setting.secure:  # a second attempt sends its masked input again
                kept.pop("upload_bytes", None)
            found[f"line {line['round']} {line.get('client', '')}"] = kept
        for name in self.setting.names:
            values, _ = open_journal(
                site_run_folder(self.site_folder(name) / "state", RUN), reading=True
            ).client_state()
            found |= {f"{name} {k}": v.numpy().tobytes() for k, v in values.items()}
            charges = self.site_folder(name) / "account" / "charges.jsonl"
            if charges.exists():
                found[f"{name} charges"] = len(read_json_lines(charges))
        return found


UNEQUAL = {"download_bytes", "full", "missed", "rejected", "warnings", "secagg"}
"""Fields of the ledger that tell of disturbances."""


@contextmanager
def virtual_machine(trial: Trial) -> Iterator[None]:
    """Let time, syncs and deaths be those of the trial."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", trial.clock.sleep)
        patch.setattr(time, "monotonic", lambda: trial.clock.now)
        patch.setattr(time, "time", lambda: trial.clock.now + trial.clock.offset)
        patch.setattr(os, "fsync", trial.disk.fsync)
        patch.setattr(os, "kill", lambda *_: trial.on_kill())
        yield


@cache
def undisturbed(setting: Setting, root: Path) -> dict[str, Any]:
    """The outcome of a setting without faults."""
    folder = root / f"calm{abs(hash(setting))}"
    try:
        return Trial(setting, folder).run().outcome()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def try_seed(seed: int, root: Path) -> Counter[str]:
    """Run the trial of a seed; return the faults it had. Raises AssertionError if a promise broke."""
    rng = Random(seed)
    setting = Setting.draw(rng)
    plan, expected = Plan.draw(rng), undisturbed(setting, root)
    folder = root / f"seed{seed}"
    try:
        trial = Trial(setting, folder, rng, plan).run()
        outcome = trial.outcome()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return compared(trial, outcome, expected)


def compared(trial: Trial, outcome: dict[str, Any], expected: dict[str, Any]) -> Counter[str]:
    """Return the faults of a trial; raise AssertionError if it has not ended as it should."""
    setting = trial.setting
    if outcome["aggregated"] != expected["aggregated"]:
        # A secure sum goes on without a site that dropped out, a hidden round without any site.
        assert setting.secure or setting.unit == "client", (setting, outcome["aggregated"])
        return trial.faults + Counter(trial.network.events) + Counter(["other participants"])
    names = expected.keys() | outcome.keys()
    if setting.secure and setting.unit:  # each attempt at a secure sum has noise of its own
        names = {name for name in names if name.endswith("charges")}
    different = sorted(n for n in names if expected.get(n) != outcome.get(n))
    assert not different, (setting, different[:4], dict(trial.faults))
    return trial.faults + Counter(trial.network.events)
