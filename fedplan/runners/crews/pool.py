# SPDX-License-Identifier: Apache-2.0
"""Pools: workers that are processes of this machine, reached by pipes and shared files."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import IO, Any, cast

from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from fedplan.federation.partial import Sent
from fedplan.runners.crews.player import apart, read_words, worded
from fedplan.tensors.named import Tensors

_SIZE = struct.Struct("<Q")
MEMORY = Path("/dev/shm")  # noqa: S108
"""Where a file is memory, if there is enough of it."""
ROOM = 2**33
"""Bytes that must be free there: some machines give it a few megabytes, and kill who uses more."""


class SharedFile:
    """Tensors in a file that goes with this; who has mapped it keeps what it has."""

    def __init__(self, file: Path, tensors: Tensors) -> None:
        self.file = file
        save_file(apart(tensors), file)
        weakref.finalize(self, file.unlink, missing_ok=True)


class Processes:
    """Workers that are processes of their own, each begun anew: nothing of this one is copied.

    What is said goes through pipes, as JSON. Tensors lie in files of safetensors that others map.
    """

    def __init__(self, count: int) -> None:
        self.count, self._files = count, 0
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._dead = set[int]()
        self._place()

    def _place(self) -> None:
        """Have a folder that nobody else sees into."""
        ample = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
        self._folder = Path(mkdtemp(prefix="fedplan-", dir=MEMORY if ample else None))
        self._end = weakref.finalize(self, _ended, self._running, self._folder)

    @property
    def pids(self) -> dict[int, int]:
        """The id of each worker's process."""
        return {number: each.pid for number, each in self._running.items()}

    def start(self, number: int, said: Mapping[str, Any]) -> None:
        """Start a worker, or another one in its place."""
        self._buried(number)
        if not self._folder.exists():  # it was closed
            self._place()
        path = os.pathsep.join(filter(None, sys.path))
        self._running[number] = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "fedplan.runners.crews.process", str(self._folder), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
        )
        self.send(number, said)

    def share(self, tensors: Tensors) -> SharedFile:
        """Write tensors to a file that every worker maps."""
        self._files += 1
        return SharedFile(self._folder / f"world-{self._files}", tensors)

    def send(self, number: int, said: Mapping[str, Any], shared: object = None) -> None:
        """Send a worker a message."""
        pipe = self._running[number].stdin
        assert pipe is not None
        try:
            file = str(shared.file) if isinstance(shared, SharedFile) else None
            write(pipe, worded({"said": dict(said), "file": file}))
        except OSError:
            self._dead.add(number)

    def heard(self, seconds: float) -> list[tuple[int, Sent | None]]:
        """Who has answered what, or has died."""
        found = list[tuple[int, Sent | None]]()
        with selectors.DefaultSelector() as ready:
            for number, each in self._running.items():
                assert each.stdout is not None
                ready.register(each.stdout, selectors.EVENT_READ, number)
            for key, _ in ready.select(0 if self._dead else seconds):
                number = cast("int", key.data)
                data = read(cast("IO[bytes]", key.fileobj))
                if data is None:
                    self._dead.add(number)
                else:
                    found.append((number, _answer(data)))
        for number in sorted(self._dead):
            self._buried(number)
            found.append((number, None))
        self._dead.clear()
        return found

    def close(self) -> None:
        """End all of them."""
        _ended(self._running, self._folder)

    def _buried(self, number: int) -> None:
        if (gone := self._running.pop(number, None)) is not None:
            _killed(gone)


def write(pipe: IO[bytes], data: bytes) -> None:
    """Write bytes so that `read` finds their end."""
    whole = memoryview(_SIZE.pack(len(data)) + data)
    while whole:
        whole = whole[os.write(pipe.fileno(), whole) :]


def read(pipe: IO[bytes]) -> bytes | None:
    """The bytes that were written; None if nobody is at the other end any more."""
    head = _exactly(pipe, _SIZE.size)
    return _exactly(pipe, _SIZE.unpack(head)[0]) if head is not None else None


def _exactly(pipe: IO[bytes], count: int) -> bytes | None:
    found = bytearray()
    while len(found) < count:
        some = os.read(pipe.fileno(), min(count - len(found), 2**20))
        if not some:
            return None
        found += some
    return bytes(found)


def _answer(data: bytes) -> Sent:
    answer = read_words(data)
    tensors = dict[str, Tensor]()
    if file := answer["file"]:
        tensors = load_file(file)
        Path(file).unlink()  # what is mapped stays until nobody has it
    return tensors, answer["said"]


def _killed(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.send_signal(signal.SIGKILL)
    process.wait()


def _ended(running: dict[int, subprocess.Popen[bytes]], folder: Path) -> None:
    """End workers: what they have committed lasts, and nobody waits for what they are at."""
    for number in list(running):
        _killed(running.pop(number))
    shutil.rmtree(folder, ignore_errors=True)
