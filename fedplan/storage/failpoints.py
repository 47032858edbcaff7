# SPDX-License-Identifier: Apache-2.0
"""Failpoints: named points of durable code where a test can kill the process or fail the disk.

`FEDPLAN_FAILPOINT=store.manifest_renamed:kill@3` kills this process the third time that it reaches
that point. Without the variable a point does nothing.
"""

from __future__ import annotations

import errno
import os
import re
import signal
from collections import Counter
from functools import cache

from fedplan.errors import FedplanError

VARIABLE = "FEDPLAN_FAILPOINT"
POINTS = (
    *("store.begun", "store.tensors_written", "store.tensors_synced", "store.tensors_renamed"),
    *("store.manifest_written", "store.manifest_renamed", "store.folder_synced", "store.pruned"),
    *("journal.before_commit", "journal.after_commit"),
    *("budget.before", "budget.written", "budget.synced"),
    *("masking.roster", "masking.boxes", "masking.survivors", "masking.consented"),
    "masking.answered",
    "round.answered",
    "round.pulled",
    "round.before_close",
    "round.ledger_written",
    "round.before_commit",
    "round.committed",
)
"""Every point there is; code that adds a point adds its name here."""

_FAULTS = {"raise": errno.EIO, "enospc": errno.ENOSPC}
_SYNTAX = re.compile(r"(?P<name>[a-z_.]+):(?P<action>kill|raise|enospc)@(?P<time>[1-9][0-9]{0,8})")
_reached = Counter[str]()


def reach(name: str) -> None:
    """Say that this point is reached, and fail here if the variable asks for it."""
    if name not in POINTS:
        raise FedplanError(f"there is no failpoint {name!r}: add it to failpoints.POINTS")
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    point, action, time = _parsed(asked)
    _reached[name] += 1
    if point == name and _reached[name] == time:
        _fail(name, action)


def forget() -> None:
    """Count from nothing again, for tests that arm several points in one process."""
    _reached.clear()


@cache
def _parsed(asked: str) -> tuple[str, str, int]:
    found = _SYNTAX.fullmatch(asked)
    if found is None or found["name"] not in POINTS:
        raise FedplanError(
            f"{VARIABLE} is {asked!r}: write a point, an action and a time, such as "
            f"{POINTS[0]}:kill@1; actions are kill, raise and enospc, points {', '.join(POINTS)}"
        )
    return found["name"], found["action"], int(found["time"])


def _fail(name: str, action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise OSError(_FAULTS[action], f"{os.strerror(_FAULTS[action])} (failpoint {name})")
