# SPDX-License-Identifier: Apache-2.0
"""Check of node keys: a SuperLink reads a large request only if a registered key signed it.

Flower also checks the key, but only after it has read the whole request into memory.
"""

from __future__ import annotations

from base64 import b64decode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedplan.runners.flower import _internals as internals

FLEET_PATH = "/v1/fleet/"
"""Start of each path of the API for sites."""
UNCHECKED_BYTES = 4096
"""Most bytes of a request that is read from anybody; the request of a new node has about 300."""


class NodeKeyCheck:
    """ASGI middleware that answers 401 to a large request that no registered node key signed.

    It passes all other requests on to `app`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or pass it on, without reading its body."""
        # The path as Flower reads it, which leaves tabs out.
        is_fleet = scope["type"] == "http" and Request(scope).url.path.startswith(FLEET_PATH)
        if is_fleet and not _is_small(Request(scope)):
            # The check writes into the state of a request, here of a copy.
            copied = Request({**scope, "state": {}})
            if not await run_in_threadpool(is_signed_by_site, copied):
                text = "no registered node key signed this request: register the key, set the clock"
                refusal = JSONResponse({"detail": text}, 401)
                return await refusal(scope, receive, send)
        await self.app(scope, receive, send)


def _is_small(request: Request) -> bool:
    """Return whether a request announces a body of at most UNCHECKED_BYTES, or no body."""
    if "transfer-encoding" in request.headers:
        return False
    length = request.headers.get("content-length", "0")
    return length.isdecimal() and int(length) <= UNCHECKED_BYTES


def is_signed_by_site(request: Request) -> bool:
    """Return whether a registered node key signed a request; sets `request.state`."""
    try:
        key = b64decode(request.headers.get(internals.FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        # Flower compares the key in the headers with the key in the body, which is not read yet.
        request.state.protobuf_request = internals.ActivateNodeRequest(public_key=key)
        internals.authenticate_node(request)
    except Exception:  # the key may be of any kind, and of any curve
        return False
    return internals.get_linkstate(request).get_node_id_by_public_key(key) is not None
