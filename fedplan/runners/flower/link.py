# SPDX-License-Identifier: Apache-2.0
"""The SuperLink: started so that only its operator may ask it, and asked as that.

Of itself its control API, which starts runs and registers nodes, asks nobody for a credential. Here
it asks for a token that lies in a file of the operator's, and so does the API where a run's server
takes its task.
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
from fedplan.runners.flower.executor import Door
from fedplan.runners.flower.node import QUIET
from fedplan.storage.errors import explained
from fedplan.storage.files import put_file
from fedplan.storage.locks import alone
from fedplan.studies.plain import read_toml
from fedplan.studies.sections import Section

SERVER, TOKEN, SECRET = "server.toml", "operator.token", "executor.secret"
"""In a server's folder: where its SuperLink is, and who may ask it."""
APP = Path(__file__).parent / "templates" / "app"
"""An app of which nothing runs: Flower takes no run without one."""


class _Server(Section):
    address: str
    database: str = "state.db"
    ca: str = ""
    certificate: str = ""
    key: str = ""


@dataclass(frozen=True)
class Link:
    """A SuperLink, and the credentials of its operator, as they lie in the server's folder."""

    folder: Path
    address: str
    database: Path
    tls: tuple[Path, Path, Path] | None

    @cached_property
    def door(self) -> Door:
        """Where a run's server takes its task."""
        return Door(self.address, self.tls[0] if self.tls else None, self.folder / SECRET)

    @contextmanager
    def control(self) -> Generator[ControlHttpClient]:
        """A line to the control API."""
        client = ControlHttpClient.from_server_address(
            server_address=self.address,
            insecure=self.tls is None,
            root_certificates=self.tls[0].read_bytes() if self.tls else None,
            interceptors=[_Bearer(read_token(self.folder))],
        )
        try:
            yield client
        except httpx.HTTPStatusError as error:
            code = error.response.status_code
            why = "the token is not its operator's" if code == 401 else error.response.text[:200]
            raise FedplanError(f"the SuperLink at {self.address} says {code}: {why}") from error
        except httpx.HTTPError as error:
            raise FedplanError(f"no SuperLink answers at {self.address}: {error!r}") from error
        finally:
            client.close()

    def start(self) -> int:
        """Begin a run of Flower's, and say its number."""
        app = build_fab_from_disk(APP)
        fab = Fab(hashlib.sha256(app).hexdigest(), app, {})
        with self.control() as client:
            return client.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id

    def register(self, name: str, public: bytes) -> None:
        """Let in a site: whoever has this key is it, and nobody else is."""
        if any(node.name == name for node in self.nodes()):
            raise FedplanError(f"{name!r} is registered already: revoke it first")
        with self.control() as client:
            client.RegisterNode(RegisterNodeRequest(public_key=public, name=name))

    def revoke(self, name: str) -> int:
        """Let a site in no longer; how many nodes that were."""
        found = [node for node in self.nodes() if node.name == name]
        with self.control() as client:
            for node in found:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
        if not found:
            there = ", ".join(sorted(node.name for node in self.nodes() if node.name))
            raise FedplanError(f"no site {name!r} is registered: there are {there or 'none'}")
        return len(found)

    def names(self) -> set[str]:
        """The names of all sites that are registered."""
        return {node.name for node in self.nodes()}

    def nodes(self) -> list[NodeInfo]:
        """The nodes that are registered."""
        with self.control() as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
        return [node for node in found if node.status != "unregistered"]


def link_in(folder: Path) -> Link:
    """The SuperLink of a server's folder."""
    file = folder / SERVER
    try:
        said = _Server.model_validate(read_toml(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, ValidationError) as error:
        raise FedplanError(f"{file} does not say where the SuperLink is: {error}") from error
    tls = [(folder / each).resolve() for each in (said.ca, said.certificate, said.key) if each]
    if len(tls) not in (0, 3):
        raise FedplanError(f"{file}: say ca, certificate and key, or none of them")
    kept = (tls[0], tls[1], tls[2]) if tls else None
    return Link(folder, said.address, folder / said.database, kept)


def read_token(folder: Path) -> str:
    """The operator's token, made when it is first needed."""
    return _secret(folder / TOKEN)


def _secret(file: Path) -> str:
    """A secret of 64 digits, made when it is first needed, and whole or not there."""
    if not file.exists():
        with (
            explained(f"{file} cannot be written", "make room, then start again"),
            alone(file.parent),
        ):
            if not file.exists():
                put_file(file, secrets.token_hex(32), mode=0o600)
    if file.stat().st_mode & 0o077:
        raise FedplanError(f"others may read {file}: chmod 600, or remove it to have another")
    found = file.read_text(encoding="utf-8", errors="replace")
    if not re.fullmatch("[0-9a-f]{64}", found):
        raise FedplanError(f"{file} holds no secret of 64 digits: remove it to have another")
    return found


def run_link(folder: Path) -> None:
    """Run the SuperLink of a server's folder in this process, until it is ended."""
    link = link_in(folder)
    token = read_token(folder)
    _secret(folder / SECRET)
    os.environ |= {**QUIET, "FLWR_HOME": str(folder / "flwr")}
    # The package's face shows a function of the module's name: the module is had by its own.
    module: Any = import_module("flwr.superlink.cli.flower_superlink")
    module.load_control_authn_plugin = lambda: Operator(token)
    sys.argv = ["flower-superlink", *_words(link)]
    module.flower_superlink()


def _words(link: Link) -> list[str]:
    host, _, port = link.address.rpartition(":")
    words = ["--host", host.strip("[]"), "--port", port, "--database", str(link.database)]
    words += ["--isolation", "process", "--superexec-auth-secret-file", str(link.folder / SECRET)]
    words += ["--disable-runtime-dependency-installation"]
    if link.tls is None:
        return [*words, "--insecure"]
    ca, certificate, key = map(str, link.tls)
    files = ["--ssl-ca-certfile", ca, "--ssl-certfile", certificate, "--ssl-keyfile", key]
    return [*words, *files, "--enable-supernode-auth"]


class Operator(NoOpControlAuthnPlugin):
    """Who may ask the control API: whoever says the operator's token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        said = next((each for key, each in metadata if key == ACCESS_TOKEN_KEY), b"")
        said = said.encode() if isinstance(said, str) else said
        if not said or not hmac.compare_digest(said, self._token):
            return False, None
        return super().validate_tokens_in_metadata(metadata)


class _Bearer:
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {self._token}"
        return call_next(context)


def public_key(file: Path) -> bytes:
    """The public half of a site's key, as Flower registers it."""
    try:
        return load_ssh_public_key(file.read_bytes()).public_bytes(
            Encoding.PEM, PublicFormat.SubjectPublicKeyInfo
        )
    except (OSError, ValueError) as error:
        raise FedplanError(f"{file} is no public key of a node: {error}") from error
