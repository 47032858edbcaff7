# SPDX-License-Identifier: Apache-2.0
"""Locks on folders and files, so that one process at a time writes to them."""

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


def _device_and_inode(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


class FolderLock:
    """Exclusive lock on a folder, held until the last reference to this object is gone."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = _open_locked(folder)
        weakref.finalize(self, os.close, self.descriptor)


_process_locks: WeakValueDictionary[tuple[int, int], FolderLock] = WeakValueDictionary()
"""Locks that this process holds, by device and inode."""


def acquire_folder_lock(folder: Path) -> FolderLock:
    """Lock a folder against other processes; callers in this process share one lock.

    Raises StoreError if another process holds it.
    """
    place = _device_and_inode(folder)
    lock = _process_locks.get(place) or FolderLock(folder)
    _process_locks[place] = lock
    return lock


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files to disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(
    folder: Path, *, require_locks: bool = False, timeout: float = 0.0
) -> Generator[None]:
    """Lock a folder for the body; a FolderLock of this process counts as locked.

    Waits up to `timeout` seconds, then raises StoreError. A file system without locks is accepted,
    unless `require_locks`: then it is a StoreError.
    """
    lock = _process_locks.get(_device_and_inode(folder))
    descriptor = (
        _open_locked(folder, require_locks=require_locks, timeout=timeout)
        if lock is None
        else os.dup(lock.descriptor)
    )
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def open_exclusively(file: Path, *, timeout: float) -> Generator[int]:
    """Open a file for the body with an exclusive lock, and yield its descriptor.

    Creates the file with mode 600 if it is missing. Raises StoreError if another process holds the
    lock for longer than `timeout` seconds.
    """
    is_new = not file.exists()
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + timeout
    try:
        if is_new:
            sync_folder(file.parent)
        while not _try_lock(descriptor, last=time.monotonic() >= deadline):
            time.sleep(0.01)
        yield descriptor
    except BlockingIOError as error:
        raise StoreError(f"another process writes to {file}: wait until it ends") from error
    finally:
        os.close(descriptor)


def _open_locked(folder: Path, *, require_locks: bool = False, timeout: float = 0.0) -> int:
    """Open and lock a folder, and return the descriptor; see `locked_folder` for the errors.

    The lock belongs to the open file, so it is released when the process is killed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + timeout
    try:
        while not _try_lock(descriptor, last=time.monotonic() >= deadline):
            time.sleep(0.01)
    except BlockingIOError as error:
        os.close(descriptor)
        raise StoreError(f"another process writes to {folder}: wait until it ends") from error
    except OSError as error:
        # A file system without locks, such as some network mounts.
        if require_locks:
            os.close(descriptor)
            raise StoreError(f"{folder} is on a disk without locks: choose another") from error
    return descriptor


def _try_lock(descriptor: int, *, last: bool) -> bool:
    """Lock a file without waiting; False if it is taken, or BlockingIOError on the `last` try."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        if last:
            raise
        return False
    return True
