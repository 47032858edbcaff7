# SPDX-License-Identifier: Apache-2.0
"""A stranger, who has no registered node key, posts large requests to the port of a federation."""

from __future__ import annotations

import os
import re
import socket
import ssl
from base64 import b64encode
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

BLOCK = os.urandom(2**16)
BLOCKS = {"whole": 946, "chunked": 946, "allowed": 120}
"""Blocks of a post: 62 MB with its length or in chunks, or 7.9 MB, which the proxy lets through."""


def post(port: int, ca: Path, form: str) -> int:
    """Post all blocks of a form; return the status of the answer, 0 if the server only closes."""
    length = f"content-length: {BLOCKS[form] * len(BLOCK)}"
    heads = ["POST /v1/fleet/push-object HTTP/1.1", "host: localhost", *_signature()]
    heads += ["content-type: application/protobuf", "connection: close"]
    heads += ["transfer-encoding: chunked" if form == "chunked" else length]
    context = ssl.create_default_context(cafile=ca)
    with (
        socket.create_connection(("localhost", port), timeout=60) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as peer,
    ):
        with suppress(OSError):
            peer.sendall("\r\n".join([*heads, "", ""]).encode())
            marks = (b"%x\r\n" % len(BLOCK), b"\r\n") if form == "chunked" else (b"", b"")
            for _ in range(BLOCKS[form]):
                peer.sendall(BLOCK.join(marks))
            if form == "chunked":
                peer.sendall(b"0\r\n\r\n")
        with suppress(OSError):
            if found := re.match(rb"HTTP/1.1 (\d+) ", peer.recv(4096)):
                return int(found[1])
    return 0


def posts(port: int, ca: Path, count: int, at_a_time: int = 16) -> Counter[int]:
    """Post `count` requests of all forms; return how often each status was the answer."""
    forms = [list(BLOCKS)[number % len(BLOCKS)] for number in range(count)]
    with ThreadPoolExecutor(at_a_time) as pool:
        return Counter(pool.map(lambda form: post(port, ca, form), forms))


def _signature() -> list[str]:
    """The headers of a node whose key is not registered."""
    key = ec.generate_private_key(ec.SECP384R1())
    said = datetime.now(UTC).isoformat()
    public, signed = public_key_to_bytes(key.public_key()), sign_message(key, said.encode())
    values = {"public-key": b64encode(public), "signature": b64encode(signed)}
    return [f"flwr-timestamp: {said}", *(f"flwr-{k}: {v.decode()}" for k, v in values.items())]


def memory(session: int) -> float:
    """MB of the processes of a session."""
    pages = 0
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((place / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                pages += int((place / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
