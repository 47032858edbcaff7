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
from fedplan.storage.files import wrap_disk_errors, write_atomic
from fedplan.storage.locks import locked_folder
from fedplan.studies.schema import parse_toml
from fedplan.studies.sections import Section

SERVER, TOKEN, SECRET = "server.toml", "operator.token", "executor.secret"
"""Files in a server's folder: settings, token for the control API, secret for tasks."""
APP = Path(__file__).parent / "templates" / "app"
"""An empty app: Flower starts no run without one."""


class _ServerFile(Section):
    """Fields of server.toml; file names are relative to the folder of the file.

    `address` of the SuperLink is host:port, `database` Flower's state file; `ca`, `certificate` and
    `key` are the TLS files, all or none.
    """

    address: str
    database: str = "state.db"
    ca: str = ""
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True)
class SuperLink:
    """A SuperLink, seen by its operator: starts runs, and registers and revokes sites.

    `folder` is the server's folder with the operator's token and secret, `address` is host:port,
    `database` Flower's state file, `tls` the files of CA certificate, certificate and key, None for
    an unencrypted connection. Methods call the control API of the running SuperLink, and raise
    FedplanError if the SuperLink cannot be reached or rejects the call.
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
        """Yield a client of the control API, with the operator's token; closed after the body.

        HTTP errors in the body are raised as FedplanError.
        """
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
            text = f"the SuperLink at {self.address} answers {code}: {reason}"
            raise FedplanError(text) from error
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
        """Unregister the nodes of the site `name`, and return the number of nodes.

        Raises FedplanError if no such site is registered.
        """
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
    """Return the SuperLink that server.toml in a server's folder describes, without a call.

    Raises FedplanError if the file is missing or invalid.
    """
    file = folder / SERVER
    try:
        settings = _ServerFile.model_validate(parse_toml(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise FedplanError(f"{file} does not say where the SuperLink is: {error}") from error
    names = filter(None, (settings.ca, settings.certificate, settings.key))
    files = [(folder / name).resolve() for name in names]
    if len(files) not in (0, 3):
        raise FedplanError(f"{file}: give ca, certificate and key, or none of them")
    tls = (files[0], files[1], files[2]) if files else None
    return SuperLink(folder, settings.address, folder / settings.database, tls)


def read_token(folder: Path) -> str:
    """Return the operator's token, made at the first call."""
    return _read_secret(folder / TOKEN)


def _read_secret(file: Path) -> str:
    """Return the secret of 64 hex digits in a file; write a random secret if the file is missing.

    Raises FedplanError if others may read the file, or the content is not 64 hex digits.
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
    """Run Flower's SuperLink by the settings in a server's folder, in this process; blocks.

    Makes missing secrets. Changes this process's environment and `sys.argv`, and patches Flower's
    authentication plugin. Raises FedplanError if settings or secrets are invalid.
    """
    link, token = read_superlink(folder), read_token(folder)
    _read_secret(folder / SECRET)
    os.environ |= {**FLOWER_ENVIRONMENT, "FLWR_HOME": str(folder / "flwr")}
    # The package exports a function of the same name, which hides the module.
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.load_control_authn_plugin = lambda: OperatorAuthPlugin(token)
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
    sys.argv = ["flower-superlink", *arguments]
    module.flower_superlink()


class OperatorAuthPlugin(NoOpControlAuthnPlugin):
    """Flower plugin for the control API: admits only requests with the operator's `token`."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        """Return whether the request's metadata has the token; and Flower's account, else None."""
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
