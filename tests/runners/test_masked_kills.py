# SPDX-License-Identifier: Apache-2.0
"""Masked rounds over Flower's messages, killed at random moments: the same bits, opened once."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from masked_runs import NAMES, MaskedRun
from test_masked_flower import FEDAVG, SERVER_POINTS, STEPS

from fedplan.federation.ledger.egress import read_egress
from fedplan.secagg.config import SecAggConfig
from fedplan.storage import files
from fedplan.storage.files import POINTS, VARIABLE
from fedplan.tensors.message import Message
from fedplan.tensors.named import digests

pytestmark = pytest.mark.nightly
MOMENTS = 25
"""Random moments at which the server is killed with all that is in its process, and as many of one
site."""
SITE_POINTS = [p for p in POINTS if p.startswith(("store.", "journal."))]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> MaskedRun:
    run = MaskedRun(FEDAVG, tmp_path_factory.mktemp("plain"), SecAggConfig(), rounds=1)
    run.carry()
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds of a run that nobody kills, in a process of its own."""
    start = time.monotonic()
    calm = apart(lambda: carried(tmp_path_factory.mktemp("calm")))
    assert os.waitstatus_to_exitcode(os.waitpid(calm, 0)[1]) == 0
    return time.monotonic() - start


def apart(work: Callable[[], object]) -> int:
    """Do something in another process, which has all that this one has. Its number."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(3)
        os._exit(0)
    return child


def killed(child: int, after: float) -> bool:
    """Kill a process after some seconds, if it has not ended by then. Whether it was killed."""
    end = time.monotonic() + after
    while time.monotonic() < end:
        ended, _ = os.waitpid(child, os.WNOHANG)
        if ended:
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def carried(folder: Path) -> None:
    MaskedRun(FEDAVG, folder, rounds=1).carry()


def require_same(run: MaskedRun, plain: MaskedRun) -> None:
    """The bits of the plain sum, one attempt that was opened, and one answer of each site."""
    assert digests(run.server.global_state.values) == digests(plain.server.global_state.values)
    assert run.faults() == [] and run.rounds()[0]["aggregated"] == list(NAMES)
    for name in NAMES:
        lines = read_egress(run.folder / "sites" / name)
        told = {line["content"] for line in lines if line["kind"] == "unmasking"}
        assert len(told) == 1, "two answers"


def taken_up(folder: Path, plain: MaskedRun) -> None:
    gc.collect()
    run = MaskedRun(FEDAVG, folder, rounds=1)
    run.carry()
    require_same(run, plain)


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_server_killed_at_any_moment(
    seed: int, tmp_path: Path, plain: MaskedRun, whole: float
) -> None:
    """With it its sites: all that is left of any of them is on disk."""
    after = random.Random(seed).uniform(0, whole)
    killed(apart(lambda: carried(tmp_path)), after)
    taken_up(tmp_path, plain)


@pytest.mark.parametrize("seed", range(MOMENTS))
def test_a_site_killed_at_any_moment(seed: int, tmp_path: Path, plain: MaskedRun) -> None:
    """In one of its steps, while it works out what it says."""
    dice, ended = random.Random(seed), list[bool]()
    step, victim = dice.choice(STEPS), dice.choice(NAMES)
    run = MaskedRun(FEDAVG, tmp_path, rounds=1)
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if (site, kind) != (victim, step) or ended:
            return calm(site, kind, asked)
        child = apart(lambda: calm(site, kind, asked))
        ended.append(killed(child, dice.uniform(0, 0.6 if kind == "train" else 0.05)))
        run.restart(site)
        raise RuntimeError("killed")

    run.answer = answer
    run.carry()
    assert ended
    require_same(run, plain)


@pytest.mark.parametrize("point", SERVER_POINTS)
def test_a_server_killed_at_every_point(point: str, tmp_path: Path, plain: MaskedRun) -> None:
    def work() -> None:
        files.reset_failpoints()
        os.environ[VARIABLE] = f"{point}:kill@1"
        carried(tmp_path)

    child = apart(work)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    taken_up(tmp_path, plain)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("point", SITE_POINTS)
def test_a_site_killed_at_every_point(
    point: str, step: str, tmp_path: Path, plain: MaskedRun
) -> None:
    """The first time that a step reaches the point, if it does."""
    run, ended = MaskedRun(FEDAVG, tmp_path, rounds=1), list[int]()
    calm = run.answer

    def answer(site: str, kind: str, asked: Message) -> Message:
        if (site, kind) != ("client-1", step) or ended:
            return calm(site, kind, asked)

        def work() -> None:
            files.reset_failpoints()
            os.environ[VARIABLE] = f"{point}:kill@1"
            calm(site, kind, asked)

        ended.append(os.waitstatus_to_exitcode(os.waitpid(apart(work), 0)[1]))
        run.restart(site)
        raise RuntimeError("killed")

    run.answer = answer
    run.carry()
    kept = step == "train" or not point.startswith("journal.")
    assert ended == [-signal.SIGKILL if kept else 0]
    require_same(run, plain)
