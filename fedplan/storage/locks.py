# SPDX-License-Identifier: Apache-2.0
"""Locks: a folder that one process at a time may write to."""

from __future__ import annotations

import fcntl
import os
import time
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakValueDictionary

from fedplan.errors import StoreError


def _place(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


class Claim:
    """A folder held open and locked until the last Store that shares the claim is gone."""

    def __init__(self, folder: Path) -> None:
        self.lock = _locked(folder)
        weakref.finalize(self, os.close, self.lock)


_claimed: WeakValueDictionary[tuple[int, int], Claim] = WeakValueDictionary()
"""The claims of this process, by device and inode."""


def claimed(folder: Path) -> Claim:
    """A claim to a folder, shared by all in this process that ask for one."""
    place = _place(folder)
    claim = _claimed.get(place) or Claim(folder)
    _claimed[place] = claim
    return claim


def synced(folder: Path) -> None:
    """Put on disk which files a folder has."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@contextmanager
def alone(folder: Path, *, strictly: bool = False, wait: float = 0.0) -> Generator[None]:
    """Keep other processes from writing to a folder; what this one has claimed stays claimed.

    A disk without locks is taken as it is, unless this is to be done `strictly`. Who writes for a
    moment only is worth so many seconds' `wait`.
    """
    held = _claimed.get(_place(folder))
    lock = _locked(folder, strictly=strictly, wait=wait) if held is None else os.dup(held.lock)
    try:
        yield
    finally:
        os.close(lock)


@contextmanager
def sole(file: Path, *, wait: float) -> Generator[int]:
    """A file, made if it is not there, opened for this writer alone; others wait."""
    made = not file.exists()
    opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + wait
    try:
        if made:
            synced(file.parent)
        while not _taken(opened, last=time.monotonic() >= until):
            time.sleep(0.01)
        yield opened
    except BlockingIOError as error:
        raise StoreError(f"another process writes to {file}: wait until it ends") from error
    finally:
        os.close(opened)


def _locked(folder: Path, *, strictly: bool = False, wait: float = 0.0) -> int:
    """The folder, opened and locked: the lock goes with the open file, so a kill frees it."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    until = time.monotonic() + wait
    try:
        while not _taken(opened, last=time.monotonic() >= until):
            time.sleep(0.01)
    except BlockingIOError as error:
        os.close(opened)
        raise StoreError(f"another process writes to {folder}: wait until it ends") from error
    except OSError as error:
        # A disk without locks, such as some that are mounted over a network.
        if strictly:
            os.close(opened)
            raise StoreError(f"{folder} is on a disk without locks: choose another") from error
    return opened


def _taken(opened: int, *, last: bool) -> bool:
    """Whether a lock was free; the last try says so by its error."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if last:
            raise
        return False
    return True
