# SPDX-License-Identifier: Apache-2.0
"""Records: messages as Flower's records, each blob one array of bytes.

Flower fetches every array by a request of its own, and its arrays know neither bfloat16 nor
eight-bit floats: to it, tensors are bytes.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedplan.tensors.message import BrokenMessage, Message

ARRAYS, HEADER, FIELD = "arrays", "header", "fedplan"


def records_of(message: Message, arrays: ArrayRecord | None = None) -> RecordDict:
    """A message as records; `arrays` are those of its blobs, if they are at hand."""
    said = ConfigRecord({FIELD: message.header})
    return RecordDict({ARRAYS: arrays or arrays_of(message.blobs), HEADER: said})


def arrays_of(blobs: tuple[bytes, ...]) -> ArrayRecord:
    """Blobs as arrays."""
    return ArrayRecord(
        {
            f"{place:06}": Array("uint8", (len(blob),), "safetensors", blob)
            for place, blob in enumerate(blobs)
        }
    )


def message_in(records: RecordDict) -> Message:
    """The message of some records."""
    held, said = records.get(ARRAYS), records.get(HEADER)
    if not isinstance(held, ArrayRecord) or not isinstance(said, ConfigRecord):
        raise BrokenMessage("this is no message of fedplan: it lacks arrays or a header")
    header = said.get(FIELD)
    if not isinstance(header, bytes):
        raise BrokenMessage("the header of a message must be bytes")
    return Message(header, tuple(held[place].data for place in sorted(held)))
