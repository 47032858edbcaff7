# SPDX-License-Identifier: Apache-2.0
"""Messages of fedplan as Flower messages, with tensors as blobs of bytes.

Flower fetches every record by a request of its own, and an array by two more for each 5 MB; it
supports neither bfloat16 nor 8-bit floats. So tensors are sent as bytes, small ones in few records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage

from fedplan.errors import FedplanError, printable
from fedplan.federation.ledger.faults import (
    KINDS,
    decode_reason,
    describe_code,
    encode_code,
    error_code_of,
)
from fedplan.tensors.message import BrokenMessage, Message
from fedplan.tensors.serialization import unpack_message

log = logging.getLogger("fedplan")
Answer = Callable[[str, Message], Message]
"""Returns the reply to a request, given its kind and message."""
APP_FAILED = 2
"""Flower's error code of a failed app; the server repeats the request a few times."""
BlobRecord = ArrayRecord | ConfigRecord
"""Blobs of a message: a ConfigRecord if they are small."""
SMALL_BYTES = 2**22
"""Most bytes of small blobs."""
ARRAYS, HEADER, FIELD = "arrays", "header", "fedplan"
"""Names of the two records, and of the field in the header record."""


def to_records(message: Message, blobs: BlobRecord | None = None) -> RecordDict:
    """Convert a message to records, a small one to one; `blobs` replace the message's own."""
    header: dict[str, Any] = {FIELD: message.header}
    if blobs is None and message.nbytes <= SMALL_BYTES:
        return RecordDict({HEADER: ConfigRecord(header | _named(message.blobs))})
    blobs = to_blob_record(message.blobs) if blobs is None else blobs
    records = RecordDict({HEADER: ConfigRecord(header)})
    if blobs:
        records[ARRAYS] = blobs
    return records


def to_blob_record(blobs: tuple[bytes, ...]) -> BlobRecord:
    """Convert blobs to a record, which several messages may share."""
    if sum(map(len, blobs)) > SMALL_BYTES:
        return to_arrays(blobs)
    return ConfigRecord({**_named(blobs)})


def to_arrays(blobs: tuple[bytes, ...]) -> ArrayRecord:
    """Convert blobs to an array record, named by their position."""
    named = _named(blobs).items()
    return ArrayRecord({n: Array("uint8", (len(b),), "safetensors", b) for n, b in named})


def _named(blobs: tuple[bytes, ...]) -> dict[str, bytes]:
    return {f"{place:06}": blob for place, blob in enumerate(blobs)}


def from_records(records: RecordDict) -> Message:
    """Convert the records of `to_records` back; BrokenMessage without a header of bytes."""
    config, blobs = records.get(HEADER), records.get(ARRAYS)
    if not isinstance(config, ConfigRecord) or not isinstance(config.get(FIELD), bytes):
        raise BrokenMessage("not a message of fedplan: it has no header of bytes")
    named: dict[str, Any] = {name: value for name, value in config.items() if name.isdecimal()}
    if isinstance(blobs, ArrayRecord):
        named |= {name: array.data for name, array in blobs.items()}
    elif isinstance(blobs, ConfigRecord):
        named |= blobs
    if not all(isinstance(blob, bytes) for blob in named.values()):
        raise BrokenMessage("not a message of fedplan: a blob is not bytes")
    return Message(cast("bytes", config[FIELD]), tuple(named[name] for name in sorted(named)))


@dataclass(frozen=True)
class ConnectedSite:
    """A connected site, as described by the site's reply to the hello.

    `node` is the site's Flower node id, `initial_digest` the digest of the initial model there.
    `traits` are the site's texts for conditions of the plan, `versions` its package versions (empty
    if unknown), `key` the public node key for secure aggregation, as the site reports it: not
    verified. `statistics` are the counts in the reply to a request of these, not checked either.
    """

    node: int
    agreement_digest: str
    initial_digest: str
    run: str
    traits: dict[str, str]
    versions: dict[str, str] = field(default_factory=dict[str, str])
    key: bytes = b""
    statistics: Any = None


def read_hello(records: RecordDict, node: int) -> tuple[str, ConnectedSite, dict[str, Any]]:
    """Return a site's name, the site and all fields of a hello's reply; errors if invalid."""
    fields = unpack_message(from_records(records))[1]
    traits, versions = (_text_fields(fields.get(key)) for key in ("traits", "versions"))
    agreement, start, run = (str(fields.get(key)) for key in ("agreement", "start", "run"))
    node_key = bytes.fromhex(str(fields.get("node_key", "")))
    site = ConnectedSite(
        node, agreement, start, run, traits, versions, node_key, fields.get("statistics")
    )
    return str(fields.get("client", "")), site, fields


def _text_fields(value: object) -> dict[str, str]:
    items = cast("Mapping[object, object]", value if isinstance(value, dict) else {})
    return {str(name): str(item) for name, item in items.items()}


def reply_bytes(reply: FlowerMessage, *, needs_blobs: bool) -> int:
    """The bytes of a reply; 0 if it is an error or refusal, which says nothing of others."""
    try:
        message = Message(b"") if reply.has_error() else from_records(reply.content)
    except BrokenMessage:
        return 0
    return message.nbytes if message.blobs or not needs_blobs else 0


def error_text(reply: FlowerMessage) -> str:
    """Return the text of an error reply, with the sentence for its code, on one line."""
    return printable(decode_reason(str(reply.error.reason)[:200]))


def reply_fields(reply: Message) -> dict[str, Any]:
    """Return the JSON fields in the header of a site's reply; empty if the header is invalid."""
    try:
        return unpack_message(Message(reply.header))[1]
    except FedplanError:
        return {}


def refusal_text(fields: Mapping[str, Any]) -> str:
    """Return the sentence for the error code in a reply's fields; empty if there is no error."""
    kind = next((kind for kind in KINDS if kind in fields), "")
    return describe_code(kind, str(fields[kind])) if kind else ""


def make_reply(envelope: FlowerMessage, answer: Answer) -> FlowerMessage:
    """Return the Flower reply to `envelope`, made by `answer`; of an exception, its code alone."""
    kind = envelope.metadata.message_type.removeprefix("query.")
    try:
        try:
            message = from_records(envelope.content)
        except BrokenMessage:
            message = Message(b"")  # sites refuse it
        return FlowerMessage(to_records(answer(kind, message)), reply_to=envelope)
    except Exception as error:
        return error_reply(envelope, error)


def error_reply(envelope: FlowerMessage, error: Exception) -> FlowerMessage:
    """Log and reply an exception's code alone, since its text may reveal examples."""
    code = encode_code(error_code_of(error))
    log.error("a request failed: %s", code)
    return FlowerMessage(Error(APP_FAILED, code), reply_to=envelope)
