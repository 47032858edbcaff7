# SPDX-License-Identifier: Apache-2.0
"""The driver: a run of Flower's whose server's task this very process takes.

Flower would hand the task to a process that unpacks and imports an app. Nobody else takes tasks of
this SuperLink: who hands in a run without the operator's secret has nobody to run it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
)
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedplan.errors import FedplanError
from fedplan.federation.callbacks import Callback
from fedplan.federation.status import Status
from fedplan.runners.flower.calls import Ended
from fedplan.runners.flower.carriage import carry_study
from fedplan.runners.flower.link import Link
from fedplan.storage.locks import alone
from fedplan.studies.schema import Study

log = logging.getLogger("fedplan")
WITHIN = 120.0
"""Seconds in which a SuperLink hands out the task of a run that was begun."""
TRIES = 10
TRIED = 5.0
"""Seconds in which Flower tries a call again by itself."""


def drive(
    link: Link,
    study: Study,
    folder: Path,
    callbacks: list[Callback],
    status: Status | None = None,
) -> None:
    """Carry a study to its end, or go on with it from what its folder holds.

    A run that Flower ends by itself, as after a long silence of its SuperLink, is begun anew.
    """
    for left in reversed(range(TRIES)):
        try:
            with taken(link) as grid:
                return carry_study(grid, study, folder, callbacks, status, link.names)
        except Ended as error:
            if not left:
                raise
            log.warning("Flower has ended its run, and another one is begun: %r", error)
            time.sleep(5.0)
    raise AssertionError


@contextmanager
def taken(link: Link) -> Generator[Grid]:
    """The grid of a new run, while its task is ours."""
    # Of two drivers, neither may take the other's task.
    with alone(link.folder, wait=WITHIN):
        token = _token(link, link.start())
    door = link.door
    grid = HttpGrid(
        runtime_api_address=door.address,
        insecure=door.certificate is None,
        root_certificates=door.certificate.read_bytes() if door.certificate else None,
        token=token,
    )
    # Flower would try for ever, and nobody would hear that the run is to stop.
    grid._retry_invoker.max_time = TRIED  # pyright: ignore[reportPrivateUsage]
    client = door.working(token)
    beats = HeartbeatSender(_beating(client))
    beats.start()
    status, details = SubStatus.FAILED, "the server ended"
    try:
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        yield grid
        status, details = SubStatus.COMPLETED, ""
    finally:
        if beats.is_running:
            beats.stop()
        said = PushTaskOutputRequest(sub_status=status, details=details)
        _told(lambda: client.PushTaskOutput(said))
        client.close()
        grid.close()


def _beating(client: RuntimeHttpClient) -> Callable[[], bool]:
    """A heartbeat that is tried again, whatever a link in trouble or its proxy answers."""
    beat = make_task_heartbeat_fn_http(client)

    def steadily() -> bool:
        try:
            return beat()
        except httpx.HTTPStatusError:
            return False

    return steadily


def _token(link: Link, number: int) -> str:
    """What lets us do the task of a run; one that a killed driver left behind is ended."""
    until = time.monotonic() + WITHIN
    asking = link.door.asking()
    try:
        while time.monotonic() < until:
            found = asking.AcquireTask(
                AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            )
            if found.HasField("task") and found.task.run_id == number:
                return found.token
            if found.HasField("task"):
                log.warning("run %s was left behind, and is ended", found.task.run_id)
                _refused(link, found.token)
            time.sleep(0.2)
    except httpx.HTTPError as error:
        raise FedplanError(f"{link.address} hands out no task: {error!r}") from error
    finally:
        asking.close()
    raise FedplanError(f"the SuperLink at {link.address} does not hand out the run that was begun")


def _refused(link: Link, token: str) -> None:
    client = link.door.working(token)
    said = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details="nobody runs this app")
    _told(lambda: client.PushTaskOutput(said))
    client.close()


def _told(call: Callable[[], object]) -> None:
    try:
        call()
    except httpx.HTTPError as error:
        log.warning("the SuperLink was not told the end: %r", error)
