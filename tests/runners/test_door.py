# SPDX-License-Identifier: Apache-2.0
"""A stranger without a registered key cannot fill the memory of a server; sites work meanwhile."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from deployment import Deployment
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from starlette.types import Message, Receive, Scope, Send
from stranger import memory, posts
from test_deployment import (
    MORE,
    SITES,
    require_same,
    require_same_homes,
    rows_of,
    study_from_dict,
    whole,
)
from test_sockets import SIZE

from fedplan.runners.flower.key_check import UNCHECKED_BYTES, NodeKeyCheck

KEY, OTHER = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())


def signed(key: ec.EllipticCurvePrivateKey, time: str = "", by: object = None) -> dict[str, str]:
    """The headers by which Flower authenticates a node."""
    said = time or now().isoformat()
    signature = sign_message(by or key, said.encode())  # pyright: ignore
    public = public_key_to_bytes(key.public_key())
    texts = {"flwr-public-key": public, "flwr-signature": signature}
    return {"flwr-timestamp": said, **{k: b64encode(v).decode() for k, v in texts.items()}}


def status_of(path: str, headers: dict[str, str]) -> int:
    """The status of the answer to a request, 200 if it is passed on; its body is never read."""
    answers = list[Message]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def receive() -> Message:
        raise AssertionError("the check reads a body")

    async def send(message: Message) -> None:
        answers.append(message)

    ids = {public_key_to_bytes(KEY.public_key()): 7}
    state = SimpleNamespace(get_node_id_by_public_key=ids.get)
    factory = SimpleNamespace(linkstate_factory=SimpleNamespace(state=lambda: state))
    scope: Scope = {
        "type": "http", "path": path, "method": "POST", "app": SimpleNamespace(state=factory),
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()], "query_string": b"",
    }  # fmt: skip
    asyncio.run(NodeKeyCheck(app)(scope, receive, send))
    return answers[0]["status"]


LARGE = {"content-length": str(UNCHECKED_BYTES + 1)}
OLD = "2020-01-01T00:00:00+00:00"
EXCHANGE = b64encode(
    X25519PrivateKey.generate()
    .public_key()
    .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
).decode()
"""A key that signs nothing."""


@pytest.mark.parametrize(
    ("make_headers", "status"),
    [
        (lambda: {}, 200),
        (lambda: {"content-length": str(UNCHECKED_BYTES)}, 200),
        (lambda: LARGE, 401),
        (lambda: {"content-length": "-1"}, 401),
        (lambda: {"transfer-encoding": "chunked"}, 401),
        (lambda: {"transfer-encoding": "chunked", "content-length": "1"}, 401),
        (lambda: {**LARGE, **signed(KEY)}, 200),
        (lambda: {"transfer-encoding": "chunked", **signed(KEY)}, 200),
        (lambda: {**LARGE, **signed(OTHER)}, 401),
        (lambda: {**LARGE, **signed(KEY, by=OTHER)}, 401),
        (lambda: {**LARGE, **signed(KEY, OLD)}, 401),
        (lambda: {**LARGE, **signed(KEY), "flwr-public-key": "?"}, 401),
        (lambda: {**LARGE, **signed(KEY), "flwr-signature": ""}, 401),
        (lambda: {**LARGE, **signed(KEY), "flwr-public-key": EXCHANGE}, 401),
    ],
)
def test_a_large_request_is_read_only_of_a_registered_site(
    make_headers: Callable[[], dict[str, str]], status: int
) -> None:
    headers = make_headers()  # a signature counts for some minutes
    assert status_of("/v1/fleet/push-object", headers) == status
    assert status_of("/v1/\tfleet/push-object", headers) == status, "as Flower reads it"
    assert status_of("/v1/runtime/push-object", headers) == 200


@pytest.mark.nightly
def test_sites_finish_with_the_same_bits_and_1000_posts_of_a_stranger_hold_no_memory(
    here: Path,
) -> None:
    """Writes MB of SuperLink and nginx before 1,000 posts, and after them, to door.txt."""
    study = study_from_dict(here, "fedper", rounds=2)
    old = next(line for line in study.splitlines() if line.startswith("config = { im"))
    study = study.replace(old, SIZE)
    with Deployment(here / "fed", SITES, rows_of(here), more=MORE) as fed:
        post_many = partial(posts, fed.port, fed.folder / "ca.crt")
        with ThreadPoolExecutor(1) as pool:
            begun = fed.begin(study)
            meanwhile = pool.submit(post_many, 200)
            out = fed.finish(begun, "run", seconds=1500.0)
            statuses = meanwhile.result()
        sizes = [_memory(fed)]
        statuses += post_many(1000)
        sizes.append(_memory(fed))
        (here / "door.txt").write_text(f"{sizes} {dict(statuses)}\n")
        require_same(out, whole(here, study, "fedper"))
        require_same_homes(here / "fed", here, "fedper")
    assert statuses.total() == 1200 and statuses.keys() <= {0, 401, 413, 502, 503}
    assert all(after - before < 64 for before, after in zip(*map(dict.values, sizes), strict=True))


def _memory(fed: Deployment) -> dict[str, int]:
    return {name: round(sum(map(memory, fed.pids(name)))) for name in ("link", "proxy")}
