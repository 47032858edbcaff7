# SPDX-License-Identifier: Apache-2.0
"""Failpoints: named places in the code where a test can kill the process or raise a disk error.

`FEDPLAN_FAILPOINT=store.manifest_renamed:kill@3` kills this process the third time it reaches that
point. Without the variable failpoints do nothing.
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
    *("log.begun", "log.written", "log.synced", "log.head_written"),
    *("secagg.roster", "secagg.encrypted_shares", "secagg.survivors", "secagg.signed"),
    "secagg.unmask_shares",
    "round.answered",
    "round.pulled",
    "round.before_close",
    "round.ledger_written",
    "round.before_commit",
    "round.committed",
)
"""Names of all failpoints."""

_FAULTS = {"raise": errno.EIO, "enospc": errno.ENOSPC}
_SYNTAX = re.compile(r"(?P<name>[a-z_.]+):(?P<action>kill|raise|enospc)@(?P<time>[1-9][0-9]{0,8})")
_reached = Counter[str]()


def failpoint(name: str) -> None:
    """Kill this process (SIGKILL) or raise OSError if FEDPLAN_FAILPOINT selects this point.

    Does nothing without the variable; with it, counts how often each point is reached. Raises
    FedplanError if `name` is not in POINTS, or if the variable is malformed.
    """
    if name not in POINTS:
        raise FedplanError(f"there is no failpoint {name!r}: add it to failpoints.POINTS")
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    point, action, time = _parse_setting(setting)
    _reached[name] += 1
    if point == name and _reached[name] == time:
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(_FAULTS[action], f"{os.strerror(_FAULTS[action])} (failpoint {name})")


def reset_failpoints() -> None:
    """Set all counts to zero, for tests that arm several points in one process."""
    _reached.clear()


@cache
def _parse_setting(setting: str) -> tuple[str, str, int]:
    """Return (point, action, count) of a setting like `store.begun:kill@1`.

    Raises FedplanError if the setting is malformed or its point is not in POINTS.
    """
    match = _SYNTAX.fullmatch(setting)
    if match is None or match["name"] not in POINTS:
        raise FedplanError(
            f"{VARIABLE} is {setting!r}: write a point, an action and a time, such as "
            f"{POINTS[0]}:kill@1; actions are kill, raise and enospc, points {', '.join(POINTS)}"
        )
    return match["name"], match["action"], int(match["time"])
