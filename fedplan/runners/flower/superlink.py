# SPDX-License-Identifier: Apache-2.0
"""Flower's SuperLink, run so that only its operator may control it, and calls to its control API.

By default Flower's control API, which starts runs and registers nodes, needs no credential. Here it
needs a token from a file of the operator, and so does the API that gives out server tasks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_public_key,
)
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from pydantic import ValidationError

from fedplan.errors import FedplanError
from fedplan.runners.flower.superexec import RuntimeApi
from fedplan.runners.flower.supernode import FLOWER_ENVIRONMENT
from fedplan.storage.errors import wrap_disk_errors
from fedplan.storage.files import write_atomic
from fedplan.storage.locks import locked_folder
from fedplan.studies.sections import Section
from fedplan.studies.toml_values import parse_toml

SERVER, TOKEN, SECRET = "server.toml", "operator.token", "executor.secret"
"""Files in a server's folder: settings, token for the control API, secret for tasks."""
APP = Path(__file__).parent / "templates" / "app"
"""An empty app: Flower starts no run without one."""


class _ServerFile(Section):
    """Fields of server.toml; file names are relative to its folder."""

    address: str
    database: str = "state.db"
    ca: str = ""
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink, and its operator's credentials in the server's folder.

    `database` is Flower's state file, `tls` the files of CA certificate, certificate and key, None
    for an unencrypted connection.
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
    def control(self) -> Generator[ControlHttpClient]:
        """Yield a client of the control API; its HTTP errors are raised as FedplanError."""
        client = ControlHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.tls is None,
            root_certificates=self.tls[0].read_bytes() if self.tls else None,
            interceptors=[_BearerToken(read_token(self.folder))],
        )
        try:
            yield client
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            reason = "wrong operator token" if code == 401 else error.response.text[:200]
            raise FedplanError(
                f"the SuperLink at {self.address} answers {code}: {reason}"
            ) from error
        except httpx.HTTPError as error:
            raise FedplanError(f"no SuperLink answers at {self.address}: {error!r}") from error
        finally:
            client.close()

    def start_run(self) -> int:
        """Start a Flower run with the empty app, and return its id."""
        app = build_fab_from_disk(APP)
        fab = Fab(hashlib.sha256(app).hexdigest(), app, {})
        with self.control() as client:
            return client.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id

    def register(self, name: str, public: bytes) -> None:
        """Register a site's public node key (PEM); FedplanError if the name is registered."""
        if any(node.name == name for node in self.nodes()):
            raise FedplanError(f"{name!r} is registered already: revoke it first")
        with self.control() as client:
            client.RegisterNode(RegisterNodeRequest(public_key=public, name=name))

    def revoke(self, name: str) -> int:
        """Unregister a site's nodes, and return their number; FedplanError if there are none."""
        nodes = [node for node in self.nodes() if node.name == name]
        with self.control() as client:
            for node in nodes:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        if not nodes:
            names = ", ".join(sorted(node.name for node in self.nodes() if node.name))
            raise FedplanError(f"no site {name!r} is registered: there are {names or 'none'}")
        return len(nodes)

    def site_names(self) -> set[str]:
        """Return the names of all registered sites."""
        return {node.name for node in self.nodes()}

    def nodes(self) -> list[NodeInfo]:
        """Return the registered nodes."""
        with self.control() as client:
            nodes = client.ListNodes(ListNodesRequest()).nodes_info
        return [node for node in nodes if node.status != "unregistered"]


def read_superlink(folder: Path) -> SuperLink:
    """Read the SuperLink's settings from a server's folder; FedplanError if they are invalid."""
    file = folder / SERVER
    try:
        settings = _ServerFile.model_validate(parse_toml(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise FedplanError(f"{file} does not say where the SuperLink is: {error}") from error
    files = [
        (folder / each).resolve()
        for each in (settings.ca, settings.certificate, settings.key)
        if each
    ]
    if len(files) not in (0, 3):
        raise FedplanError(f"{file}: give ca, certificate and key, or none of them")
    tls = (files[0], files[1], files[2]) if files else None
    return SuperLink(folder, settings.address, folder / settings.database, tls)


def read_token(folder: Path) -> str:
    """Return the operator's token, made at the first call."""
    return _read_secret(folder / TOKEN)


def _read_secret(file: Path) -> str:
    """Return a file's secret of 64 hex digits; make a random one if the file is missing.

    Raises FedplanError if others may read it or its content is no secret.
    """
    if not file.exists():
        with (
            wrap_disk_errors(f"{file} cannot be written", "free space, then start again"),
            locked_folder(file.parent),
        ):
            if not file.exists():
                write_atomic(file, secrets.token_hex(32), mode=0o600)
    if file.stat().st_mode & 0o077:
        raise FedplanError(f"others may read {file}: chmod 600, or remove it to have another")
    secret = file.read_text(encoding="utf-8", errors="replace")
    if not re.fullmatch("[0-9a-f]{64}", secret):
        raise FedplanError(f"{file} holds no secret of 64 digits: remove it to have another")
    return secret


def run_superlink(folder: Path) -> None:
    """Run the SuperLink of a server's folder in this process, until it ends.

    Changes this process's environment and arguments, and patches Flower's authentication plugin.
    """
    link = read_superlink(folder)
    token = read_token(folder)
    _read_secret(folder / SECRET)
    os.environ |= {**FLOWER_ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")}
    # The package exports a function of the same name, which hides the module.
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.load_control_authn_plugin = lambda: OperatorAuthPlugin(token)
    sys.argv = ["flower-superlink", *_arguments(link)]
    module.flower_superlink()


def _arguments(link: SuperLink) -> list[str]:
    """Return the command line arguments of flower-superlink."""
    host, _, port = link.address.rpartition(":")
    arguments = ["--host", host.strip("[]"), "--port", port, "--database", str(link.database)]
    arguments += [
        "--isolation",
        "process",
        "--superexec-auth-secret-file",
        str(link.folder / SECRET),
    ]
    arguments += ["--disable-runtime-dependency-installation"]
    if link.tls is None:
        return [*arguments, "--insecure"]
    ca, certificate, key = map(str, link.tls)
    files = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
    return [*arguments, *files, "--enable-supernode-auth"]


class OperatorAuthPlugin(NoOpControlAuthnPlugin):
    """Flower plugin that admits callers of the control API by the operator's token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Return whether the metadata has the token, and the account if so."""
        token = next((value for key, value in metadata if key == ACCESS_TOKEN_KEY), b"")
        token = token.encode() if isinstance(token, str) else token
        if not token or not hmac.compare_digest(token, self._token):
            return False, None
        return super().validate_tokens_in_metadata(metadata)


class _BearerToken:
    """Interceptor that sends a token with each request."""

    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
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
