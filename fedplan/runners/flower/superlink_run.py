# SPDX-License-Identifier: Apache-2.0
"""Runs a study's server as the ServerApp task of a Flower run, in this process.

Flower would give the task to a process that unpacks and imports an app. Only holders of the
operator's secret can take tasks of this SuperLink, so no uploaded app is ever run.
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
from fedplan.federation.status import StatusReporter
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
    callbacks: list[Callback],
    status: StatusReporter | None = None,
) -> None:
    """Run a study's server on a SuperLink to its end, or continue the run in its folder.

    If Flower ends its run, as after a long silence of the SuperLink, another one is started;
    after ATTEMPTS of them FlowerRunEnded is raised. See `run_server` for the other arguments.
    """
    for left in reversed(range(ATTEMPTS)):
        try:
            with acquire_grid(link) as grid:
                return run_server(grid, study, folder, callbacks, status, link.site_names)
        except FlowerRunEnded as error:
            if not left:
                raise
            log.warning("Flower has ended its run, and another one is started: %r", error)
            time.sleep(5.0)
    raise AssertionError


@contextmanager
def acquire_grid(link: SuperLink) -> Generator[Grid]:
    """Start a Flower run, take its server task, and yield its grid.

    Sends heartbeats during the body, and reports the task as completed, or failed if it raises.
    Raises FedplanError if the SuperLink gives no task.
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
    heartbeats = HeartbeatSender(_tolerant_heartbeat(client))
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
        output = PushTaskOutputRequest(sub_status=status, details=details)
        _log_http_errors(lambda: client.PushTaskOutput(output))
        client.close()
        grid.close()


def _tolerant_heartbeat(client: RuntimeHttpClient) -> Callable[[], bool]:
    """Return a heartbeat function that returns False on an HTTP error status."""
    send = make_task_heartbeat_fn_http(client)

    def heartbeat() -> bool:
        try:
            return send()
        except httpx.HTTPStatusError:
            return False

    return heartbeat


def _acquire_task(link: SuperLink, run_id: int) -> str:
    """Return the token of a run's server task; tasks left by killed processes are ended.

    Raises FedplanError if the SuperLink does not give the task in time.
    """
    deadline = time.monotonic() + TASK_TIMEOUT
    client = link.runtime_api.acquire_client()
    try:
        while time.monotonic() < deadline:
            response = client.AcquireTask(
                AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            )
            if response.HasField("task") and response.task.run_id == run_id:
                return response.token
            if response.HasField("task"):
                log.warning(
                    "run %s was left by another process, and is ended", response.task.run_id
                )
                _end_task(link, response.token)
            time.sleep(0.2)
    except httpx.HTTPError as error:
        raise FedplanError(f"{link.address} gives no task: {error!r}") from error
    finally:
        client.close()
    raise FedplanError(f"the SuperLink at {link.address} does not give the task of its new run")


def _end_task(link: SuperLink, token: str) -> None:
    client = link.runtime_api.task_client(token)
    output = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details="nobody runs this app")
    _log_http_errors(lambda: client.PushTaskOutput(output))
    client.close()


def _log_http_errors(call: Callable[[], object]) -> None:
    try:
        call()
    except httpx.HTTPError as error:
        log.warning("the end of the task was not reported to the SuperLink: %r", error)
