# SPDX-License-Identifier: Apache-2.0
"""Worker processes of a pool or a sweep: started, sent messages, and noticed when they die.

Messages and replies are JSON with tensors. Nothing is pickled, and a worker imports the module of
its handler, not the script that started it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import resolve_name
from queue import Queue
from tempfile import mkdtemp
from typing import Any, Protocol, cast

from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.storage.checkpoints import contiguous_tensors
from fedplan.storage.files import open_private
from fedplan.tensors.named import Tensors

JsonObject = dict[str, Any]
"""A message or reply without its tensors, as JSON."""
MEMORY = Path("/dev/shm")  # noqa: S108
"""Folder whose files are in memory."""
ROOM = 2**33
"""Free bytes needed to use MEMORY; some machines have a few megabytes, and kill heavy users."""
SHUTDOWN_SECONDS = 20.0
"""Seconds that a worker has to end after SIGTERM, before it is killed."""


class Handler(Protocol):
    """A worker's part, made there without arguments; an Exception becomes an "error" reply."""

    def reply(self, message: JsonObject, tensors: Tensors) -> TensorsAndJson:
        """Return the tensors and fields of the reply to a message with `tensors`."""
        ...


class WorkerTransport(Protocol):
    """Interface to `count` workers, numbered from 0: `start` each, then `send` and `receive`.

    A worker replies to every message, in the order of sending. Only `receive` waits for replies.
    """

    count: int

    def start(self, number: int, message: Mapping[str, Any]) -> None:
        """Start a worker, in place of an earlier one of this number, and send its first message."""

    def share(self, tensors: Tensors) -> object:
        """Put tensors where workers can read them, until they have replied; for `send`."""
        ...

    def send(self, number: int, message: Mapping[str, Any], shared: object = None) -> None:
        """Send a message, and shared tensors, to a worker; a dead one is not an error here."""

    def receive(self, timeout: float) -> list[tuple[int, TensorsAndJson | None]]:
        """Return the first replies, as (worker, reply); None marks a dead one, once."""
        ...

    def close(self) -> None:
        """Stop all workers; `start` may be called again."""


class SharedFile:
    """Tensors in a safetensors file, which is deleted with this object; mappings stay valid."""

    def __init__(self, file: Path, tensors: Tensors) -> None:
        self.file = file
        save_file(contiguous_tensors(tensors), file)
        weakref.finalize(self, file.unlink, missing_ok=True)


class ProcessTransport:
    """WorkerTransport to `count` processes of this machine, each with a `handler` of its own.

    `handler` is a class at the top of an importable module. What workers print goes to the file
    `log`, by default to stderr. Tensors are in files of a private folder, in memory if there is
    room. `close`, or the garbage collection of this object, ends the processes and removes the
    folder. Workers end by themselves if this process is killed. `exit_codes` has the exit code of
    the last dead worker of each number.
    """

    def __init__(self, count: int, handler: type[Handler], log: Path | None = None) -> None:
        self.count, self._log, self._files = count, log, 0
        self._handler = f"{handler.__module__}:{handler.__qualname__}"
        self.exit_codes = dict[int, int]()
        self._running = dict[int, tuple[subprocess.Popen[bytes], Connection]]()
        self._make_folder()

    def _make_folder(self) -> None:
        ample = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > ROOM
        self._folder = Path(mkdtemp(prefix="fedplan-", dir=MEMORY if ample else None))
        weakref.finalize(self, _stop_all, self._running, self._folder)

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each running worker."""
        return {number: process.pid for number, (process, _) in self._running.items()}

    def start(self, number: int, message: Mapping[str, Any]) -> None:
        if number in self._running:
            _end(*self._running.pop(number))
        if not self._folder.exists():  # removed by close()
            self._make_folder()
        pipe, theirs = Pipe()
        words = [str(theirs.fileno()), self._handler, str(self._folder), str(number)]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with (
            open(self._log, "a", opener=open_private) if self._log else nullcontext(2) as output,
            theirs,
        ):
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-P", "-m", __name__, *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": path},
            )
        self._running[number] = process, pipe
        self.send(number, message)

    def share(self, tensors: Tensors) -> SharedFile:
        """Write tensors to a file that every worker can map."""
        self._files += 1
        return SharedFile(self._folder / f"shared-{self._files}", tensors)

    def send(self, number: int, message: Mapping[str, Any], shared: object = None) -> None:
        """Send a message, and tensors from `share`; blocks while the pipe is full."""
        file = str(shared.file) if isinstance(shared, SharedFile) else None
        with suppress(KeyError, OSError):
            self._running[number][1].send_bytes(json.dumps([dict(message), file]).encode())

    def receive(self, timeout: float) -> list[tuple[int, TensorsAndJson | None]]:
        """Wait until a reply arrives, at most `timeout` seconds; None marks a dead worker."""
        replies = list[tuple[int, TensorsAndJson | None]]()
        numbers = {pipe: number for number, (_, pipe) in self._running.items()}
        for pipe in cast("list[Connection]", wait(list(numbers), timeout)):
            number = numbers[pipe]
            try:
                fields, file = json.loads(pipe.recv_bytes())
            except (EOFError, OSError):
                self.exit_codes[number] = _end(*self._running.pop(number))
                replies.append((number, None))
                continue
            tensors = load_file(file) if file else {}
            if file:
                Path(file).unlink()  # the mapped tensors stay valid
            replies.append((number, (tensors, fields)))
        return replies

    def close(self) -> None:
        """End all workers, and remove the folder of tensor files."""
        _stop_all(self._running, self._folder)


def worker_error(error: Exception) -> JsonObject:
    """Return the fields of the reply to a message that failed unexpectedly; print the traceback."""
    traceback.print_exception(error)
    return {"error": f"{type(error).__name__}: {error}"}


def _stop_all(running: dict[int, tuple[subprocess.Popen[bytes], Connection]], folder: Path) -> None:
    """End the processes, empty `running`, and remove the folder. Committed state is kept."""
    for process, _ in running.values():
        process.terminate()
    while running:
        _end(*running.popitem()[1])
    shutil.rmtree(folder, ignore_errors=True)


def _end(process: subprocess.Popen[bytes], pipe: Connection) -> int:
    """End a worker with SIGTERM, or kill it after SHUTDOWN_SECONDS; return its exit code."""
    process.terminate()
    try:
        return process.wait(SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
    finally:
        pipe.close()  # not before: an open pipe lets the worker stop in order


def run_worker_process(pipe: Connection, handler: Handler, folder: Path, number: int) -> None:
    """Reply to the messages of a pipe, one after the other; never returns.

    Ends the process by a KeyboardInterrupt of the handler, and when the parent was killed; then
    `folder`, whose tensor files may be in memory, is removed.
    """
    messages = Queue[bytes]()

    def read_messages() -> None:
        try:
            while True:
                messages.put(pipe.recv_bytes())
        except (EOFError, OSError):
            shutil.rmtree(folder, ignore_errors=True)
            os._exit(0)

    threading.Thread(target=read_messages, daemon=True).start()
    try:
        for turn in count():  # a name of its own: the parent may not have read the last answer
            target = folder / f"answer-{number}-{turn}"
            message, file = json.loads(messages.get())
            try:
                tensors, fields = handler.reply(message, load_file(file) if file else {})
                if tensors:
                    save_file(contiguous_tensors(tensors), target)
                answer = json.dumps([fields, str(target) if tensors else None])
                del tensors
            except Exception as error:
                answer = json.dumps([worker_error(error), None])
            pipe.send_bytes(answer.encode())
    except (KeyboardInterrupt, OSError):
        os._exit(1)


if __name__ == "__main__":
    # Ctrl-C is meant for the parent, which then stops the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    run_worker_process(
        Connection(int(sys.argv[1])),
        resolve_name(sys.argv[2])(),
        Path(sys.argv[3]),
        int(sys.argv[4]),
    )
