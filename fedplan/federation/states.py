# SPDX-License-Identifier: Apache-2.0
"""States: how a run and each of its sites stand, as a small file in the run's folder says it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.codes import APPROVAL
from fedplan.storage.files import put_file
from fedplan.storage.logs import now
from fedplan.storage.processes import Process

STATUS, ASKED = "status.json", "asked.json"
"""In a run's folder: how it stands, and what an operator has asked of its driver."""


class RunState(StrEnum):
    """How a run stands."""

    WAITING = "waiting for sites"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"


LIVE = (RunState.WAITING, RunState.RUNNING, RunState.STOPPING)
"""States of a run that somebody drives; the others are ends."""


class SiteState(StrEnum):
    """What a site does."""

    NOT_COME = "not come"
    APPROVAL = "waits for approval"
    THERE = "there"
    ASKED = "asked"
    ANSWERED = "answered"
    LEFT_OUT = "not counted"
    AWAY = "away"
    REFUSED = "refused"
    FAILED = "failed"


GRAVE: dict[str, str] = {
    SiteState.APPROVAL: "warning",
    SiteState.AWAY: "warning",
    SiteState.REFUSED: "error",
    SiteState.FAILED: "error",
}
"""States of a site that somebody should hear of, and how grave each is."""

AFTER_ROUND, AT_ONCE = "round", "now"
"""When a run that is asked to stop does: after its open round, or without it."""


@dataclass(frozen=True)
class SiteStatus:
    """One site: what it does since when, its last round, its last fault, and its bytes."""

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
    """A run as its driver last told it.

    `asked` are the clients of the open round, and `answered` those of them who are done. `primary`
    is the score that the task is known by. `seconds` is the median of the last rounds, and `left`
    the seconds until the end at that pace. `spent` is the epsilon so far of what was `promised`,
    where anything was. `ruled` is whether a rule or a callback ended it, and no person.
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
    asked: int = 0
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
        """It as plain values."""
        return asdict(self)


def state_said(why: str) -> str:
    """The state of a site that said a code, by the sentence that the server made of it."""
    if why.startswith(f"refused: {APPROVAL}"):
        return SiteState.APPROVAL
    return SiteState.FAILED if why.startswith(("failed", "no answer")) else SiteState.REFUSED


def read_status(folder: Path) -> RunStatus | None:
    """A run as its driver last told it; None if no driver has."""
    file = folder / STATUS
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        sites = {name: SiteStatus(**each) for name, each in said.pop("sites").items()}
        return _sound(RunStatus(driver=Process(**said.pop("driver")), sites=sites, **said))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedplanError(f"{file} cannot be read: {error!r}; the run writes it anew") from error


def _sound(status: RunStatus) -> RunStatus:
    """A status whose fields are of their kinds; raises otherwise."""
    texts = (status.study, status.run, status.state, status.why, status.primary)
    numbers = (status.loss, status.seconds, status.left, status.spent, status.promised)
    counts = (status.round, status.rounds, status.asked, status.answered)
    sound = (
        all(type(each) is str for each in texts)
        and all(each is None or type(each) in (int, float) for each in numbers)
        and all(type(each) is int for each in counts)
        and type(status.ruled) is bool
        and (status.seconds is None or status.seconds >= 0)
    )
    if not sound:
        raise TypeError("a field of it is of another kind")
    return status


def ask_to_stop(folder: Path, *, at_once: bool = False) -> None:
    """Ask the driver of a run to stop: after its open round, or without it."""
    said = {"stop": AT_ONCE if at_once else AFTER_ROUND, "time": now()}
    put_file(folder / ASKED, json.dumps(said) + "\n", mode=0o666)


def read_asked(folder: Path) -> str:
    """When a run is asked to stop; nothing if it is not."""
    try:
        said = json.loads((folder / ASKED).read_text(encoding="utf-8"))
        return AT_ONCE if said["stop"] == AT_ONCE else AFTER_ROUND
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError):
        return AFTER_ROUND  # somebody meant something: the milder of the two
