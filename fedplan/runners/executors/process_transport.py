# SPDX-License-Identifier: Apache-2.0
"""WorkerTransport to processes of this machine, over pipes and shared tensor files."""

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

from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.runners.executors.worker import decode_json, encode_json, unshared_tensors
from fedplan.tensors.named import Tensors

_SIZE = struct.Struct("<Q")
MEMORY = Path("/dev/shm")  # noqa: S108
"""Folder whose files are in memory."""
ROOM = 2**33
"""Free bytes needed to use MEMORY; some machines have a few megabytes, and kill heavy users."""


class SharedFile:
    """Tensors in the safetensors file `file`, which the constructor writes.

    The file is deleted when this object is garbage-collected; processes that have mapped the file
    keep the tensors.
    """

    def __init__(self, file: Path, tensors: Tensors) -> None:
        self.file = file
        save_file(unshared_tensors(tensors), file)
        weakref.finalize(self, file.unlink, missing_ok=True)


class ProcessTransport:
    """WorkerTransport to `count` processes of this machine, each a new Python interpreter.

    Messages are JSON over pipes; tensors are in safetensors files in a private folder, in memory if
    there is room. `close`, or the garbage collection of this object, kills the processes and
    removes the folder; `start` may be called again after `close`.
    """

    def __init__(self, count: int) -> None:
        self.count, self._files = count, 0
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._dead = set[int]()
        self._make_folder()

    def _make_folder(self) -> None:
        """Make a private folder for tensor files, in memory if there is room."""
        ample = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
        self._folder = Path(mkdtemp(prefix="fedplan-", dir=MEMORY if ample else None))
        self._finalizer = weakref.finalize(self, _stop_all, self._running, self._folder)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each worker."""
        return {number: process.pid for number, process in self._running.items()}

    def start(self, number: int, message: Mapping[str, Any]) -> None:
        """Start the process of worker `number`, and send `message`; kills an earlier process."""
        self._discard(number)
        if not self._folder.exists():  # removed by close()
            self._make_folder()
        path = os.pathsep.join(filter(None, sys.path))
        program = "fedplan.runners.executors.worker_process"
        self._running[number] = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", program, str(self._folder), str(number)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
        )
        self.send(number, message)

    def share(self, tensors: Tensors) -> SharedFile:
        """Write tensors to a file that every worker can map."""
        self._files += 1
        return SharedFile(self._folder / f"world-{self._files}", tensors)

    def send(self, number: int, message: Mapping[str, Any], shared: object = None) -> None:
        """Send a message, and the tensors `shared` (from `share`), to the started worker `number`.

        Blocks while the pipe is full. For a dead worker nothing is raised; `receive` reports it.
        """
        pipe = self._running[number].stdin
        assert pipe is not None
        try:
            file = str(shared.file) if isinstance(shared, SharedFile) else None
            write_frame(pipe, encode_json({"fields": dict(message), "file": file}))
        except OSError:
            self._dead.add(number)

    def receive(self, timeout: float) -> list[tuple[int, TensorsAndJson | None]]:
        """Wait until a reply arrives, at most `timeout` seconds; return (number, reply) pairs.

        A reply of None marks a dead worker, reported once. Empty after the timeout.
        """
        replies = list[tuple[int, TensorsAndJson | None]]()
        with selectors.DefaultSelector() as selector:
            for number, process in self._running.items():
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, number)
            for key, _ in selector.select(0 if self._dead else timeout):
                number = cast("int", key.data)
                data = read_frame(cast("IO[bytes]", key.fileobj))
                if data is None:
                    self._dead.add(number)
                    continue
                reply, tensors = decode_json(data), dict[str, Tensor]()
                if file := reply["file"]:
                    tensors = load_file(file)
                    Path(file).unlink()  # the mapped tensors stay valid
                replies.append((number, (tensors, reply["fields"])))
        for number in sorted(self._dead):
            self._discard(number)
            replies.append((number, None))
        self._dead.clear()
        return replies

    def close(self) -> None:
        """Kill all workers, and remove the folder of tensor files."""
        _stop_all(self._running, self._folder)

    def _discard(self, number: int) -> None:
        if (process := self._running.pop(number, None)) is not None:
            _kill(process)


def write_frame(pipe: IO[bytes], data: bytes) -> None:
    """Write bytes to a pipe, preceded by their length."""
    frame = memoryview(_SIZE.pack(len(data)) + data)
    while frame:
        frame = frame[os.write(pipe.fileno(), frame) :]


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """Wait for the bytes of one `write_frame`; None if the other end is closed."""
    header = _read_exactly(pipe, _SIZE.size)
    return _read_exactly(pipe, _SIZE.unpack(header)[0]) if header is not None else None


def _read_exactly(pipe: IO[bytes], count: int) -> bytes | None:
    """Return the next `count` bytes of a pipe, waiting for them; None if the pipe ends before."""
    data = bytearray()
    while len(data) < count:
        piece = os.read(pipe.fileno(), min(count - len(data), 2**20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _kill(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.send_signal(signal.SIGKILL)
    process.wait()


def _stop_all(running: dict[int, subprocess.Popen[bytes]], folder: Path) -> None:
    """Kill the processes, empty `running`, and remove the folder. Committed state is kept."""
    for number in list(running):
        _kill(running.pop(number))
    shutil.rmtree(folder, ignore_errors=True)
