# SPDX-License-Identifier: Apache-2.0
"""States of a run and its sites, and the status file in the run's folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.ledger.faults import APPROVAL
from fedplan.storage.files import SHARED, write_atomic
from fedplan.storage.locks import Process
from fedplan.storage.logs import utc_now

STATUS, STOP_REQUEST = "status.json", "stop_request.json"
"""Files in a run's folder: its status, and an operator's request to stop."""


class RunState(StrEnum):
    """State of a run: waiting for sites, running or stopping; finally stopped, failed or done."""

    WAITING = "waiting for sites"
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"
    FAILED = "failed"
    DONE = "done"


LIVE = (RunState.WAITING, RunState.RUNNING, RunState.STOPPING)
"""States of a run with a live server process; the others are final."""


class SiteState(StrEnum):
    """State of a site in a run, from its connection and its reply to the open round's request."""

    NOT_CONNECTED = "not connected"
    APPROVAL = "waits for approval"
    CONNECTED = "connected"
    REQUESTED = "requested"
    RESPONDED = "responded"
    NOT_AGGREGATED = "not aggregated"
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
    """Status of one site in a run.

    `state`: a value of SiteState. `reason`, `since`: reason and UTC time of the state. `round`:
    last round with an update of the site. `error`, `error_at`: last error and its time; "" if none.
    `upload_bytes`, `download_bytes`: traffic of the site, since the server's start and in the
    rounds of the ledger segment that was open then.
    """

    state: str = SiteState.NOT_CONNECTED
    reason: str = ""
    since: str = ""
    round: int = 0
    error: str = ""
    error_at: str = ""
    upload_bytes: int = 0
    download_bytes: int = 0


@dataclass(frozen=True)
class RunStatus:
    """Status of a run, as the run's server last wrote it.

    `study`, `run`: name of the study and id of the run. `driver`: the server's process.
    `started_at`, `updated_at`: UTC times of the first start and of the last write. `state`,
    `reason`: a value of RunState and the reason. `stopped_early`: early stopping or a callback
    ended the run, not a person. `round`, `rounds`: last closed round and number of rounds.
    `requested`, `responded`: numbers of clients of the open round; 0 between rounds.
    `primary_metric`: name of the task's primary metric. `loss`: of the last round. `scores`:
    metrics over all clients of the last round with evaluation. `round_seconds`: median duration of
    the last rounds. `seconds_left`: estimate until the end. `epsilon_spent`, `epsilon`: privacy
    loss so far, and the guarantee; None without DP. `client_level_dp`: clients are protected, so
    sites are not shown to listeners. `sites`: status by site; empty if there are too many
    (`status.MAX_LISTED_SITES`). `run_scores`, `warnings`: scores of the last evaluated round, and
    warnings of the result, in which {folder} stands for the run's folder, of the study with the
    digest `study_digest`; written after the end of a run, else None.
    """

    study: str = ""
    run: str = ""
    driver: Process = field(default_factory=Process)
    started_at: str = ""
    updated_at: str = ""
    state: str = RunState.WAITING
    reason: str = ""
    stopped_early: bool = False
    round: int = 0
    rounds: int = 0
    requested: int = 0
    responded: int = 0
    primary_metric: str = ""
    loss: float | None = None
    scores: dict[str, float] = field(default_factory=dict[str, float])
    round_seconds: float | None = None
    seconds_left: float | None = None
    epsilon_spent: float | None = None
    epsilon: float | None = None
    client_level_dp: bool = False
    sites: dict[str, SiteStatus] = field(default_factory=dict[str, SiteStatus])
    run_scores: dict[str, Any] | None = None
    warnings: list[dict[str, str]] | None = None
    study_digest: str | None = None

    def json(self) -> dict[str, Any]:
        """Return the status as JSON values, without the last three if they are None."""
        optional = ("run_scores", "warnings", "study_digest")
        return {k: v for k, v in asdict(self).items() if v is not None or k not in optional}


def site_state_from_reason(reason: str) -> str:
    """Return the SiteState that follows from the text of a site's error (`describe_code`)."""
    if reason.startswith(f"refused: {APPROVAL}"):
        return SiteState.APPROVAL
    return SiteState.FAILED if reason.startswith(("failed", "no answer")) else SiteState.REFUSED


def read_status(folder: Path) -> RunStatus | None:
    """Return the status in a run's folder; None if there is no status file.

    Raises FedplanError if the file cannot be read, or if a field is missing, unknown or of a wrong
    type.
    """
    file = folder / STATUS
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
        sites = {name: SiteStatus(**site) for name, site in fields.pop("sites").items()}
        status = RunStatus(driver=Process(**fields.pop("driver")), sites=sites, **fields)
        texts = (status.study, status.run, status.state, status.reason, status.primary_metric)
        numbers = (
            status.loss,
            status.round_seconds,
            status.seconds_left,
            status.epsilon_spent,
            status.epsilon,
        )
        counts = (status.round, status.rounds, status.requested, status.responded)
        if not (
            all(type(each) is str for each in texts)
            and all(each is None or type(each) in (int, float) for each in numbers)
            and all(type(each) is int for each in counts)
            and type(status.stopped_early) is bool
            and (status.round_seconds is None or status.round_seconds >= 0)
            and type(status.run_scores) in (dict, type(None))
            and all(type(each) is dict for each in status.warnings or ())
        ):
            raise TypeError("a field has another type")
        return status
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise FedplanError(
            f"{file} cannot be read: {error!r}; it is damaged, or of another version of "
            "fedplan: a run that goes on writes it again"
        ) from error


def write_status(folder: Path, status: RunStatus) -> None:
    """Write the status file in a run's folder; raises StoreError if it cannot be written."""
    fields = replace(status, updated_at=utc_now()).json()
    write_atomic(folder / STATUS, json.dumps(fields, indent=1) + "\n")


def ask_to_stop(folder: Path, *, at_once: bool = False) -> None:
    """Ask a run's server to stop, after the open round or at once, by a file in the run's folder.

    Overwrites an earlier request, and does not wait for the server, which looks for the file while
    waiting and after each round. Raises StoreError if the file cannot be written.
    """
    request = {"stop": AT_ONCE if at_once else AFTER_ROUND, "time": utc_now()}
    write_atomic(folder / STOP_REQUEST, json.dumps(request) + "\n", mode=SHARED)


def read_stop_request(folder: Path) -> str:
    """Return AFTER_ROUND or AT_ONCE if an operator asked the run in `folder` to stop; else "".

    An unreadable or damaged file counts as AFTER_ROUND.
    """
    try:
        request = json.loads((folder / STOP_REQUEST).read_text(encoding="utf-8"))
        return AT_ONCE if request["stop"] == AT_ONCE else AFTER_ROUND
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, TypeError, KeyError):
        return AFTER_ROUND
