# SPDX-License-Identifier: Apache-2.0
"""Encryption: AES-256-GCM with a key from a file, for what a client keeps on its disk.

Every sealing draws a salt and derives a key of its own from it (HKDF-SHA256), so that the chunks'
nonces may simply count. Each chunk is bound to its number, to whether it is the last, and to the
words that say what was sealed: a chunk that is lost, moved or from elsewhere does not open.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedplan.errors import FedplanError, StoreError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK = 64 << 20
"""Bytes that are sealed at a time; what was sealed says its own."""

_MAGIC = b"fedplan sealed 1"
_HEADER = struct.Struct(">16sI32s")
"""The magic, the bytes of a chunk, the salt."""
_LARGEST_CHUNK = 1 << 30
_TAG = 16
_KEY_FILE = re.compile(rb"[0-9a-fA-F]{64}\n?")


class Encryption:
    """A key of 32 bytes, and what it closes and opens.

    `about` says what the data is, such as "tensors 7": it opens only under the same words. `name`
    tells the key from others, and may be seen by all.
    """

    def __init__(self, key: bytes) -> None:
        if len(key) != 32:
            raise StoreError(f"the key has {len(key)} bytes: make one of 32 with new_key_file()")
        self._key = key
        self.name = _derived(key, b"", b"fedplan: name of the key")[:8].hex()

    @classmethod
    def from_file(cls, path: Path) -> Encryption:
        """The seal of a key file: 32 bytes or 64 hex digits, that only its owner may read."""
        content = _secret(path)
        if len(content) == 32:
            return cls(content)
        if not _KEY_FILE.fullmatch(content):
            raise StoreError(
                f"{path} holds no key, which is 32 bytes or 64 hex digits: name the right file, "
                "or make one with new_key_file()"
            )
        return cls(bytes.fromhex(content.decode()))

    def close(self, data: bytes, about: str) -> bytes:
        """The data, sealed."""
        return b"".join(self.pieces(data, about))

    def pieces(self, data: bytes, about: str) -> Iterator[bytes]:
        """What `close` returns, piece by piece: for what is too large to be held twice."""
        size, salt = CHUNK, os.urandom(32)
        header = _HEADER.pack(_MAGIC, size, salt)
        yield header
        cipher, view = self._cipher(salt), memoryview(data)
        for place in _places(len(data), size):
            chunk = view[place.start : place.start + size]
            yield cipher.encrypt(place.nonce, chunk, header + place.bound(about))

    def open(self, data: bytes, about: str) -> bytes:
        """The data that was sealed under these words. Any damage is a StoreError."""
        header, body = data[: _HEADER.size], memoryview(data)[_HEADER.size :]
        size, salt = _read(header, about)
        cipher, step = self._cipher(salt), size + _TAG
        from cryptography.exceptions import InvalidTag

        try:
            return b"".join(
                cipher.decrypt(
                    place.nonce,
                    body[place.start : place.start + step],
                    header + place.bound(about),
                )
                for place in _places(len(body), step)
            )
        except InvalidTag as error:
            raise StoreError(
                f"the {about} does not open: it is damaged, or was sealed as something else or "
                f"with another key than {self.name}; put a copy of it back, or give that key"
            ) from error

    def _cipher(self, salt: bytes) -> AESGCM:
        with _installed():
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        return AESGCM(_derived(self._key, salt, b"fedplan: sealed data"))


def _read(header: bytes, about: str) -> tuple[int, bytes]:
    """The bytes of a chunk, and the salt."""
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise StoreError(f"the {about} is not sealed, or damaged: put a copy of it back")
    _, size, salt = _HEADER.unpack(header)
    if not 0 < size <= _LARGEST_CHUNK:
        raise StoreError(f"the {about} is damaged (chunks of {size}): put a copy of it back")
    return size, salt


@dataclass(frozen=True)
class _Place:
    """Where a chunk stands."""

    number: int
    start: int
    last: bool

    @property
    def nonce(self) -> bytes:
        return self.number.to_bytes(12, "big")

    def bound(self, about: str) -> bytes:
        return struct.pack(">Q?", self.number, self.last) + about.encode()


def _places(length: int, size: int) -> Iterator[_Place]:
    # Nothing is one chunk, too: else its loss would not be seen.
    for number, start in enumerate(range(0, max(length, 1), size)):
        yield _Place(number, start, start + size >= length)


def new_key_file(path: Path) -> None:
    """Make a key file that only its owner may read. Who loses it loses what it seals."""
    try:
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise StoreError(f"no key file was made: {error}; name a new file in a folder") from error
    try:
        with os.fdopen(opened, "wb") as file:
            file.write(os.urandom(32).hex().encode() + b"\n")
            file.flush()
            os.fsync(opened)
        _sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise StoreError(f"no key file was made: {error}; free space or mend the disk") from error


def _secret(path: Path) -> bytes:
    """The first bytes of a plain file that nobody but its owner may read."""
    try:
        with open(path, "rb", opener=_unblocked) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise StoreError(f"{path} is no plain file: name a key file")
            if mode & 0o077:
                raise StoreError(
                    f"others may read the key in {path} (mode {mode & 0o777:04o}): "
                    f"chmod 600 {path}, and make another if they may have read it"
                )
            return file.read(100)
    except OSError as error:
        raise StoreError(f"the key cannot be read: {error}; name a key file of yours") from error


def _unblocked(file: str, flags: int) -> int:
    """Open a file, and do not wait for a writer if it is a pipe."""
    return os.open(file, flags | os.O_NONBLOCK)


def _derived(key: bytes, salt: bytes, use: bytes) -> bytes:
    with _installed():
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    return HKDF(SHA256(), 32, salt, use).derive(key)


@contextmanager
def _installed() -> Generator[None]:
    try:
        yield
    except ImportError as error:
        raise FedplanError(
            "to seal takes the package cryptography: pip install 'fedplan[flower]'"
        ) from error


def _sync(folder: Path) -> None:
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
