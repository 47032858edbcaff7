# SPDX-License-Identifier: Apache-2.0
"""Named tensors: exact sums, compression, serialization, digests."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.tensors.codecs import Codec, CodecError
    from fedplan.tensors.compression import parse_codec
    from fedplan.tensors.message import BrokenMessage, Message
    from fedplan.tensors.named import Batch, Tensors, digest, digests
    from fedplan.tensors.serialization import (
        SerializationError,
        pack,
        pack_message,
        unpack,
        unpack_message,
    )
    from fedplan.tensors.sums import ExactSum, SumError

__all__ = [
    "Batch",
    "BrokenMessage",
    "ExactSum",
    "Message",
    "SerializationError",
    "SumError",
    "Tensors",
    "Codec",
    "CodecError",
    "digest",
    "digests",
    "pack",
    "pack_message",
    "parse_codec",
    "unpack",
    "unpack_message",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "codecs": "Codec CodecError",
        "message": "BrokenMessage Message",
        "named": "Batch Tensors digest digests",
        "serialization": "SerializationError pack pack_message unpack unpack_message",
        "sums": "ExactSum SumError",
        "compression": "parse_codec",
    },
)
