# SPDX-License-Identifier: Apache-2.0
"""A site's executor of Flower tasks (SuperExec): replies to requests, and runs no code from them.

A SuperNode in process isolation waits for a process that takes its tasks. A task has a message and
an app of whoever started the run. The message gets its reply from the fedplan that the site
installed; the app is not unpacked or imported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from flwr.app import Context, Error
from flwr.app import Message as FlowerMessage
from flwr.common.constant import SubStatus
from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from fedplan.federation.ledger.faults import encode_code, error_code_of
from fedplan.runners.flower.records import from_records, to_records
from fedplan.tensors.message import BrokenMessage, Message

log = logging.getLogger("fedplan")
APP_FAILED = 2
"""Flower's error code of a failed app; the server repeats the request a few times."""
POLL_INTERVAL = 0.2
"""Seconds between two polls of the node, which is on this machine."""
STALL_INTERVAL = 10.0
"""Seconds between two polls for another task while a message is incomplete."""
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
"""The method of the Runtime API that needs the secret."""

Pull = Callable[[PullObjectRequest], PullObjectResponse]
Answer = Callable[[str, Message], Message]
"""Returns the reply to a request, given its kind and message."""


@dataclass(frozen=True)
class RuntimeApi:
    """How to reach a Flower Runtime API, which gives out tasks; makes clients of the API.

    `address` is host:port, `certificate` the CA certificate file (None: unencrypted), `secret` the
    file with the secret that taking tasks needs, read by `acquire_client`. Clients must be closed.
    """

    address: str
    certificate: Path | None = None
    secret: Path | None = None

    def client(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        """Return a client of the API with these interceptors."""
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.certificate is None,
            root_certificates=self.certificate.read_bytes() if self.certificate else None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *interceptors],
        )

    def acquire_client(self) -> RuntimeHttpClient:
        """Return a client that may take tasks, authenticated by the secret if there is one."""
        if self.secret is None:
            return self.client()
        secret = self.secret.read_bytes()
        auth = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
        return self.client(auth)

    def task_client(self, token: str) -> RuntimeHttpClient:
        """Return a client for one task, authenticated by its token."""
        return self.client(RuntimeTokenHttpInterceptor(token))


def serve_tasks(api: RuntimeApi, answer: Answer, stop: threading.Event) -> None:
    """Take tasks from `api` and reply to their messages by `answer`, until `stop` is set.

    Runs one task at a time in this thread. Connection errors are logged, and the API is polled
    again. For a task that cannot be read, `answer` is called with an empty message, to log it.
    """
    with closing(api.acquire_client()) as client:
        token = ""
        while not stop.wait(0.0 if token else POLL_INTERVAL):
            try:
                if token := token or _acquire_task(client):
                    guard = StalledPullGuard(lambda: _acquire_task(client), stop)
                    _run_task(api, token, answer, guard)
                    token = guard.next_token
            except httpx.HTTPError as error:
                token = ""
                # The node is restarting, or not up yet; its keeper takes care of it.
                log.warning("the node does not answer: %r", error)
                stop.wait(2.0)


def _acquire_task(client: RuntimeHttpClient) -> str:
    """Return the token of a new task, or an empty text if there is none."""
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    response = client.AcquireTask(request)
    return response.token if response.HasField("task") else ""


def _run_task(api: RuntimeApi, token: str, answer: Answer, guard: StalledPullGuard) -> None:
    """Pull the message of the task with this token, and push the reply made by `answer`.

    Sends heartbeats to `api` meanwhile; `guard` gives up an incomplete message. HTTP errors are
    raised; after any other error `answer` is called with an empty message, to log the error.
    """
    try:
        with closing(api.task_client(token)) as client:
            # The instance's attribute overrides the method of its class.
            vars(client)["PullObject"] = guard.wrap(client.PullObject)
            heartbeats = HeartbeatSender(make_task_heartbeat_fn_http(client))
            heartbeats.start()
            context: Context | None = None
            try:
                envelope, context, _, _ = pull_task_input(client)
                push_message(client, make_reply(envelope, answer), context)
            finally:
                push_task_output(client, context, SubStatus.COMPLETED, "")
                heartbeats.stop()
    except httpx.HTTPError:
        raise
    except Exception as error:
        log.warning("a task failed: %s", type(error).__name__)
        answer("request", Message(b""))


@dataclass
class StalledPullGuard:
    """Gives up the pull of an incomplete message when the node has another task, or at a stop.

    If a run ends while the node receives a message, the rest never comes, and Flower pulls for up
    to two hours; but a node receives one message at a time, so another task means that the former
    is over. Use `wrap` on the client's pull function. `acquire` takes a task and returns its token,
    or ""; the token is then in `next_token`, for the caller. `stop` also gives up. `lock` and
    `last`, the monotonic time of the last `acquire`, are internal.
    """

    acquire: Callable[[], str]
    stop: threading.Event
    next_token: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    last: float = field(default_factory=time.monotonic)

    def wrap(self, pull: Pull) -> Pull:
        """Return a pull function that ends the wait for an object at a stop or another task.

        The object is then reported as not found. While an object is not available, `acquire` is
        called once per STALL_INTERVAL, until it has taken a task: the caller must then run the task
        in `next_token`.
        """

        def guarded_pull(request: PullObjectRequest) -> PullObjectResponse:
            """Pull an object; not found if unavailable, and `stop` is set or a task is next."""
            response = pull(request)
            if response.object_available:
                return response
            with self.lock:
                if not self.next_token and time.monotonic() - self.last > STALL_INTERVAL:
                    self.last, self.next_token = time.monotonic(), self.acquire()
            is_over = bool(self.next_token) or self.stop.is_set()
            return PullObjectResponse(object_found=False) if is_over else response

        return guarded_pull


def make_reply(envelope: FlowerMessage, answer: Answer) -> FlowerMessage:
    """Return the Flower reply to `envelope`, made by `answer`; never raises an Exception.

    `answer` gets the kind, as "train" or "hello", and the message; a message that is not of fedplan
    becomes an empty one. Of an exception only the code is sent.
    """
    kind = envelope.metadata.message_type.removeprefix("query.")
    try:
        try:
            message = from_records(envelope.content)
        except BrokenMessage:
            message = Message(b"")  # sites refuse it
        return FlowerMessage(to_records(answer(kind, message)), reply_to=envelope)
    except Exception as error:
        return error_reply(envelope, error)


def error_reply(envelope: FlowerMessage, error: Exception) -> FlowerMessage:
    """Log the code of an exception, and return the code as a Flower error reply to `envelope`.

    The exception's text, which may reveal examples, is neither logged nor sent.
    """
    code = encode_code(error_code_of(error))
    log.error("a request failed: %s", code)
    return FlowerMessage(Error(APP_FAILED, code), reply_to=envelope)
