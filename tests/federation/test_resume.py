# SPDX-License-Identifier: Apache-2.0
"""Killed anywhere and resumed is never killed: the same model, homes, metrics and ledger."""

from __future__ import annotations

import gc
import os
import random
import shutil
import signal
import subprocess
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import zoo
from clients import GUARANTEES, RUN, few, know_secrets, loss
from often import first
from power import PowerDisk

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.agreement import Agreement
from fedplan.federation.participation import Participation
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.runners.local import Faults, Federation
from fedplan.storage import files, locks
from fedplan.storage.files import POINTS, VARIABLE
from fedplan.tensors.named import digests
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import LRSchedule

ROUNDS = 5
PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)
SAMPLING_RATES = LRSchedule("cosine", 0.3, rounds=ROUNDS)
PACES = {
    "scaffold": replace(
        PACE,
        lr_scheduler=SAMPLING_RATES,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        num_workers=1,
    ),
    "fedadam": replace(
        PACE, steps=0, lr_scheduler=LRSchedule("linear", 1), gradient_accumulation_steps=2
    ),
    "cloaked": replace(PACE, lr_scheduler=SAMPLING_RATES),
}
"""Ways to train that a kill must not change: what a turn's rates are, and what a step is."""
DEFENCES = {
    "capped": Defence(max_weight_fraction=0.4, max_norm_ratio=1.1),
    "krummed": Defence(rule="multi-krum", max_norm_ratio=1.1),
}


def federation(folder: Path, name: str, *, replies: bool) -> Federation:
    model, guarantee, rows = zoo.build("bert"), GUARANTEES.get(name), few("bert", 3)
    published = "fedavg" if name in DEFENCES else name
    made = (
        method_by_name("safl", {"k": 1, "joint_choice": True})
        if guarantee
        else method_by_name(published)
    )
    train_arguments, defence = PACES.get(name, PACE), DEFENCES.get(name, Defence())
    agreement = Agreement(
        "kill", describe(model), made, train_arguments, guarantee, run=RUN, defence=defence
    )
    know_secrets(folder, rows)
    return Federation(
        agreement,
        model,
        rows,
        loss,
        folder,
        rounds=ROUNDS,
        participation=None if guarantee else Participation(fraction=0.7),
        faults=None if guarantee else Faults(late=0.2),
        keep_replies=replies,
    )


def play(folder: Path, name: str, *, replies: bool) -> None:
    fed = federation(folder, name, replies=replies)
    while fed.global_state.round < ROUNDS:
        round_state = fed.run_round()
        fed.commit(round_state, {"score": float(len(round_state.aggregated))})


def played(folder: Path, name: str, *, replies: bool, failpoint: str = "", after: float = 0) -> int:
    """Play in a process of its own, killed at a failpoint or after a while. How it ended."""
    child = os.fork()
    if child == 0:
        try:
            files.reset_failpoints()
            os.environ.pop(VARIABLE, None)
            if failpoint:
                os.environ[VARIABLE] = failpoint
            play(folder, name, replies=replies)
        except BaseException:
            os._exit(3)
        os._exit(0)
    if after:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def left(folder: Path, name: str, *, replies: bool) -> dict[str, object]:
    """All that a run leaves: the world, the homes, the ledger, the metrics."""
    fed = federation(folder, name, replies=replies)
    assert fed.global_state.round == ROUNDS
    return {
        "world": digests(fed.global_state.values),
        "memory": {k: digests(m) for k, m in fed.global_state.memory.items()},
        "homes": {n: digests(s.journal.client_state()[0]) for n, s in fed.clients.items()},
        "ledger": (folder / "ledger.jsonl").read_bytes(),
        "metrics": (folder / "metrics.jsonl").read_bytes(),
        "choice": fed.global_state.choice,
        "clip": fed.global_state.clipping_norm,
        "charges": {
            str(file.relative_to(folder)): file.read_bytes()
            for file in sorted((folder / "privacy").rglob(CHARGES_FILE))
        },
    }


@cache
def expected(name: str, replies: bool) -> tuple[dict[str, object], float]:
    folder = Path(mkdtemp())
    started = time.monotonic()
    play(folder, name, replies=replies)
    return left(folder, name, replies=replies), time.monotonic() - started


HERE = [point for point in POINTS if not point.startswith("secagg")]  # which has its own tests
CASES = [(point, k, r) for i, point in enumerate(HERE) for k in (1, 4) for r in (i % 2 == k % 2,)]


@pytest.mark.parametrize(("point", "time_", "replies"), CASES)
def test_killed_at_a_failpoint(point: str, time_: int, replies: bool, tmp_path: Path) -> None:
    name = {"round": "scaffold", "log": "cloaked" if replies else "veiled"}.get(
        point.partition(".")[0], "fedper"
    )
    ended = played(tmp_path, name, replies=replies, failpoint=f"{point}:kill@{time_}")
    assert ended == -signal.SIGKILL
    assert played(tmp_path, name, replies=replies) == 0
    assert left(tmp_path, name, replies=replies) == expected(name, replies)[0]


class Died(BaseException):
    """The process dies here."""


def die(*_: object) -> None:
    raise Died


CUTS = [
    (point, k, ("fedper", "scaffold")[(i + k) % 2]) for i, point in enumerate(HERE) for k in (1, 8)
]


@pytest.mark.parametrize(("point", "time_", "name"), CUTS)
def test_a_power_cut_changes_nothing(
    point: str, time_: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turns of a round are made durable by one call before the round is committed."""
    expected_end, disk = expected(name, replies=False)[0], PowerDisk()
    memory = Path("/dev/shm")  # where inodes are not used again
    folder = Path(mkdtemp(dir=memory if memory.is_dir() else None))
    monkeypatch.setattr(os, "kill", die)
    monkeypatch.setattr(os, "fsync", disk.sync)
    monkeypatch.setattr(locks, "find_syncfs", lambda: disk.syncfs)
    monkeypatch.setenv(VARIABLE, f"{point}:kill@{time_}")
    files.reset_failpoints()
    try:
        disk.settle(folder)
        with suppress(Died):
            play(folder, name, replies=False)
        monkeypatch.delenv(VARIABLE)
        gc.collect()
        disk.cut(folder, random.Random(f"{point}{time_}{name}"))
        play(folder, name, replies=False)
        assert left(folder, name, replies=False) == expected_end
    finally:
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "point"),
    [
        ("capped", "round.before_commit"),
        ("krummed", "round.pulled"),
        ("diloco", "journal.after_commit"),
        pytest.param("diloco", "round.before_commit", marks=pytest.mark.nightly),
        pytest.param("capped", "round.pulled", marks=pytest.mark.nightly),
        pytest.param("krummed", "round.before_close", marks=pytest.mark.nightly),
    ],
)
def test_killed_under_a_defence_or_with_kept_optimizers(
    name: str, point: str, tmp_path: Path
) -> None:
    ended = played(tmp_path, name, replies=True, failpoint=f"{point}:kill@3")
    assert ended == -signal.SIGKILL
    assert played(tmp_path, name, replies=True) == 0
    assert left(tmp_path, name, replies=True) == expected(name, True)[0]


KILLED = ("fedper", "scaffold", "fedadam", "veiled", "cloaked", "feddyn", "ditto", "diloco")


@pytest.mark.parametrize("number", first(5, list(range(50))))
def test_killed_at_a_random_moment(number: int, tmp_path: Path) -> None:
    replies, name = number % 2 == 0, KILLED[number % len(KILLED)]
    reference, seconds = expected(name, replies)
    draw = random.Random(number)
    for _ in range(2):
        played(tmp_path, name, replies=replies, after=draw.uniform(0.01, seconds))
    assert played(tmp_path, name, replies=replies) == 0
    assert left(tmp_path, name, replies=replies) == reference


@pytest.mark.parametrize("point", [p for p in HERE if not p.startswith("round")])
@pytest.mark.parametrize("time_", [1, 7])
def test_a_full_disk_is_an_error_and_the_run_goes_on_after_it(
    point: str, time_: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, f"{point}:enospc@{time_}")
    files.reset_failpoints()
    name = "cloaked" if point.startswith("log.") else "fedper"
    with pytest.raises(FedplanError, match="No space left"):
        play(tmp_path, name, replies=True)
    monkeypatch.delenv(VARIABLE)
    play(tmp_path, name, replies=True)
    assert left(tmp_path, name, replies=True) == expected(name, True)[0]


def test_a_federation_that_is_let_go_lets_its_folder_go(tmp_path: Path) -> None:
    """At once: whoever comes next may claim it, without waiting for the collector."""
    gc.collect()
    gc.disable()
    try:
        made = federation(tmp_path, "cloaked", replies=False)
        made.run_round()
        held = weakref.ref(made), weakref.ref(made.server)
        del made
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", place],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk")
    try:
        for size in range(300, 2500, 100):
            subprocess.run(["mount", "-o", f"remount,size={size}k", place], check=True)
            try:
                play(place, "fedper", replies=True)
                break
            except FedplanError as error:
                assert "No space left" in str(error)
        assert left(place, "fedper", replies=True) == expected("fedper", True)[0]
    finally:
        subprocess.run(["umount", place], check=True)
