# SPDX-License-Identifier: Apache-2.0
"""Message: a header and blobs of bytes, the unit that transports carry.

This module needs neither torch nor numpy.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

from fedplan.errors import FedplanError

MAX_BLOBS = 2**16
"""Most blobs of a message."""
_HEAD, _SIZE = struct.Struct("<4sI"), struct.Struct("<Q")
_MAGIC = b"fp01"


class Stream(Protocol):
    """Binary stream with `read`, `write` and `flush`, such as a pipe, which carries messages."""

    def read(self, size: int, /) -> bytes: ...
    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...


class BrokenMessage(FedplanError):
    """Bytes that are truncated or are not a message."""

    code = "message"


@dataclass(frozen=True)
class Message:
    """A header and blobs of bytes; `write` and `read` transfer a message over a binary stream.

    `serialization.pack_message` makes messages of a JSON header and tensors.
    """

    header: bytes
    blobs: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of header and blobs."""
        return len(self.header) + sum(map(len, self.blobs))

    def write(self, stream: Stream) -> None:
        """Write the message with its lengths, and flush the stream."""
        stream.write(_HEAD.pack(_MAGIC, len(self.blobs)))
        for part in (self.header, *self.blobs):
            stream.write(_SIZE.pack(len(part)))
            stream.write(part)
        stream.flush()

    @staticmethod
    def read(stream: Stream, *, limit: int = 2**40) -> Message:
        """Read one message from a stream.

        Raises BrokenMessage if the bytes are not a message, end early, or exceed `limit` bytes.
        """
        magic, count = _HEAD.unpack(_read_exactly(stream, _HEAD.size))
        if magic != _MAGIC or count > MAX_BLOBS:
            raise BrokenMessage("these bytes are not a message")
        parts = list[bytes]()
        for _ in range(count + 1):
            (size,) = _SIZE.unpack(_read_exactly(stream, _SIZE.size))
            limit -= size
            if limit < 0:
                raise BrokenMessage("the message is larger than its limit")
            parts.append(_read_exactly(stream, size))
        return Message(parts[0], tuple(parts[1:]))


def _read_exactly(stream: Stream, count: int) -> bytes:
    data = stream.read(count)
    if len(data) != count:
        raise BrokenMessage(f"a message ended after {len(data)} of {count} bytes")
    return data
