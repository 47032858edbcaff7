# SPDX-License-Identifier: Apache-2.0
"""Processes: whether the one that wrote a file still lives."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Process:
    """A process: its number, its machine, and when it began, as the machine counts.

    A number is given anew when its process is gone: with the time it is nobody else's.
    """

    pid: int = 0
    host: str = ""
    start: str = ""

    @property
    def alive(self) -> bool | None:
        """Whether it lives; None if that cannot be seen from this machine."""
        if self.host != socket.gethostname():
            return None
        return bool(self.pid) and _start(self.pid) == self.start


def this_process() -> Process:
    """The process that asks."""
    return Process(os.getpid(), socket.gethostname(), _start(os.getpid()))


def _start(pid: int) -> str:
    """When a process began; nothing if there is none, or if it has ended and nobody noticed."""
    try:
        # The name of a program stands in brackets, and may hold blanks and brackets itself.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else f"{_BOOT.read_text().strip()} {fields[19]}"
    except OSError:
        return "" if Path("/proc/self").exists() else _signalled(pid)


def _signalled(pid: int) -> str:
    """On a machine without /proc: whether there is any process of that number."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except PermissionError:
        pass
    return "some time"
