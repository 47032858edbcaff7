# SPDX-License-Identifier: Apache-2.0
"""The worker's client: carries a request to the worker of a site, and starts it when needed.

This takes neither torch nor transformers: who carries a request need not wait for their import.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.codes import EXITS, told
from fedplan.tensors.message import BrokenMessage, Message

Value = str | int | float | bool

STARTED_WITHIN = 600.0
"""Seconds that a worker may take to import all, and to load its model and its rows."""

TRIES = 3


@dataclass(frozen=True)
class WorkerSpec:
    """Whom a site needs: its study, what its node was started with, and its reader of rows.

    `rows` is `file.py:function`, or nothing; `home` is the folder of all its experiments.
    """

    study: str
    home: str
    node: dict[str, Value] = field(default_factory=dict[str, Value])
    rows: str = ""

    @property
    def text(self) -> str:
        """It as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    @staticmethod
    def of(text: str) -> WorkerSpec:
        """It from JSON."""
        return WorkerSpec(**json.loads(text))

    @property
    def address(self) -> Path:
        """The socket of its worker: another one for any other study, rows or home."""
        found = hashlib.sha256(Path(self.study).read_bytes())
        if self.rows:
            found.update(Path(self.rows.rpartition(":")[0]).read_bytes())
        said = [str(Path(self.home).resolve()), self.rows.rpartition(":")[2], self.node]
        found.update(json.dumps(said, sort_keys=True).encode())
        return _meeting_place() / found.hexdigest()[:32]


def ask(spec: WorkerSpec, kind: str, message: Message) -> Message:
    """The worker's answer. One that dies is started again, and answers a request as before."""
    address = spec.address
    for left in reversed(range(TRIES)):
        try:
            with _connected(spec, address) as line, line.makefile("rwb") as stream:
                stream.write(kind.encode() + b"\n")
                message.write(stream)
                return Message.read(stream)
        except (OSError, BrokenMessage) as error:
            if not left:
                raise FedplanError(
                    f"the worker ended {TRIES} times while it was asked; see {log_of(spec)}"
                ).coded("trainer") from error
    raise AssertionError


def log_of(spec: WorkerSpec) -> Path:
    """Where a site's worker writes what it has to say, but for what went wrong."""
    return Path(spec.home) / "trainer.log"


@contextmanager
def _connected(spec: WorkerSpec, address: Path) -> Generator[socket.socket]:
    line = _dialled(address) or _started(spec, address)
    try:
        yield line
    finally:
        line.close()


def _dialled(address: Path) -> socket.socket | None:
    line = socket.socket(socket.AF_UNIX)
    try:
        line.connect(str(address))
    except OSError:
        line.close()
        return None
    return line


def _started(spec: WorkerSpec, address: Path) -> socket.socket:
    """A line to a worker that one of those who need it starts."""
    with address.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if found := _dialled(address):
            return found
        log = log_of(spec)
        _make_private(log)
        # -P: a study names modules, and the folder that a node was started in is none of them.
        command = [sys.executable, "-P", "-m", "fedplan.runners.worker", spec.text, str(address)]
        with log.open("ab") as out:
            process = subprocess.Popen(  # noqa: S603
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
        until = time.monotonic() + STARTED_WITHIN
        while time.monotonic() < until and process.poll() is None:
            if found := _dialled(address):
                return found
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
            process.wait()
    code = next((code for code, exit in EXITS.items() if exit == process.poll()), "trainer")
    raise FedplanError(
        f"the worker did not start ({told(code)}): `fedplan faults {spec.home}` and {log} say why"
    ).coded(code)


def _make_private(log: Path) -> None:
    """Make a log, and the folders that it lies in, that only their owner may read."""
    for each in reversed([each for each in log.parents if not each.exists()]):
        each.mkdir(mode=0o700, exist_ok=True)
    log.touch(mode=0o600)


def _meeting_place() -> Path:
    """A folder for sockets that only this user may enter: their paths must be short."""
    place = Path(tempfile.gettempdir()) / f"fedplan-{os.getuid()}"
    with suppress(FileExistsError):
        place.mkdir(mode=0o700)
    found = place.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not place.is_dir():
        raise FedplanError(f"{place} is not this user's alone: remove it, or set TMPDIR")
    return place
