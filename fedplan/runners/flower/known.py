# SPDX-License-Identifier: Apache-2.0
"""Whether a server knows a site's key, asked in a way that changes nothing there."""

from __future__ import annotations

from pathlib import Path

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedplan.errors import FedplanError
from fedplan.runners.site import ServerSection

SAID = {
    ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED: False,
    ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL: True,
}
"""A server looks for the key first, and then refuses a node that would never be heard again."""
BEHIND = (502, 503, 504)
"""What a proxy says of a server behind it that does not answer."""


def is_known(server: ServerSection) -> bool:
    """Whether the key of a site is registered at its server.

    It asks to be taken for present for no time at all. That is refused either way, for one reason
    or for the other, and a node that is at work is not disturbed.
    """
    key = _key(Path(server.node))
    public = key.public_key()
    client = FleetHttpClient.from_server_address(
        server.address,
        insecure=False,
        root_certificates=Path(server.ca).read_bytes(),
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, public),
        ],
    )
    asked = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0.0)
    with client:
        try:
            client.ActivateNode(asked)
        except httpx.HTTPStatusError as error:
            return _known(error.response)
        except httpx.HTTPError as error:
            raise FedplanError(f"{server.address} does not answer: {error!r}") from error
    raise FedplanError(f"{server.address} takes a node that is never heard: its Flower is another")


def _known(answer: httpx.Response) -> bool:
    for code, known in SAID.items():
        if str(int(code)) in answer.text:
            return known
    if answer.status_code in BEHIND:
        raise FedplanError(
            f"the server's proxy answers ({answer.status_code}), and not the SuperLink behind it: "
            "tell its operator, and look again"
        )
    raise FedplanError(f"the server says {answer.status_code}: {answer.text[:200]}")


def _key(file: Path) -> ec.EllipticCurvePrivateKey:
    try:
        found = load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError) as error:
        raise FedplanError(f"{file} is no key of a node: {error}") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise FedplanError(f"{file} is no key of a node: make one by `fedplan site keys`")
    return found
