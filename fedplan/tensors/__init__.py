# SPDX-License-Identifier: Apache-2.0
"""Named tensors: exact sums, codecs, bytes, digests."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.tensors.codecs import Wire, WireError
    from fedplan.tensors.message import BrokenMessage, Message
    from fedplan.tensors.named import Batch, Tensors, digest, digests
    from fedplan.tensors.serialization import SerializationError, pack, packed, unpack, unpacked
    from fedplan.tensors.sums import ExactSum, SumError
    from fedplan.tensors.wire import parse_wire

__all__ = [
    "Batch",
    "BrokenMessage",
    "ExactSum",
    "Message",
    "SerializationError",
    "SumError",
    "Tensors",
    "Wire",
    "WireError",
    "digest",
    "digests",
    "pack",
    "packed",
    "parse_wire",
    "unpack",
    "unpacked",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "codecs": "Wire WireError",
        "message": "BrokenMessage Message",
        "named": "Batch Tensors digest digests",
        "serialization": "SerializationError pack packed unpack unpacked",
        "sums": "ExactSum SumError",
        "wire": "parse_wire",
    },
)
