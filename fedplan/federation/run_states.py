# SPDX-License-Identifier: Apache-2.0
"""States of a run and its sites, and the status file in the run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.error_codes import APPROVAL
from fedplan.storage.files import write_atomic
from fedplan.storage.logs import utc_now
from fedplan.storage.processes import Process

STATUS, ASKED = "status.json", "asked.json"
"""Files in a run's folder: its status, and an operator's request to stop."""


class RunState(StrEnum):
    """State of a run."""

    WAITING = "waiting for sites"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"


LIVE = (RunState.WAITING, RunState.RUNNING, RunState.STOPPING)
"""States of a run with a live server process; the others are final."""


class SiteState(StrEnum):
    """State of a site in a run."""

    NOT_COME = "not connected"
    APPROVAL = "waits for approval"
    THERE = "connected"
    ASKED = "requested"
    ANSWERED = "answered"
    LEFT_OUT = "not aggregated"
    AWAY = "away"
    REFUSED = "refused"
    FAILED = "failed"


SEVERITY: dict[str, str] = {
    SiteState.APPROVAL: "warning",
    SiteState.AWAY: "warning",
    SiteState.REFUSED: "error",
    SiteState.FAILED: "error",
}
"""Severity of the states of a site that an operator should see."""

AFTER_ROUND, AT_ONCE = "round", "now"
"""When to stop: after the open round, or at once."""


@dataclass(frozen=True)
class SiteStatus:
    """Status of one site.

    `why`, `since`: reason and time of the state. `round`: last round. `fault`, `fault_at`: last
    error and its time. `up`, `down`: bytes uploaded and downloaded.
    """

    state: str = SiteState.NOT_COME
    why: str = ""
    since: str = ""
    round: int = 0
    fault: str = ""
    fault_at: str = ""
    up: int = 0
    down: int = 0


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, as its server last wrote it.

    `driver`: the server's process. `began`, `changed`: times. `state`, `why`: state and reason.
    `ruled`: early stopping or a callback ended the run, not a person.
    `round`, `rounds`: last closed round, and all. `asked`, `answered`: clients of the open round.
    `primary`: the task's primary metric. `loss`, `scores`: of the last round.
    `seconds`: median duration of the last rounds. `left`: estimated seconds until the end.
    `spent`, `promised`: epsilon. `hidden`: client-level DP. `sites`: status by site.
    """

    study: str = ""
    run: str = ""
    driver: Process = field(default_factory=Process)
    began: str = ""
    changed: str = ""
    state: str = RunState.WAITING
    why: str = ""
    ruled: bool = False
    round: int = 0
    rounds: int = 0
    requested: int = 0
    answered: int = 0
    primary: str = ""
    loss: float | None = None
    scores: dict[str, float] = field(default_factory=dict[str, float])
    seconds: float | None = None
    left: float | None = None
    spent: float | None = None
    promised: float | None = None
    hidden: bool = False
    sites: dict[str, SiteStatus] = field(default_factory=dict[str, SiteStatus])

    def json(self) -> dict[str, Any]:
        """Return the status as JSON values."""
        return asdict(self)


def site_state_from_reason(why: str) -> str:
    """Return a site's state from the server's sentence for its error code (`describe_code`)."""
    if why.startswith(f"refused: {APPROVAL}"):
        return SiteState.APPROVAL
    return SiteState.FAILED if why.startswith(("failed", "no answer")) else SiteState.REFUSED


def read_status(folder: Path) -> RunStatus | None:
    """Read a run's status; None if there is no status file.

    Raises FedplanError if the file is damaged.
    """
    file = folder / STATUS
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        sites = {name: SiteStatus(**site) for name, site in fields.pop("sites").items()}
        status = RunStatus(driver=Process(**fields.pop("driver")), sites=sites, **fields)
        return _require_types(status)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedplanError(
            f"{file} cannot be read: {error!r}; the run will write it again"
        ) from error


def _require_types(status: RunStatus) -> RunStatus:
    """Return the status; raise TypeError if a field has another type."""
    texts = (status.study, status.run, status.state, status.why, status.primary)
    numbers = (status.loss, status.seconds, status.left, status.spent, status.promised)
    counts = (status.round, status.rounds, status.requested, status.answered)
    valid = (
        all(type(each) is str for each in texts)
        and all(each is None or type(each) in (int, float) for each in numbers)
        and all(type(each) is int for each in counts)
        and type(status.ruled) is bool
        and (status.seconds is None or status.seconds >= 0)
    )
    if not valid:
        raise TypeError("a field has another type")
    return status


def ask_to_stop(folder: Path, *, at_once: bool = False) -> None:
    """Ask a run's server to stop, after its open round or at once, by a file in its folder."""
    request = {"stop": AT_ONCE if at_once else AFTER_ROUND, "time": utc_now()}
    write_atomic(folder / ASKED, json.dumps(request) + "\n", mode=0o666)


def read_stop_request(folder: Path) -> str:
    """Return when a run is asked to stop, AFTER_ROUND or AT_ONCE; empty if it is not.

    A damaged file counts as AFTER_ROUND.
    """
    try:
        request = json.loads((folder / ASKED).read_text(encoding="utf-8"))
        return AT_ONCE if request["stop"] == AT_ONCE else AFTER_ROUND
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError):
        return AFTER_ROUND
