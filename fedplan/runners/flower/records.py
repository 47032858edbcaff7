# SPDX-License-Identifier: Apache-2.0
"""Conversion of messages to Flower records, with each blob as an array of bytes.

Flower fetches every array by a request of its own, and supports neither bfloat16 nor 8-bit floats.
So tensors are sent as bytes.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedplan.tensors.message import BrokenMessage, Message

ARRAYS, HEADER, FIELD = "arrays", "header", "fedplan"
"""Names of the two records, and of the field in the header record."""


def to_records(message: Message, arrays: ArrayRecord | None = None) -> RecordDict:
    """Convert a message; `arrays` are the result of `to_arrays` for its blobs, if available."""
    header = ConfigRecord({FIELD: message.header})
    return RecordDict({ARRAYS: arrays or to_arrays(message.blobs), HEADER: header})


def to_arrays(blobs: tuple[bytes, ...]) -> ArrayRecord:
    """Convert blobs to an array record, named by their position."""
    return ArrayRecord(
        {
            f"{place:06}": Array("uint8", (len(blob),), "safetensors", blob)
            for place, blob in enumerate(blobs)
        }
    )


def from_records(records: RecordDict) -> Message:
    """Convert the records of `to_records` back; BrokenMessage if they are none."""
    arrays, config = records.get(ARRAYS), records.get(HEADER)
    if not isinstance(arrays, ArrayRecord) or not isinstance(config, ConfigRecord):
        raise BrokenMessage("not a message of fedplan: it has no arrays or no header")
    header = config.get(FIELD)
    if not isinstance(header, bytes):
        raise BrokenMessage("the header of a message must be bytes")
    return Message(header, tuple(arrays[name].data for name in sorted(arrays)))
