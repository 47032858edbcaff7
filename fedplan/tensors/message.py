# SPDX-License-Identifier: Apache-2.0
"""Messages: what is sent, as bytes, whatever carries it: a header, and tensors in a few blobs.

To carry one takes neither torch nor numpy.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

from fedplan.errors import FedplanError

MOST_BLOBS = 2**16
_HEAD, _SIZE = struct.Struct("<4sI"), struct.Struct("<Q")
_MARK = b"fp01"


class Stream(Protocol):
    """What a message is written to and read from."""

    def read(self, size: int, /) -> bytes: ...
    def write(self, data: bytes, /) -> int: ...
    def flush(self) -> None: ...


class BrokenMessage(FedplanError):
    """Bytes that end too soon, or are no message."""

    code = "message"


@dataclass(frozen=True)
class Message:
    """A header, as `message.pack` writes it, and blobs of tensors."""

    header: bytes
    blobs: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """Every byte of it."""
        return len(self.header) + sum(map(len, self.blobs))

    def write(self, stream: Stream) -> None:
        """Write it so that `read` finds its end."""
        stream.write(_HEAD.pack(_MARK, len(self.blobs)))
        for each in (self.header, *self.blobs):
            stream.write(_SIZE.pack(len(each)))
            stream.write(each)
        stream.flush()

    @staticmethod
    def read(stream: Stream, *, limit: int = 2**40) -> Message:
        """The message that was written to a stream."""
        mark, count = _HEAD.unpack(_exactly(stream, _HEAD.size))
        if mark != _MARK or count > MOST_BLOBS:
            raise BrokenMessage("these bytes are no message")
        found = list[bytes]()
        for _ in range(count + 1):
            (size,) = _SIZE.unpack(_exactly(stream, _SIZE.size))
            limit -= size
            if limit < 0:
                raise BrokenMessage("the message is larger than it may be")
            found.append(_exactly(stream, size))
        return Message(found[0], tuple(found[1:]))


def _exactly(stream: Stream, count: int) -> bytes:
    found = stream.read(count)
    if len(found) != count:
        raise BrokenMessage(f"a message ended after {len(found)} of {count} bytes")
    return found
