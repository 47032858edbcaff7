# SPDX-License-Identifier: Apache-2.0
"""Flower at a site: its SuperNode, kept running, and the replies to the tasks that the node gets.

The node's Runtime API is open to all users of a machine. So its certificate and secret are made for
each start, in a folder that only this user can enter. A task has a message and an app of whoever
started the run. The message gets its reply from the fedplan that the site installed; the app is not
unpacked or imported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from flwr.app import Context

from fedplan.errors import FedplanError
from fedplan.runners.flower import _internals as internals
from fedplan.runners.flower.keys import make_keys
from fedplan.runners.flower.records import Answer, make_reply
from fedplan.runners.site import ServerSection, Site, read_node_key
from fedplan.tensors.message import Message

log = logging.getLogger("fedplan")
FLOWER_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}
"""Turns off Flower's telemetry, update check, and installation of apps' dependencies."""
HERE = "127.0.0.1"
RESTART_DELAY = 5.0
"""Seconds before an ended node is restarted; the server may refuse it for up to a minute."""
FATAL_OUTPUT = ("handshake error detected", "Failed to receive message", "Failed to send message")
"""Output of a SuperNode that then receives nothing more, or has lost a message; it does not end."""
POLL_INTERVAL = 0.2
"""Seconds between two polls of the node, which is on this machine."""
STALL_INTERVAL = 10.0
"""Seconds between two polls for another task while a message is incomplete."""
ACQUIRE = "/flwr.proto.Runtime/AcquireTask"
"""The method of the Runtime API that needs the secret."""

Pull = Callable[[internals.PullObjectRequest], internals.PullObjectResponse]
REGISTERED_BY_CODE = {
    internals.ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED: False,
    internals.ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL: True,
}
"""Whether the key is registered, by the error code of an activation without heartbeats.

The server looks up the key first, and then rejects the heartbeat interval.
"""
PROXY_ERRORS = (502, 503, 504)
"""HTTP status of a proxy without a response of the server behind it."""


@dataclass(frozen=True)
class RuntimeApi:
    """How to reach a Flower Runtime API, which gives out tasks; makes clients, to be closed.

    `certificate`: of the CA (None: unencrypted). `secret`: the file that taking tasks needs.
    """

    address: str
    certificate: Path | None = None
    secret: Path | None = None

    def client(
        self, *interceptors: internals.ProtobufClientInterceptor
    ) -> internals.RuntimeHttpClient:
        """Return a client of the API with these interceptors."""
        return internals.RuntimeHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.certificate is None,
            root_certificates=self.certificate.read_bytes() if self.certificate else None,
            interceptors=[
                internals.RuntimeVersionHttpInterceptor(component_name="SuperExec"),
                *interceptors,
            ],
        )

    def acquire_client(self) -> internals.RuntimeHttpClient:
        """Return a client that may take tasks, authenticated by the secret if there is one."""
        if self.secret is None:
            return self.client()
        secret = self.secret.read_bytes()
        auth = internals.SuperExecAuthHttpInterceptor(
            master_secret=secret, protected_methods={ACQUIRE}
        )
        return self.client(auth)

    def task_client(self, token: str) -> internals.RuntimeHttpClient:
        """Return a client for one task, authenticated by its token."""
        return self.client(internals.RuntimeTokenHttpInterceptor(token))


@contextmanager
def send_heartbeats(client: internals.RuntimeHttpClient) -> Generator[None]:
    """Keep a task alive during the body; Flower's own heartbeats would end the process."""

    def send() -> bool:
        try:
            client.SendTaskHeartbeat(internals.SendTaskHeartbeatRequest())
        except httpx.HTTPError:
            return False
        return True

    heartbeats = internals.HeartbeatSender(send)
    heartbeats.start()
    try:
        yield
    finally:
        if heartbeats.is_running:
            heartbeats.stop()


@contextmanager
def run_supernode(site: Site, stop: threading.Event) -> Generator[RuntimeApi]:
    """Keep the site's Flower SuperNode running during the body, and yield its Runtime API.

    The body should end when `stop` is set; after the body `stop` is set, and the node is
    terminated. A node that cannot be started raises only in the thread that keeps it.
    """
    with tempfile.TemporaryDirectory(prefix="fedplan-node-") as temporary:
        folder = Path(temporary)
        with socket.socket() as probe:
            probe.bind((HERE, 0))
            port: int = probe.getsockname()[1]
        make_keys(folder, [HERE], [])
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        api = RuntimeApi(f"{HERE}:{port}", folder / "ca.crt", secret)
        arguments = (site, folder, port, stop)
        keeper = threading.Thread(target=_keep_running, args=arguments, name="node")
        keeper.start()
        try:
            yield api
        finally:
            stop.set()
            keeper.join()


def _keep_running(site: Site, folder: Path, port: int, stop: threading.Event) -> None:
    """Run the site's node, and restart it RESTART_DELAY after it ends, until `stop` is set."""
    while not stop.is_set():
        node = _start_node(site, folder, port)
        watcher = threading.Thread(target=_watch_output, args=(node,), name="node-log", daemon=True)
        watcher.start()
        while node.poll() is None and not stop.wait(0.2):
            pass
        if node.poll() is None:
            node.terminate()
            with suppress(subprocess.TimeoutExpired):
                node.wait(10.0)
            node.kill()
        node.wait()
        watcher.join(5.0)
        if not stop.is_set():
            log.warning("the node ended with %s; it is restarted", node.returncode)
            stop.wait(RESTART_DELAY)


def _start_node(site: Site, folder: Path, port: int) -> subprocess.Popen[str]:
    """Start flower-supernode for a site, in a process that ends with this one (on Linux)."""
    if (server := site.server) is None:
        raise FedplanError(
            f"the site {site.name!r} has no server: set address under [server] in its site.toml"
        )
    command = [str(Path(sys.executable).parent / "flower-supernode"), "--superlink", server.address]
    command += ["--root-certificates", server.ca] if server.ca else ["--insecure"]
    command += ["--auth-supernode-private-key", server.node_key] if server.node_key else []
    command += ["--host", HERE, "--port", str(port), "--isolation", "process"]
    command += ["--ssl-certfile", f"{folder}/server.crt", "--ssl-keyfile", f"{folder}/server.key"]
    command += ["--ssl-ca-certfile", f"{folder}/ca.crt"]
    command += ["--superexec-auth-secret-file", f"{folder}/secret"]
    try:
        return subprocess.Popen(  # noqa: S603
            command,
            env={**os.environ, **FLOWER_ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise FedplanError(f"flower-supernode cannot be started: {error}") from error


def _watch_output(node: subprocess.Popen[str]) -> None:
    """Copy a node's output to stderr; kill it 2 s after a fatal line: it is restarted."""
    assert node.stdout is not None
    with node.stdout as output:
        for line in output:
            sys.stderr.write(line)
            if any(text in line for text in FATAL_OUTPUT):
                log.warning("the connection to the server broke; the node is restarted")
                threading.Timer(2.0, node.kill).start()  # it prints the reason first


def _end_with_parent() -> None:
    """Have the kernel end this process with its parent (Linux only)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def serve_tasks(api: RuntimeApi, answer: Answer, stop: threading.Event) -> None:
    """Take tasks from `api` and reply to their messages by `answer`, until `stop` is set.

    Runs one task at a time. Connection errors are logged, and the API is polled again. For a task
    that cannot be read, `answer` is called with an empty message, to log it.
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


def _acquire_task(client: internals.RuntimeHttpClient) -> str:
    """Return the token of a new task, or an empty text if there is none."""
    request = internals.AcquireTaskRequest(supported_task_types=[internals.TaskType.CLIENT_APP])
    response = client.AcquireTask(request)
    return response.token if response.HasField("task") else ""


def _run_task(api: RuntimeApi, token: str, answer: Answer, guard: StalledPullGuard) -> None:
    """Pull a task's message, and push the reply of `answer`.

    Raises httpx.HTTPError; after any other error `answer` gets an empty message, which logs it.
    `guard` gives up an incomplete message.
    """
    try:
        with closing(api.task_client(token)) as client:
            # The instance's attribute overrides the method of its class.
            vars(client)["PullObject"] = guard.wrap(client.PullObject)
            context: Context | None = None
            with send_heartbeats(client):
                try:
                    envelope, context, _, _ = internals.pull_task_input(client)
                    internals.push_message(client, make_reply(envelope, answer), context)
                finally:
                    internals.push_task_output(client, context, internals.SubStatus.COMPLETED, "")
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
    is over. `acquire` takes a task and returns its token, or ""; the token is then in `next_token`,
    for the caller.
    """

    acquire: Callable[[], str]
    stop: threading.Event
    next_token: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)
    last: float = field(default_factory=time.monotonic)

    def wrap(self, pull: Pull) -> Pull:
        """Return a pull function by which an object is not found at a stop, or with another task.

        While an object is not available, `acquire` is called once per STALL_INTERVAL, until it has
        taken a task: the caller must then run the task in `next_token`.
        """

        def guarded_pull(request: internals.PullObjectRequest) -> internals.PullObjectResponse:
            """Pull an object; not found if unavailable, and `stop` is set or a task is next."""
            response = pull(request)
            if response.object_available:
                return response
            with self.lock:
                if not self.next_token and time.monotonic() - self.last > STALL_INTERVAL:
                    self.last, self.next_token = time.monotonic(), self.acquire()
            is_over = bool(self.next_token) or self.stop.is_set()
            return internals.PullObjectResponse(object_found=False) if is_over else response

        return guarded_pull


def is_key_registered(server: ServerSection) -> bool:
    """Ask the server of a site whether the site's node key is registered there.

    Sends an activation with a heartbeat interval of 0, which the server rejects with one of two
    codes, so nothing changes there. FedplanError for any other answer.
    """
    key = read_node_key(Path(server.node_key))
    public = key.public_key()
    client = internals.FleetHttpClient.from_server_address(
        server.address,
        insecure=False,
        root_certificates=Path(server.ca).read_bytes(),
        interceptors=[
            internals.RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            internals.NodeAuthHttpInterceptor(key, public),
        ],
    )
    request = internals.ActivateNodeRequest(
        public_key=internals.public_key_to_bytes(public), heartbeat_interval=0.0
    )
    with client:
        try:
            client.ActivateNode(request)
        except httpx.HTTPStatusError as error:
            response = error.response
        except httpx.HTTPError as error:
            raise FedplanError(f"{server.address} does not answer: {error!r}") from error
        else:
            raise FedplanError(
                f"{server.address} accepts a node without heartbeats: it has another Flower version"
            )
    for code, is_registered in REGISTERED_BY_CODE.items():
        if str(int(code)) in response.text:
            return is_registered
    if response.status_code in PROXY_ERRORS:
        raise FedplanError(
            f"the server's proxy answers ({response.status_code}), but not the SuperLink behind "
            "it: tell its operator, and try again"
        )
    raise FedplanError(f"the server answers {response.status_code}: {response.text[:200]}")
