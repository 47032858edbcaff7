# SPDX-License-Identifier: Apache-2.0
"""The door of a SuperLink: a large request of a site is read after its node key is checked.

Flower checks the key, too, but after it has read the whole request into memory.
"""

from __future__ import annotations

import binascii
from base64 import b64decode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedplan.runners.flower import _internals as internals

FLEET = "/v1/fleet/"
"""Path of the API for sites."""
SMALL_BODY = 4096
"""Most bytes of a request that is read from anybody; one that activates a node has about 300."""


class Door:
    """ASGI middleware: answers a large request with 401, unless a registered node key signed it.

    Other requests, and those of registered sites, go on to `app`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or pass on one request; the body is not read here."""
        is_fleet = scope["type"] == "http" and scope["path"].startswith(FLEET)
        if is_fleet and not _is_small(Request(scope)):
            # What the check writes into the state stays out of the request's own.
            asked = Request({**scope, "state": {}})
            if not await run_in_threadpool(is_registered_site, asked):
                refusal = JSONResponse({"detail": "Register this node key first"}, 401)
                return await refusal(scope, receive, send)
        await self.app(scope, receive, send)


def _is_small(request: Request) -> bool:
    """Return whether a request announces a body of at most SMALL_BODY bytes, or none."""
    if "transfer-encoding" in request.headers:
        return False
    length = request.headers.get("content-length", "0")
    return length.isdecimal() and int(length) <= SMALL_BODY


def is_registered_site(request: Request) -> bool:
    """Return whether a registered node key signed the headers of a request; sets its state."""
    try:
        key = b64decode(request.headers.get(internals.FLEET_HTTP_PUBLIC_KEY_HEADER, ""))
        # Flower compares the key in the headers with that of the request: here they are the same.
        request.state.protobuf_request = internals.ActivateNodeRequest(public_key=key)
        internals.authenticate_node(request)
    except (binascii.Error, ValueError, HTTPException):
        return False
    return internals.get_linkstate(request).get_node_id_by_public_key(key) is not None
