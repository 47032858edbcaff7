# SPDX-License-Identifier: Apache-2.0
"""Locks on folders and files, and the identity of the process that holds one."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import socket
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from weakref import WeakValueDictionary

from fedplan.errors import StoreError

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mounts")


class NoLocks(StoreError):
    """A file or folder on a file system without locks, such as some network mounts."""

    @classmethod
    def of(cls, path: Path, error: OSError) -> NoLocks:
        """Return the error for a path that could not be locked."""
        return cls(
            f"{path} is on a disk without locks ({_file_system(path)}: {error.strerror}), where "
            "two processes could overwrite each other's files: name a folder on a local disk, or "
            "mount this one with locks"
        )


def _file_system(path: Path) -> str:
    """Return type and mount point of a path's file system; "unknown" without a /proc."""
    path, name, longest = path.resolve(), "unknown", Path()
    with suppress(OSError):
        for line in _MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines():
            _, place, kind, *_ = line.split(" ")
            mount = Path(place.replace("\\040", " "))
            if path.is_relative_to(mount) and len(mount.parts) >= len(longest.parts):
                name, longest = f"{kind} at {mount}", mount
    return name


@dataclass(frozen=True)
class Process:
    """Identity of a process: `pid`, `host` name, and `start` (boot id and start time in ticks).

    `start` distinguishes processes with the same pid one after the other. Stored in files, to see
    later whether the writer is `alive`. The default is no process.
    """

    pid: int = 0
    host: str = ""
    start: str = ""

    @property
    def alive(self) -> bool | None:
        """Whether the process is running; None if it is on another host."""
        if self.host != socket.gethostname():
            return None
        return bool(self.pid) and _start(self.pid) == self.start


def current_process() -> Process:
    """Return the identity of this process."""
    return Process(os.getpid(), socket.gethostname(), _start(os.getpid()))


def _start(pid: int) -> str:
    """Return boot id and start time of a process; empty if it does not exist or is a zombie.

    Without a /proc file system, the same text is returned for every existing process.
    """
    try:
        # The program name is in brackets, and may contain blanks and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else f"{_BOOT.read_text().strip()} {fields[19]}"
    except OSError:
        if Path("/proc/self").exists():
            return ""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "some time"


def _device_and_inode(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


class FolderLock:
    """Exclusive lock on a folder, released when the last reference to this object is gone.

    Raises StoreError at once if another process has the lock. Use `acquire_folder_lock`.
    """

    def __init__(self, folder: Path) -> None:
        self.descriptor = _open_locked(folder)
        weakref.finalize(self, os.close, self.descriptor)


_process_locks: WeakValueDictionary[tuple[int, int], FolderLock] = WeakValueDictionary()
"""Locks that this process holds, by device and inode."""


def acquire_folder_lock(folder: Path) -> FolderLock:
    """Lock a folder against other processes without waiting; keep the result as long as needed.

    Callers in this process share one FolderLock. Raises StoreError if another process has the lock,
    NoLocks if the file system has none.
    """
    place = _device_and_inode(folder)
    lock = _process_locks.get(place) or FolderLock(folder)
    _process_locks[place] = lock
    return lock


def sync_folder(folder: Path) -> None:
    """Flush a folder's list of files, or a file, to disk (fsync)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@cache
def find_syncfs() -> Callable[[int], int] | None:
    """Return the system call that makes a whole file system durable; None where there is none."""
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


def sync_file_system(folder: Path) -> None:
    """Flush all that was written to the file system of a folder, by whichever process, to disk.

    Raises OSError if that fails, or on a system without this call (see `find_syncfs`).
    """
    syncfs, descriptor = find_syncfs(), os.open(folder, os.O_RDONLY)
    try:
        if syncfs is None or syncfs(descriptor):
            error = ctypes.get_errno() if syncfs else errno.ENOSYS
            raise OSError(error, os.strerror(error), str(folder))
    finally:
        os.close(descriptor)


@contextmanager
def locked_folder(folder: Path, *, timeout: float = 0.0) -> Generator[None]:
    """Lock a folder against other processes for the body of a `with` statement.

    Passes at once if this process has a FolderLock on the folder. Waits up to `timeout` seconds for
    another process, then raises StoreError. Raises NoLocks if the file system has none.
    """
    lock = _process_locks.get(_device_and_inode(folder))
    descriptor = os.dup(lock.descriptor) if lock else _open_locked(folder, timeout=timeout)
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def open_exclusively(file: Path, *, timeout: float) -> Generator[int]:
    """Open `file` with an exclusive lock for the body of a `with` statement; yield the descriptor.

    Creates the file with mode 600 if it is missing, without a sync; closes the descriptor at the
    end. Raises StoreError if another process keeps the lock for over `timeout` seconds, NoLocks if
    the file system has none.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(descriptor, file, timeout)
        try:
            yield descriptor
        finally:  # unlocked at once: a process forked meanwhile would keep the lock
            fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open_locked(folder: Path, *, timeout: float = 0.0) -> int:
    """Open and lock a folder; return the descriptor, whose closing releases the lock.

    Raises as `_lock` does. A kill of the process releases the lock.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _lock(descriptor, folder, timeout)
    except StoreError:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, path: Path, timeout: float) -> None:
    """Lock the open file or folder `path`, trying every 10 ms for `timeout` seconds.

    Raises StoreError if another process has the lock until then, NoLocks if the file system has
    none.
    """
    deadline = time.monotonic() + timeout
    while True:
        last = time.monotonic() >= deadline
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if last:
                text = f"another process writes to {path}: wait until it ends"
                raise StoreError(text) from error
            time.sleep(0.01)
        except OSError as error:
            raise NoLocks.of(path, error) from error
