# SPDX-License-Identifier: Apache-2.0
"""Check whether a site's node key is registered at its server, without changing anything there."""

from __future__ import annotations

from pathlib import Path

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeRequest
from flwr.supercore.error import ApiErrorCode
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from fedplan.errors import FedplanError
from fedplan.runners.site import ServerSection, read_node_key

REGISTERED_BY_CODE = {
    ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED: False,
    ApiErrorCode.FLEET_INVALID_HEARTBEAT_INTERVAL: True,
}
"""Whether the key is registered, by the error code of an activation without heartbeats.

The server looks up the key first, and then rejects the heartbeat interval.
"""
PROXY_ERRORS = (502, 503, 504)
"""HTTP status of a proxy without a response of the server behind it."""


def is_key_registered(server: ServerSection) -> bool:
    """Ask the server of a site whether the site's node key is registered there.

    Reads the files `server.node_key` and `server.ca`. Sends an activation with a heartbeat interval
    of 0, which the server rejects with one of two codes, so nothing changes there and a running
    node is not disturbed. Raises FedplanError if the key file is invalid, the server cannot be
    reached, or the response has neither code.
    """
    key = read_node_key(Path(server.node_key))
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
    request = ActivateNodeRequest(public_key=public_key_to_bytes(public), heartbeat_interval=0.0)
    with client:
        try:
            client.ActivateNode(request)
        except httpx.HTTPStatusError as error:
            return _read_response(error.response)
        except httpx.HTTPError as error:
            raise FedplanError(f"{server.address} does not answer: {error!r}") from error
    raise FedplanError(
        f"{server.address} accepts a node without heartbeats: it has another Flower version"
    )


def _read_response(response: httpx.Response) -> bool:
    """Return whether a server's error response means that the key is registered.

    Raises FedplanError if the response has none of the codes of REGISTERED_BY_CODE.
    """
    for code, is_registered in REGISTERED_BY_CODE.items():
        if str(int(code)) in response.text:
            return is_registered
    if response.status_code in PROXY_ERRORS:
        raise FedplanError(
            f"the server's proxy answers ({response.status_code}), but not the SuperLink behind "
            "it: tell its operator, and try again"
        )
    raise FedplanError(f"the server answers {response.status_code}: {response.text[:200]}")
