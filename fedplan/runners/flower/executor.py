# SPDX-License-Identifier: Apache-2.0
"""The executor of a site: takes requests from its node, and never the code that comes with them.

A SuperNode in process isolation waits for somebody to ask it for work. This process does. A task
carries a message and an app of whoever handed the run in: the message is answered by the fedplan
that the site installed, and the app is not unpacked, imported or looked at.
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

from fedplan.federation.codes import code_of, told
from fedplan.runners.flower.records import message_in, records_of
from fedplan.tensors.message import BrokenMessage, Message

log = logging.getLogger("fedplan")
RAISED = 2
"""The code of Flower's own for an app that failed: the request is asked again a few times."""
LOOK = 0.2
"""Seconds between two questions to the node for work: it stands on this machine."""
ASIDE = 10.0
"""Seconds between two looks for another task, while the rest of a message is waited for."""
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"

Pull = Callable[[PullObjectRequest], PullObjectResponse]
Answer = Callable[[str, Message], Message]
"""A site's answer to a request of a kind."""


@dataclass(frozen=True)
class Door:
    """Where tasks are had: an address of this machine, its certificate, and who may ask there."""

    address: str
    certificate: Path | None = None
    secret: Path | None = None

    def client(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        """A line to it."""
        return RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.certificate is None,
            root_certificates=self.certificate.read_bytes() if self.certificate else None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="SuperExec"), *interceptors],
        )

    def asking(self) -> RuntimeHttpClient:
        """A line to ask for work, as one who may."""
        if self.secret is None:
            return self.client()
        secret = self.secret.read_bytes()
        who = SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods={ACQUIRE})
        return self.client(who)

    def working(self, token: str) -> RuntimeHttpClient:
        """A line to do a task by."""
        return self.client(RuntimeTokenHttpInterceptor(token))


def serve(door: Door, answer: Answer, over: threading.Event) -> None:
    """Answer one request after the other, until it is over."""
    with closing(door.asking()) as asking:
        token = ""
        while not over.wait(0.0 if token else LOOK):
            try:
                if token := token or _asked(asking):
                    meanwhile = Meanwhile(lambda: _asked(asking), over)
                    _tried(door, token, answer, meanwhile)
                    token = meanwhile.token
            except httpx.HTTPError as error:
                token = ""
                # The node starts again, or is not there yet: whoever keeps it sees to that.
                log.warning("the node does not answer: %r", error)
                over.wait(2.0)


def _asked(asking: RuntimeHttpClient) -> str:
    """The token of a task, if there is one to do."""
    found = asking.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
    return found.token if found.HasField("task") else ""


def _tried(door: Door, token: str, answer: Answer, meanwhile: Meanwhile) -> None:
    """Do a task; one that cannot even be read is refused by the site as no message, and left."""
    try:
        _done(door, token, answer, meanwhile)
    except httpx.HTTPError:
        raise
    except Exception as error:
        log.warning("a task cannot be done: %s", type(error).__name__)
        answer("request", Message(b""))


def _done(door: Door, token: str, answer: Answer, meanwhile: Meanwhile) -> None:
    """One task: its message in, the answer out, while the node hears that somebody is at it."""
    with closing(door.working(token)) as client:
        # An instance's own attribute goes before its class's method.
        vars(client)["PullObject"] = meanwhile.pulled(client.PullObject)
        beats = HeartbeatSender(make_task_heartbeat_fn_http(client))
        beats.start()
        context: Context | None = None
        try:
            envelope, context, _, _ = pull_task_input(client)
            reply = answered(envelope, answer)
            push_message(client, reply, context)
        finally:
            push_task_output(client, context, SubStatus.COMPLETED, "")
            beats.stop()


@dataclass
class Meanwhile:
    """What is done while the rest of a message is waited for.

    If a run ends while the node receives a message, the rest never comes, and Flower asks for it
    for up to two hours, in which the site would be deaf. A node receives one message at a time: so
    once it has another task, the former is given up.
    """

    ask: Callable[[], str]
    over: threading.Event
    token: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    last: float = field(default_factory=time.monotonic)

    def pulled(self, pull: Pull) -> Pull:
        """A pull of objects that says that there are none, once they cannot come any more."""

        def found(request: PullObjectRequest) -> PullObjectResponse:
            answer = pull(request)
            if not answer.object_available and self._is_vain():
                return PullObjectResponse(object_found=False)
            return answer

        return found

    def _is_vain(self) -> bool:
        with self.lock:
            if not self.token and time.monotonic() - self.last > ASIDE:
                self.last, self.token = time.monotonic(), self.ask()
        return bool(self.token) or self.over.is_set()


def answered(envelope: FlowerMessage, answer: Answer) -> FlowerMessage:
    """The answer to one of Flower's messages, as another."""
    kind = envelope.metadata.message_type.removeprefix("query.")
    try:
        return FlowerMessage(records_of(answer(kind, _message(envelope))), reply_to=envelope)
    except Exception as error:
        return failed(envelope, error)


def _message(envelope: FlowerMessage) -> Message:
    """The message of ours that one of Flower's carries; an empty one, for the site to refuse."""
    try:
        return message_in(envelope.content)
    except BrokenMessage:
        return Message(b"")


def failed(envelope: FlowerMessage, error: Exception) -> FlowerMessage:
    """What leaves of an error: its code. Flower would send its text, which may tell of rows."""
    log.error("a request failed: %s", told(code_of(error)))
    return FlowerMessage(Error(RAISED, told(code_of(error))), reply_to=envelope)
