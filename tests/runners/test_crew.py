# SPDX-License-Identifier: Apache-2.0
"""Whoever plays a run's clients, and however often they die of it, its files are the same."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import run
from crews import METHODS, Begun, Here, files, study_with
from often import AT_NIGHT
from torch import Tensor

import fedplan as fp
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.private import ClientDPAggregator
from fedplan.federation.aggregation.robust import BufferedAggregator
from fedplan.federation.ledger.stream import EventStream
from fedplan.runners.executors.executor import PoolConfig, make_pool_config
from fedplan.runners.executors.processes import ProcessTransport
from fedplan.runners.executors.worker import Worker
from fedplan.runners.simulation import Simulation
from fedplan.storage.journal import client_state_folder

Patch = pytest.MonkeyPatch
DAY = ("fedavg", "homes", "scaffold", "polls", "private", "sites")
"""The others are tried at night."""


def by_day(names: Iterator[str] | Any) -> list[Any]:
    return [n if n in DAY else pytest.param(n, marks=pytest.mark.nightly) for n in names]


@pytest.mark.parametrize("name", by_day(METHODS))
def test_any_number_of_workers_that_die_at_any_time_leave_the_same_files(
    name: str, here: Path, monkeypatch: Patch
) -> None:
    """The workers are in this process, so that they die between messages: after a turn too."""
    begun = Begun(study_with(name), here)
    expected, died = files(begun.alone()), 0
    for count, deaths in ((1, 0), (3, 4)) if AT_NIGHT else ((2, 2),):
        transport = Here(count, deaths, seed=count)
        assert files(begun.by(transport, f"by-{count}", monkeypatch)) == expected
        died += transport.died
    assert died


class Resident(ProcessTransport):
    """Processes that outlive a run: the next one begins anew in them."""

    answers = 0

    def receive(self, timeout: float) -> Any:
        found = super().receive(timeout)
        self.answers += len([each for _, each in found if each is not None])
        return found

    def start(self, number: int, said: Mapping[str, Any]) -> None:
        if number in self.pids:
            self.send(number, said)
        else:
            super().start(number, said)

    def close(self) -> None:
        if not self.pids:
            super().close()

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def pool() -> Iterator[Resident]:
    transport = Resident(2, Worker)
    yield transport
    transport.end()


def kill(transport: Resident, stop: threading.Event, kills: int, seed: int) -> list[int]:
    """Kill workers at random moments, until so many are dead; somebody answers in between."""
    draw, dead = random.Random(seed), list[int]()
    while len(dead) < kills and not stop.wait(draw.uniform(0.0, 0.4)):
        pids = [pid for pid in transport.pids.values() if pid not in dead]
        if pids:
            dead.append(draw.choice(pids))
            os.kill(dead[-1], signal.SIGKILL)
            before = transport.answers
            stop.wait(draw.uniform(0.5, 4.0))
            while transport.answers == before and not stop.wait(0.1):
                pass
    return dead


@pytest.mark.nightly  # by day real processes are killed, and leave the same files: see below
@pytest.mark.parametrize("name", METHODS)
def test_processes_leave_the_same_files(
    name: str, here: Path, monkeypatch: Patch, pool: Resident
) -> None:
    begun = Begun(study_with(name), here)
    assert files(begun.by(pool, "pool", monkeypatch)) == files(begun.alone())


@pytest.mark.nightly
@pytest.mark.parametrize("kills", [1, 8])
def test_processes_that_are_killed_leave_the_same_files(
    kills: int, here: Path, monkeypatch: Patch, pool: Resident
) -> None:
    study = study_with("homes", train={"rounds": 3 * kills, "batch_size": 1})
    begun, stop, dead = Begun(study, here), threading.Event(), list[int]()
    killer = threading.Thread(target=lambda: dead.extend(kill(pool, stop, kills, seed=kills)))
    killer.start()
    try:
        found = files(begun.by(pool, "pool", monkeypatch))
    finally:
        stop.set()
        killer.join()
    assert len(dead) == kills
    assert found == files(begun.alone())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # Ray's own: it leaves logs open
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", ["homes", "scaffold", "private"])
def test_actors_of_ray_leave_the_same_files(name: str, here: Path, monkeypatch: Patch) -> None:
    from fedplan.runners.executors.ray_actors import RayTransport

    begun = Begun(study_with(name), here)
    assert files(begun.by(RayTransport(2), "ray", monkeypatch)) == files(begun.alone())


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_actors_that_are_killed_leave_the_same_files(here: Path, monkeypatch: Patch) -> None:
    import ray

    from fedplan.runners.executors.ray_actors import RayTransport

    class Mortal(RayTransport):
        left, drawn = 5, random.Random(0)

        def receive(self, timeout: float) -> Any:
            found = super().receive(timeout)
            if found and self.left and self.drawn.random() < 0.3:
                self.left -= 1
                ray.kill(self._actors[self.drawn.randrange(self.count)])
            return found

    begun, transport = Begun(study_with("homes"), here), Mortal(2)
    assert files(begun.by(transport, "ray", monkeypatch)) == files(begun.alone())
    assert not transport.left


@pytest.mark.nightly
def test_a_command_runs_by_workers_and_goes_on_by_others(here: Path) -> None:
    for words in (
        ("run", "study.toml", "--output", "a", "--runner", "pool", "--workers", "2"),
        ("run", "a", "--resume", "--set", "train.rounds=4"),
        ("run", "a", "--resume", "--set", "train.rounds=5", "--runner", "pool", "--workers", "3"),
        ("verify", "a"),
    ):
        code, said = run(*words)
        assert code == 0, said


def test_a_masked_sum_has_no_parts_and_is_refused_before_anything_is_written(here: Path) -> None:
    masked = ("--set", "aggregation.kind='secure'", "--set", "clients.fraction=1.0")
    code, said = run("run", "study.toml", "--output", "a", "--runner", "pool", *masked)
    assert (
        code == 2
        and "secure aggregation has no partial sums for workers; use --runner local"
        in " ".join(said.split())
    ), said
    assert not (here / "a").exists()


def test_updates_that_leave_no_room_are_taken_in_the_order_of_the_clients(
    here: Path, monkeypatch: Patch
) -> None:
    """Who comes last has no room, whoever is played last."""
    monkeypatch.setattr("fedplan.tensors.sums.MAX_SUM_STEPS", 2**52)
    begun = Begun(study_with("fedavg", clients={"fraction": 1.0}), here)
    alone = begun.alone()
    rejected = [json.loads(line).get("rejected") for line in ledger(alone)]
    assert any(rejected) and any(json.loads(line).get("aggregated") for line in ledger(alone))
    assert files(begun.by(Here(2), "two", monkeypatch)) == files(alone)
    resumed = begun.copied("resumed")
    next(iter(Simulation(begun.study, resumed).rounds()))
    monkeypatch.undo()
    Simulation(begun.study, resumed).run()
    lines = map(json.loads, ledger(resumed))
    assert any(line.get("missed") for line in lines), "a client reports its rejected turn later"


def ledger(folder: Path) -> list[str]:
    return (folder / "ledger.jsonl").read_text().splitlines()


def test_a_client_that_always_kills_its_worker_is_named(here: Path, monkeypatch: Patch) -> None:
    class Deadly(Here):
        def receive(self, timeout: float) -> Any:
            number, words, _ = self.asked[0]
            if json.loads(words).get("client") == "client-02":
                self.asked = [each for each in self.asked if each[0] != number]
                return [(number, None)]
            return super().receive(timeout)

    begun = Begun(study_with("fedavg", clients={"fraction": 1.0}), here)
    with pytest.raises(
        fp.FedplanError, match=r"died 6 times while it ran client 'client-02'.*memory"
    ):
        begun.by(Deadly(1), "one", monkeypatch)


def test_a_worker_that_always_dies_of_its_sum_ends_the_run(here: Path, monkeypatch: Patch) -> None:
    class Heavy(Here):
        def receive(self, timeout: float) -> Any:
            if any(b'"do": "sum"' in words for _, words, _ in self.asked):
                self.asked.clear()
                return [(0, None)]
            return super().receive(timeout)

    begun = Begun(study_with("fedavg"), here)
    with pytest.raises(
        fp.FedplanError, match=r"died 6 times before it returned its sum.*fewer workers"
    ):
        begun.by(Heavy(1), "one", monkeypatch)


def test_an_error_of_a_worker_is_the_runs_and_names_the_client(
    here: Path, monkeypatch: Patch
) -> None:
    begun = Begun(study_with("fedavg", clients={"fraction": 1.0}), here)

    class Lost(Here):
        def send(self, number: int, said: Mapping[str, Any], shared: Any = None) -> None:
            if said["do"] == "turn":
                said = {**said, "request": {**said["request"], "run": "0" * 16}}
            super().send(number, said, shared)

    with pytest.raises(
        fp.FedplanError, match=r"client 'client-0\d'.* is in run .* and the request is of '0000"
    ):
        begun.by(Lost(2), "two", monkeypatch)


def test_a_worker_that_built_something_else_is_refused(here: Path, monkeypatch: Patch) -> None:
    class Other(Here):
        def send(self, number: int, said: Mapping[str, Any], shared: Any = None) -> None:
            if said["do"] == "begin":
                study = {**said["study"], "train": {**said["study"]["train"], "lr": 0.5}}
                said = {**said, "study": study}
            super().send(number, said, shared)

    begun = Begun(study_with("fedavg"), here)
    with pytest.raises(fp.FedplanError, match="files differ between machines"):
        begun.by(Other(2), "two", monkeypatch)


def test_the_longest_are_played_first(here: Path, monkeypatch: Patch) -> None:
    order = list[str]()

    class Noted(Here):
        def send(self, number: int, said: Mapping[str, Any], shared: Any = None) -> None:
            if said["do"] == "turn":
                order.append(said["client"])
            super().send(number, said, shared)

    study = study_with("fedavg", clients={"fraction": 1.0}, train={"rounds": 1, "batch_size": 1})
    begun = Begun(study, here)
    begun.by(Noted(2), "two", monkeypatch)
    rows = {name: len(rows) for name, rows in Simulation(study, here / "x").data.train.items()}
    assert [rows[name] for name in order] == sorted(rows.values(), reverse=True)


def test_a_world_goes_once_and_only_what_changed(here: Path, monkeypatch: Patch) -> None:
    shared = list[set[str]]()

    class Counted(Here):
        def share(self, tensors: Any) -> object:
            shared.append(set(tensors))
            return super().share(tensors)

    begun = Begun(study_with("phases", evaluate={"attention_examples": 0}), here)
    folder = begun.by(Counted(3), "three", monkeypatch)
    moved = [set(line["changed"]) for line in map(json.loads, ledger(folder)) if "changed" in line]
    assert shared == moved  # before the first round all have the start


def test_what_is_said_of_workers_fits(here: Path) -> None:
    assert make_pool_config("local") is None and make_pool_config("pool", 2) == PoolConfig(
        "pool", 2
    )
    assert make_pool_config("ray", gpus=0.5, address="ray://a:1") == PoolConfig(
        "ray", 0, 0.5, "ray://a:1"
    )
    for words, said in (
        (("local", 2), "workers does not apply to runner local"),
        (("pool", 0), "workers is 0: give at least 1"),
        (("pool", 2, 1.0), "gpus_per_worker is for Ray"),
        (("pool", 2, 0.0, "auto"), "ray_address is for Ray"),
        (("fast", 2), "the runner is 'fast': use local, pool or ray"),
    ):
        with pytest.raises(fp.FedplanError, match=said):
            make_pool_config(*words)  # type: ignore[arg-type]
    code, said = run("run", "study.toml", "--workers", "2")
    assert code == 2 and "use pool or ray" in said.replace("\n", " ")
    code, said = run("run", "study.toml", "--runner", "fast")
    assert code == 2 and "local, pool, ray or flower" in said.replace("\n", " ")


def test_objects_of_this_process_have_no_workers(tmp_path: Path) -> None:
    def loss(model: torch.nn.Module, batch: Any) -> Tensor:
        return model(batch["x"]).sum()

    rows, options = {"a": [{"x": torch.zeros(1)}]}, fp.RunOptions(start=False)
    run = fp.simulate(fp.share(), torch.nn.Linear(1, 1), rows, loss, options=options)
    assert run.simulation
    study, inputs = run.simulation.study, run.simulation.in_memory
    with pytest.raises(fp.FedplanError, match=r'write it as a study file.*runner="local"'):
        Simulation(study, tmp_path, inputs, pool_config=PoolConfig())


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_no_old_world_and_no_folder_of_the_idle_stays(method: str, here: Path) -> None:
    """A client that was never asked has no folder, nor has one that keeps nothing."""
    study = study_with(method, clients={"fraction": 0.2}, train={"rounds": 4, "batch_size": 8})
    whole = Simulation(study, here / "run", events=EventStream())
    worlds = list[weakref.ref[Tensor]]()
    for _ in whole.rounds():
        worlds.append(weakref.ref(next(iter(whole.federation.global_state.values.values()))))
    gc.collect()
    assert [each() is not None for each in worlds[:-1]] == [False] * 3
    asked = {line["client"] for line in map(json.loads, ledger(here / "run")) if "client" in line}
    there = {name for name in whole.data.train if client_state_folder(here / "run", name).exists()}
    assert there == (asked if method == "scaffold" else set()) and len(asked) < 5


def test_parts_of_a_sum_are_of_one_kind() -> None:
    """Else a worker's part would be merged into another kind of sum."""
    for kind in (MeanAggregator, BufferedAggregator, ClientDPAggregator):
        total = object.__new__(kind)
        with pytest.raises(fp.FedplanError, match="cannot be merged into a"):
            total.merge({}, {"kind": "other"})


def test_a_worker_ends_with_its_run(here: Path) -> None:
    transport = ProcessTransport(1, Worker)
    transport.start(0, {"do": "begin", "study": {}, "folder": str(here)})
    pid = transport.pids[0]
    deadline = time.monotonic() + 120
    while not (heard := transport.receive(1.0)) and time.monotonic() < deadline:
        pass
    ((_, answer),) = heard
    assert answer is not None and "invalid study file" in answer[1]["error"]
    transport.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SCRIPT = """
import os
import torch
from echoes import Echo
from fedplan.runners.executors.processes import ProcessTransport
workers = ProcessTransport(1, Echo)
workers.start(0, {})
shared = workers.share({"x": torch.arange(3)})
workers.send(0, {"n": 2**70}, shared)
replies = []
while len(replies) < 2:
    replies += workers.receive(60.0)
tensors, fields = replies[1][1]
assert tensors["x"].tolist() == [0, 1, 2] and fields["message"] == {"n": 2**70}
print(workers._folder, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_script_without_a_guard_has_workers_and_none_outlives_it(tmp_path: Path) -> None:
    """By spawn of multiprocessing the worker would run the script again, and stay when it dies."""
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    words = [sys.executable, str(tmp_path / "script.py")]
    # The worker writes to the same stderr: who waits for its end waits for the worker's.
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not Path(done.stdout.strip()).exists()
