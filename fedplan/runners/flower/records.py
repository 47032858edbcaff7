# SPDX-License-Identifier: Apache-2.0
"""Records: parcels as Flower's records, each blob one array of bytes.

Flower fetches every array by a request of its own, and its arrays know neither bfloat16 nor
eight-bit floats: to it, tensors are bytes.
"""

from __future__ import annotations

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedplan.parcel import BrokenParcel, Parcel

ARRAYS, HEADER, FIELD = "arrays", "header", "fedplan"


def records_of(parcel: Parcel, arrays: ArrayRecord | None = None) -> RecordDict:
    """A parcel as records; `arrays` are those of its blobs, if they are at hand."""
    said = ConfigRecord({FIELD: parcel.header})
    return RecordDict({ARRAYS: arrays or arrays_of(parcel.blobs), HEADER: said})


def arrays_of(blobs: tuple[bytes, ...]) -> ArrayRecord:
    """Blobs as arrays."""
    return ArrayRecord(
        {
            f"{place:06}": Array("uint8", (len(blob),), "safetensors", blob)
            for place, blob in enumerate(blobs)
        }
    )


def parcel_in(records: RecordDict) -> Parcel:
    """The parcel of some records."""
    held, said = records.get(ARRAYS), records.get(HEADER)
    if not isinstance(held, ArrayRecord) or not isinstance(said, ConfigRecord):
        raise BrokenParcel("this is no message of fedplan: it lacks arrays or a header")
    header = said.get(FIELD)
    if not isinstance(header, bytes):
        raise BrokenParcel("the header of a message must be bytes")
    return Parcel(header, tuple(held[place].data for place in sorted(held)))
