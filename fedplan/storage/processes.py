# SPDX-License-Identifier: Apache-2.0
"""Identity of a process, to tell whether the writer of a file is still running."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")


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
