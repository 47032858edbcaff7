# SPDX-License-Identifier: Apache-2.0
"""A power cut loses nothing that a call has returned from, and every single sync is needed."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from power import PowerDisk, inodes

from fedplan.errors import FedplanError
from fedplan.privacy.mechanisms.noise import load_or_create_secret, read_secret
from fedplan.storage import files, locks
from fedplan.storage.append_log import AppendLog, CommittedLog, read_json_lines
from fedplan.storage.encryption import new_key_file
from fedplan.storage.files import make_folder, write_atomic, write_folder
from fedplan.storage.journal import Journal, sync_journals
from fedplan.storage.store import Store

STORE_POINTS = [point for point in files.POINTS if point.startswith("store.")]
LOG_POINTS = [point for point in files.POINTS if point.startswith("log.")]
CUTS = 8
"""Power cuts that are drawn for each state of a disk."""


class Killed(BaseException):
    """The process dies here."""


def killed_at(point: str, act: Callable[[], object]) -> bool:
    """Do something in a process that dies at a failpoint, and not of power; whether it died."""
    files._reached = Counter()
    os.environ[files.VARIABLE] = f"{point}:kill@1"
    try:
        act()
    except Killed:
        return True
    finally:
        os.environ.pop(files.VARIABLE)
    return False


class Disk:
    """A folder whose power fails: `after_cuts` looks at what each of several cuts leaves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.power, self.rng = folder, PowerDisk(), Random(0)
        folder.mkdir(parents=True)
        self.power.settle(folder)

    def after_cuts(self, check: Callable[[], None]) -> None:
        """Check the folder after each of CUTS power cuts, each of the present state."""
        saved = self.folder.with_name("saved")
        for _ in range(CUTS):
            shutil.rmtree(saved, ignore_errors=True)
            shutil.copytree(self.folder, saved)
            contents, names = dict(self.power.contents), dict(self.power.names)
            before = inodes(self.folder)
            self.power.cut(self.folder, self.rng)
            check()
            # As before the cut, with the new inodes of the same files.
            shutil.rmtree(self.folder)
            shutil.move(saved, self.folder)
            self.power.contents, self.power.names = contents, names
            self.power.copied(self.folder, before)


def small_file(disk: Disk) -> None:
    file = disk.folder / "a" / "b" / "file"
    make_folder(file.parent)
    for content in (b"one", b"two"):
        write_atomic(file, content)
        disk.after_cuts(lambda content=content: _equal(file.read_bytes(), content))


def folder_of_a_killed_process(disk: Disk) -> None:
    file = disk.folder / "a" / "b" / "file"
    file.parent.mkdir(parents=True)
    make_folder(file.parent)
    write_atomic(file, b"one")
    disk.after_cuts(lambda: _equal(file.read_bytes(), b"one"))


def secret(disk: Disk) -> None:
    found = load_or_create_secret(disk.folder / "secret")
    disk.after_cuts(lambda: _equal(read_secret(disk.folder / "secret"), found))


def committed_log(disk: Disk) -> None:
    log = CommittedLog(disk.folder / "log.jsonl")
    for number in (1, 2):
        log.append([{"n": number}])
        disk.after_cuts(lambda n=number: _equal(len(read_json_lines(log.file)), n))


def folder(disk: Disk) -> None:
    target = disk.folder / "model"
    with write_folder(target) as new:
        (new / "part").mkdir()
        (new / "part" / "weights").write_bytes(b"one")
        (new / "card").write_bytes(b"two")
    disk.after_cuts(lambda: _equal((target / "part" / "weights").read_bytes(), b"one"))
    disk.after_cuts(lambda: _equal((target / "card").read_bytes(), b"two"))


def key_file(disk: Disk) -> None:
    file = disk.folder / "state.key"
    new_key_file(file)
    content = file.read_bytes()
    disk.after_cuts(lambda: _equal(file.read_bytes(), content))


def append_log(disk: Disk) -> None:
    for chained in (False, True):
        for point in LOG_POINTS:
            file = disk.folder / f"{point}{chained}.jsonl"
            first = killed_at(
                point, lambda f=file, c=chained: AppendLog(f, chained=c).append({"n": 0})
            )
            if not first:
                continue

            def go_on(file: Path = file, chained: bool = chained) -> None:
                AppendLog(file, chained=chained).append({"n": 1})
                _equal([x["n"] for x in AppendLog(file, chained=chained).read()][-1], 1)

            disk.after_cuts(go_on)
            AppendLog(file, chained=chained).append({"n": 1})

            def check(file: Path = file, chained: bool = chained) -> None:
                _equal([x["n"] for x in AppendLog(file, chained=chained).read()][-1], 1)

            disk.after_cuts(check)
            for leftover in disk.folder.iterdir():
                leftover.unlink()


def checkpoints(disk: Disk) -> None:
    folder = disk.folder / "checkpoints"

    def write(number: int, value: float) -> None:
        Store(folder).write({"x": torch.tensor(value)}, {"v": value}, number=number)

    def require(least: float) -> None:
        found = Store(folder).read_newest()
        assert found is not None and float(found.tensors["x"]) == found.meta["v"]
        _equal(found.meta["v"] >= least, True)

    for first in STORE_POINTS:
        for second in ("store.tensors_renamed", "store.manifest_renamed", "store.pruned"):
            write(1, 1.0)
            disk.after_cuts(lambda: require(1.0))
            killed_at(first, lambda: write(2, 2.0))
            disk.after_cuts(lambda: require(1.0))
            found = Store(folder).read_newest()
            seen = found.meta["v"] if found else 0.0  # whoever has seen it may rely on it
            disk.after_cuts(lambda seen=seen: require(seen))
            killed_at(second, lambda: write(2, 3.0))
            disk.after_cuts(lambda seen=seen: require(seen))
            killed_at(first, lambda: write(2, 4.0))
            killed_at(second, lambda: write(2, 5.0))
            disk.after_cuts(lambda seen=seen: require(seen))
            shutil.rmtree(folder)


def journals(disk: Disk) -> None:
    """Journals that are made durable together: a cut leaves each as of the last such moment."""
    folder, point = disk.folder / "run", "store.manifest_renamed"
    folder.mkdir()

    def journal(name: str) -> Journal:
        return Journal(folder / "clients" / name, keep_replies=False, synced=False)

    def commit(number: int) -> None:
        for name in ("a", "b"):
            value = {"x": torch.tensor(float(number))}
            journal(name).commit(f"round {number}", value, {}, {}, {})

    def require(least: int) -> None:
        for name in ("a", "b"):
            value = float(journal(name).client_state()[0].get("x", 0))
            _equal(value in (least, least + 1), True)

    for number in range(3):
        if number:
            commit(number)
            sync_journals(folder)
            disk.after_cuts(lambda number=number: require(number))
        killed_at(point, lambda number=number: commit(number + 1))
        disk.after_cuts(lambda number=number: require(number))


ACTS = {
    act.__name__: act
    for act in (
        small_file,
        folder_of_a_killed_process,
        secret,
        committed_log,
        folder,
        key_file,
        append_log,
        checkpoints,
        journals,
    )
}


def _equal(found: object, expected: object) -> None:
    if found != expected:
        raise FedplanError(f"{found} instead of {expected}")


@pytest.fixture(autouse=True)
def power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Syncs go to the disk of the test, and a death is an exception."""

    def die(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(os, "kill", die)


def try_act(name: str, folder: Path) -> str:
    """Return what was lost when an act was disturbed by power cuts; "" if nothing."""
    disk = Disk(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", disk.power.fsync)
        patch.setattr(locks, "find_syncfs", lambda: disk.power.syncfs)
        try:
            ACTS[name](disk)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            shutil.rmtree(folder)
    return ""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where inodes are not used again, if there is such a place."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if memory.is_dir() else tmp_path))
    yield folder / "disk"
    shutil.rmtree(folder)


@pytest.mark.parametrize("name", ACTS)
def test_a_power_cut_loses_nothing(name: str, place: Path) -> None:
    assert try_act(name, place) == ""


def sync_calls() -> Iterator[tuple[str, str]]:
    """Yield file name and line number of each call in the package that syncs."""
    for file in Path(files.__file__).parents[1].rglob("*.py"):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if (
                re.search(r"(?<!def )sync_(folder|file_system)\(|os\.fsync\(", line)
                and file.name != "locks.py"
            ):
                yield file.name, str(number)


def test_every_single_sync_is_missed_if_it_is_removed(place: Path) -> None:
    PowerDisk.seen.clear()
    for name in ACTS:
        assert try_act(name, place) == ""
    lines, unnoticed = sorted(PowerDisk.seen), list[str]()
    assert {(x.split()[0], x.split(":")[-1]) for x in lines} == set(sync_calls())
    for line in lines:
        PowerDisk.removed.add(line)
        try:
            if not any(try_act(name, place) for name in ACTS):
                unnoticed.append(line)
        finally:
            PowerDisk.removed.clear()
    assert unnoticed == []
