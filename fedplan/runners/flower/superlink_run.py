# SPDX-License-Identifier: Apache-2.0
"""Runs a study's server as the ServerApp task of a Flower run, in this process.

Flower would give the task to a process that unpacks and imports an app. Only holders of the
operator's secret can take tasks of this SuperLink, so no uploaded app is ever run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import httpx
from flwr.common.constant import SubStatus
from flwr.common.serde import run_from_proto
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PullTaskInputRequest, PushTaskOutputRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from fedplan.errors import FedplanError
from fedplan.federation.ledger.stream import EventStream
from fedplan.runners.flower.rpc import FlowerRunEnded
from fedplan.runners.flower.server import run_server
from fedplan.runners.flower.superlink import SuperLink
from fedplan.storage.locks import locked_folder
from fedplan.studies.schema import Study

log = logging.getLogger("fedplan")
TASK_TIMEOUT = 120.0
"""Seconds to wait for the task of a new Flower run."""
ATTEMPTS = 10
"""How many Flower runs are started for one study, if Flower ends them."""
RETRY_SECONDS = 5.0
"""Seconds for which Flower's client repeats a failed call."""


def run_on_superlink(
    link: SuperLink,
    study: Study,
    folder: Path,
    events: EventStream | None = None,
) -> None:
    """Run all rounds of a study's server on the SuperLink `link`, or continue the run in `folder`.

    Blocks until the study ends. `events` receives progress
    (default: an EventStream of the folder). If Flower ends its run, as after a long silence of
    the SuperLink, another Flower run is started and the study continued; FlowerRunEnded is raised
    after ATTEMPTS Flower runs. Raises FedplanError if the SuperLink gives no task, and the errors
    of `run_server`.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            with acquire_grid(link) as grid:
                return run_server(
                    grid, study, folder, events=events, registered_names=link.site_names
                )
        except FlowerRunEnded as error:
            if not left:
                raise
            log.warning("Flower has ended its run, and another one is started: %r", error)
            time.sleep(5.0)
    raise AssertionError


@contextmanager
def acquire_grid(link: SuperLink) -> Generator[Grid]:
    """Start a Flower run on the SuperLink `link`, take the run's server task, and yield the grid.

    Sends heartbeats during the body; at the end reports the task as completed, or as failed if the
    body raises. Raises FedplanError if the SuperLink gives no task in TASK_TIMEOUT seconds.
    """
    # Two processes must not take each other's task.
    with locked_folder(link.folder, timeout=TASK_TIMEOUT):
        token = _acquire_task(link, link.start_run())
    api = link.runtime_api
    grid = HttpGrid(
        runtime_api_address=api.address,
        insecure=api.certificate is None,
        root_certificates=api.certificate.read_bytes() if api.certificate else None,
        token=token,
    )
    # By default Flower repeats calls for ever, and a request to stop would go unnoticed.
    grid._retry_invoker.max_time = RETRY_SECONDS  # pyright: ignore[reportPrivateUsage]
    client = api.task_client(token)
    send_heartbeat = make_task_heartbeat_fn_http(client)

    def try_heartbeat() -> bool:
        try:
            return send_heartbeat()
        except httpx.HTTPStatusError:
            return False

    heartbeats = HeartbeatSender(try_heartbeat)
    heartbeats.start()
    status, details = SubStatus.FAILED, "the server ended"
    try:
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        yield grid
        status, details = SubStatus.COMPLETED, ""
    finally:
        if heartbeats.is_running:
            heartbeats.stop()
        _end_task(client, details, status)
        grid.close()


def _acquire_task(link: SuperLink, run_id: int) -> str:
    """Wait for the server task of the Flower run `run_id`, and return the task's token.

    Tasks of other runs, left by killed processes, are taken and ended as failed. Raises
    FedplanError after TASK_TIMEOUT seconds, or if the SuperLink `link` cannot be reached.
    """
    deadline = time.monotonic() + TASK_TIMEOUT
    client = link.runtime_api.acquire_client()
    try:
        while time.monotonic() < deadline:
            request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            response = client.AcquireTask(request)
            if response.HasField("task") and response.task.run_id == run_id:
                return response.token
            if response.HasField("task"):
                other = response.task.run_id
                log.warning("run %s was left by another process, and is ended", other)
                _end_task(link.runtime_api.task_client(response.token), "nobody runs this app")
            time.sleep(0.2)
    except httpx.HTTPError as error:
        raise FedplanError(f"{link.address} gives no task: {error!r}") from error
    finally:
        client.close()
    raise FedplanError(f"the SuperLink at {link.address} does not give the task of its new run")


def _end_task(client: RuntimeHttpClient, details: str, status: str = SubStatus.FAILED) -> None:
    """Report the end of a client's task with status and details, and close the client.

    An HTTP error is logged, not raised.
    """
    try:
        client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
    except httpx.HTTPError as error:
        log.warning("the end of the task was not reported to the SuperLink: %r", error)
    client.close()
