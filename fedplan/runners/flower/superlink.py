# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperLink: run it, control it, and run a study's server on it.

By default Flower's control API, which starts runs and registers nodes, needs no credential. Here it
needs a token from a file of the operator, and so does the API that gives out server tasks: a
study's server takes its task in this process, and no uploaded app is ever run.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.serverapp import Grid

from fedplan.errors import FedplanError
from fedplan.federation.ledger.stream import EventStream
from fedplan.runners.flower import _internals as internals
from fedplan.runners.flower.apps import run_server
from fedplan.runners.flower.key_check import NodeKeyCheck
from fedplan.runners.flower.rpc import LinkUnreachable
from fedplan.runners.flower.supernode import (
    FLOWER_ENVIRONMENT,
    PROXY_ERRORS,
    RuntimeApi,
    send_heartbeats,
)
from fedplan.storage.files import wrap_disk_errors, write_atomic
from fedplan.storage.locks import locked_folder
from fedplan.studies.schema import Study
from fedplan.studies.section import ConfigError, Section, parse_section

log = logging.getLogger("fedplan")
SERVER, TOKEN, SECRET = "server.toml", "operator.token", "executor.secret"
"""Files in a server's folder: settings, token for the control API, secret for tasks."""
APP = Path(__file__).parent / "templates" / "app"
"""An empty app: Flower starts no run without one."""
TASK_TIMEOUT = 120.0
"""Seconds to wait for the task of a new Flower run."""
RETRY_SECONDS = 5.0
"""Seconds for which Flower's client repeats a failed call."""


class ServerFile(Section):
    """The fields of server.toml, by which the operator's commands find the SuperLink.

    Files are relative to its folder; give `ca`, `certificate` and `key`, or none of them.
    """

    address: str
    """Address of the SuperLink, as host:port."""
    database: str = "state.db"
    """File of the SuperLink's state."""
    ca: str = ""
    """File with the certificate of the CA, for TLS."""
    certificate: str = ""
    """File with the certificate of the server."""
    key: str = ""
    """File with the private key of the server."""


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink, seen by its operator: starts runs, and registers and revokes sites.

    `tls`: files of CA certificate, certificate and key, None for an unencrypted connection. Methods
    raise FedplanError if the SuperLink cannot be reached or rejects the call.
    """

    folder: Path
    address: str
    database: Path
    tls: tuple[Path, Path, Path] | None

    @cached_property
    def runtime_api(self) -> RuntimeApi:
        """The API that gives out server tasks."""
        return RuntimeApi(self.address, self.tls[0] if self.tls else None, self.folder / SECRET)

    @contextmanager
    def control(self) -> Generator[internals.ControlHttpClient]:
        """Yield a client of the control API with the operator's token, closed after the body."""
        client = internals.ControlHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.tls is None,
            root_certificates=self.tls[0].read_bytes() if self.tls else None,
            interceptors=[_BearerToken(_read_secret(self.folder / TOKEN))],
        )
        try:
            with self.wrap_http_errors("wrong operator token"):
                yield client
        finally:
            client.close()

    @contextmanager
    def wrap_http_errors(self, unauthorized: str = "") -> Generator[None]:
        """Raise HTTP errors of the body as FedplanError; as LinkUnreachable if they may pass."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            reason = (unauthorized if code == 401 else "") or error.response.text[:200]
            text = f"the SuperLink at {self.address} answers {code}: {reason}"
            raise (LinkUnreachable if code >= 500 else FedplanError)(text) from error
        except httpx.HTTPError as error:
            text = f"no SuperLink answers at {self.address}: {error!r}; start it first"
            raise LinkUnreachable(text) from error

    def start_run(self) -> int:
        """Start a Flower run with the empty app, and return its id."""
        app = internals.build_fab_from_disk(APP)
        fab = internals.Fab(hashlib.sha256(app).hexdigest(), app, {})
        with self.control() as client:
            return client.StartRun(
                internals.StartRunRequest(fab=internals.fab_to_proto(fab))
            ).run_id

    def register(self, name: str, public: bytes) -> None:
        """Register a site's public node key (PEM); FedplanError if the name is registered."""
        if any(node.name == name for node in self.nodes()):
            raise FedplanError(f"{name!r} is registered already: revoke it first")
        with self.control() as client:
            client.RegisterNode(internals.RegisterNodeRequest(public_key=public, name=name))

    def revoke(self, name: str) -> int:
        """Unregister the nodes of the site `name`; return how many, FedplanError for none."""
        nodes = [node for node in self.nodes() if node.name == name]
        with self.control() as client:
            for node in nodes:
                client.UnregisterNode(internals.UnregisterNodeRequest(node_id=node.node_id))
        if not nodes:
            names = ", ".join(sorted(node.name for node in self.nodes() if node.name))
            raise FedplanError(f"no site {name!r} is registered: there are {names or 'none'}")
        return len(nodes)

    def nodes(self) -> list[internals.NodeInfo]:
        """Return the registered nodes."""
        with self.control() as client:
            nodes = client.ListNodes(internals.ListNodesRequest()).nodes_info
        return [node for node in nodes if node.status != "unregistered"]

    def registered_names(self) -> set[str]:
        """Return the names of the registered nodes."""
        return {node.name for node in self.nodes()}


def read_superlink(folder: Path) -> SuperLink:
    """Return the SuperLink that server.toml describes; FedplanError if missing or invalid."""
    file = folder / SERVER
    try:
        settings = parse_section(ServerFile, file.read_text(encoding="utf-8"))
    except (OSError, ValueError, ConfigError) as error:
        raise FedplanError(f"{file} does not say where the SuperLink is: {error}") from error
    names = filter(None, (settings.ca, settings.certificate, settings.key))
    files = [(folder / name).resolve() for name in names]
    if len(files) not in (0, 3):
        raise FedplanError(f"{file}: give ca, certificate and key, or none of them")
    tls = (files[0], files[1], files[2]) if files else None
    return SuperLink(folder, settings.address, folder / settings.database, tls)


def _read_secret(file: Path) -> str:
    """Return the secret of 64 hex digits in a file, made if missing; others must not read it."""
    if not file.exists():
        with (
            wrap_disk_errors(f"{file} cannot be written", "free space, then start again"),
            locked_folder(file.parent),
        ):
            if not file.exists():
                write_atomic(file, secrets.token_hex(32))
    if file.stat().st_mode & 0o077:
        raise FedplanError(f"others may read {file}: chmod 600, or remove it to have another")
    secret = file.read_text(encoding="utf-8", errors="replace")
    if not re.fullmatch("[0-9a-f]{64}", secret):
        raise FedplanError(f"{file} holds no secret of 64 digits: remove it to have another")
    return secret


def run_superlink(folder: Path) -> None:
    """Run Flower's SuperLink by the settings in a server's folder, in this process; blocks.

    Makes missing secrets; changes environment, `sys.argv` and Flower's authentication.
    """
    link, token = read_superlink(folder), _read_secret(folder / TOKEN)
    _read_secret(folder / SECRET)
    os.umask(0o077)  # the SuperLink's database has the messages of all sites
    os.environ |= {**FLOWER_ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")}
    host, _, port = link.address.rpartition(":")
    arguments = ["--host", host.strip("[]"), "--port", port, "--database", str(link.database)]
    arguments += ["--isolation", "process"]
    arguments += ["--superexec-auth-secret-file", str(link.folder / SECRET)]
    arguments += ["--disable-runtime-dependency-installation"]
    if link.tls is None:
        arguments += ["--insecure"]
    else:
        ca, certificate, key = map(str, link.tls)
        arguments += ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
        arguments += ["--enable-supernode-auth"]
    internals.run_flower_superlink(OperatorAuthPlugin(token), NodeKeyCheck, arguments)


class OperatorAuthPlugin(internals.NoOpControlAuthnPlugin):
    """Flower plugin for the control API: admits only requests with the operator's `token`."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, internals.AccountInfo | None]:
        """Return whether the request's metadata has the token; and Flower's account, else None."""
        token = next((value for key, value in metadata if key == internals.ACCESS_TOKEN_KEY), b"")
        token = token.encode() if isinstance(token, str) else token
        if not token or not hmac.compare_digest(token, self._token):
            return False, None
        return super().validate_tokens_in_metadata(metadata)


class _BearerToken:
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(
        self, context: internals.ProtobufRequestContext, call_next: internals.ProtobufCall
    ) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {self._token}"
        return call_next(context)


def read_public_key(file: Path) -> bytes:
    """Read a site's public node key as PEM; FedplanError if the file is not an OpenSSH key."""
    try:
        return load_ssh_public_key(file.read_bytes()).public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
    except (OSError, ValueError) as error:
        raise FedplanError(f"{file} is not a public node key: {error}") from error


def run_on_superlink(
    link: SuperLink, study: Study, folder: Path, events: EventStream | None = None
) -> None:
    """Run all rounds of a study's server on the SuperLink `link`, or continue the run in `folder`.

    A SuperLink that does not answer is waited for without limit; if Flower ends its run, the open
    round goes on in another. FedplanError if the SuperLink rejects a call.
    """
    with flower_runs(link) as renew_grid:
        run_server(
            None,
            study,
            folder,
            events=events,
            registered_names=link.registered_names,
            renew_grid=renew_grid,
        )


@contextmanager
def flower_runs(link: SuperLink) -> Generator[Callable[[], Grid]]:
    """Yield a function that starts a Flower run on the SuperLink `link`, and returns its grid.

    Each call ends the run before, as the end of the body does; see `acquire_grid`.
    """
    with ExitStack() as flower_run:

        def renew_grid() -> Grid:
            flower_run.close()
            return flower_run.enter_context(acquire_grid(link))

        yield renew_grid


@contextmanager
def acquire_grid(link: SuperLink) -> Generator[Grid]:
    """Start a Flower run on the SuperLink `link`, take the run's server task, and yield the grid.

    Sends heartbeats during the body, and reports the end of the task. Raises LinkUnreachable if the
    SuperLink gives no task in TASK_TIMEOUT seconds.
    """
    for name in (TOKEN, SECRET):  # made before the lock, which each needs, if the SuperLink is new
        _read_secret(link.folder / name)
    # Two processes must not take each other's task.
    with locked_folder(link.folder, timeout=TASK_TIMEOUT):
        token = _acquire_task(link, link.start_run())
    api = link.runtime_api
    grid = internals.ReplyGrid(
        runtime_api_address=api.address,
        insecure=api.certificate is None,
        root_certificates=api.certificate.read_bytes() if api.certificate else None,
        token=token,
    )
    # By default Flower repeats calls for ever, so that a request to stop would go unnoticed; and
    # when the task has expired, it interrupts this process.
    invoker = grid._retry_invoker  # pyright: ignore[reportPrivateUsage]
    invoker.max_time, invoker.should_giveup = RETRY_SECONDS, _is_final
    client = api.task_client(token)
    status, details = internals.SubStatus.FAILED, "the server ended"
    try:
        with link.wrap_http_errors():
            task = client.PullTaskInput(internals.PullTaskInputRequest())
        internals.TaskIdentity.task_id = task.task_id
        internals.TaskIdentity.run_id = task.run.run_id
        internals.TaskIdentity.node_id = task.context.node_id
        grid.set_run(internals.run_from_proto(task.run))
        with send_heartbeats(client):
            yield grid
        status, details = internals.SubStatus.COMPLETED, ""
    finally:
        _end_task(client, details, status)
        grid.close()


def _is_final(error: Exception) -> bool:
    """Return whether a failed call needs no repetition: the SuperLink itself has answered."""
    is_answer = isinstance(error, httpx.HTTPStatusError)
    return is_answer and error.response.status_code not in PROXY_ERRORS


def _acquire_task(link: SuperLink, run_id: int) -> str:
    """Wait for a Flower run's task, and return its token; tasks left by others are ended."""
    deadline = time.monotonic() + TASK_TIMEOUT
    client = link.runtime_api.acquire_client()
    try:
        while time.monotonic() < deadline:
            request = internals.AcquireTaskRequest(
                supported_task_types=[internals.TaskType.SERVER_APP]
            )
            with link.wrap_http_errors("wrong executor secret"):
                response = client.AcquireTask(request)
            if response.HasField("task") and response.task.run_id == run_id:
                return response.token
            if response.HasField("task"):
                other = response.task.run_id
                log.warning("run %s was left by another process, and is ended", other)
                _end_task(link.runtime_api.task_client(response.token), "nobody runs this app")
            time.sleep(0.2)
    finally:
        client.close()
    raise LinkUnreachable(f"the SuperLink at {link.address} does not give the task of its new run")


def _end_task(
    client: internals.RuntimeHttpClient, details: str, status: str = internals.SubStatus.FAILED
) -> None:
    """Report the end of a client's task, or log that this failed, and close the client."""
    try:
        client.PushTaskOutput(internals.PushTaskOutputRequest(sub_status=status, details=details))
    except httpx.HTTPError as error:
        log.warning("the end of the task was not reported to the SuperLink: %r", error)
    client.close()
