# SPDX-License-Identifier: Apache-2.0
"""AES-256-GCM encryption with a key from a file, for a client's data on disk.

Each message derives a key of its own from a random salt (HKDF-SHA256), so chunk nonces can be
counters. The associated data of a chunk is its number, whether it is the last one, and a label of
the content: a chunk that was dropped, reordered or copied from another message fails to decrypt.
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
"""Plaintext bytes per chunk for new messages; a message stores its chunk size in its header."""

_MAGIC = b"fedplan sealed 1"
_HEADER = struct.Struct(">16sI32s")
"""Magic, chunk size in bytes, salt."""
_LARGEST_CHUNK = 1 << 30
_TAG = 16
_KEY_FILE = re.compile(rb"[0-9a-fA-F]{64}\n?")


class Encryption:
    """Encrypts and decrypts bytes with one 32-byte key.

    `label` names the content, such as "tensors 7"; decryption needs the same label. `key_id`
    identifies the key and is not secret.
    """

    def __init__(self, key: bytes) -> None:
        """Raise StoreError if the key does not have 32 bytes."""
        if len(key) != 32:
            raise StoreError(f"the key has {len(key)} bytes: make one of 32 with new_key_file()")
        self._key = key
        self.key_id = _derive_key(key, b"", b"fedplan: name of the key")[:8].hex()

    @classmethod
    def from_file(cls, path: Path) -> Encryption:
        """Read a key file of 32 raw bytes or 64 hex digits.

        Raises StoreError if the file cannot be read, holds no key, or other users may read it.
        """
        content = _read_secret(path)
        if len(content) == 32:
            return cls(content)
        if not _KEY_FILE.fullmatch(content):
            raise StoreError(
                f"{path} holds no key, which is 32 bytes or 64 hex digits: name the right file, "
                "or make one with new_key_file()"
            )
        return cls(bytes.fromhex(content.decode()))

    def encrypt(self, data: bytes, label: str) -> bytes:
        """Encrypt data under a label; the result includes the header with salt and chunk size."""
        return b"".join(self.encrypt_chunks(data, label))

    def encrypt_chunks(self, data: bytes, label: str) -> Iterator[bytes]:
        """Yield the result of `encrypt` piece by piece, so that it need not fit in memory."""
        size, salt = CHUNK, os.urandom(32)
        header = _HEADER.pack(_MAGIC, size, salt)
        yield header
        cipher, view = self._cipher(salt), memoryview(data)
        for chunk in _chunks(len(data), size):
            plaintext = view[chunk.start : chunk.start + size]
            yield cipher.encrypt(chunk.nonce, plaintext, header + chunk.associated_data(label))

    def decrypt(self, data: bytes, label: str) -> bytes:
        """Return the plaintext of `encrypt`. Raises StoreError on damage, wrong label or key."""
        header, body = data[: _HEADER.size], memoryview(data)[_HEADER.size :]
        size, salt = _parse_header(header, label)
        cipher, step = self._cipher(salt), size + _TAG
        from cryptography.exceptions import InvalidTag

        try:
            return b"".join(
                cipher.decrypt(
                    chunk.nonce,
                    body[chunk.start : chunk.start + step],
                    header + chunk.associated_data(label),
                )
                for chunk in _chunks(len(body), step)
            )
        except InvalidTag as error:
            raise StoreError(
                f"the {label} cannot be decrypted: it is damaged, or was encrypted as something "
                f"else or with another key than {self.key_id}; restore it from a copy, or give "
                "that key"
            ) from error

    def _cipher(self, salt: bytes) -> AESGCM:
        with _require_cryptography():
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        return AESGCM(_derive_key(self._key, salt, b"fedplan: sealed data"))


def _parse_header(header: bytes, label: str) -> tuple[int, bytes]:
    """Return chunk size and salt of an encrypted message; StoreError if the header is invalid."""
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise StoreError(f"the {label} is not encrypted, or damaged: restore it from a copy")
    _, size, salt = _HEADER.unpack(header)
    if not 0 < size <= _LARGEST_CHUNK:
        raise StoreError(f"the {label} is damaged (chunks of {size}): restore it from a copy")
    return size, salt


@dataclass(frozen=True)
class _Chunk:
    """Number of a chunk, its first byte, and whether it is the last."""

    number: int
    start: int
    last: bool

    @property
    def nonce(self) -> bytes:
        return self.number.to_bytes(12, "big")

    def associated_data(self, label: str) -> bytes:
        return struct.pack(">Q?", self.number, self.last) + label.encode()


def _chunks(length: int, size: int) -> Iterator[_Chunk]:
    # Empty data is one empty chunk, so that its removal is detected.
    for number, start in enumerate(range(0, max(length, 1), size)):
        yield _Chunk(number, start, start + size >= length)


def new_key_file(path: Path) -> None:
    """Write a new random key to a file with mode 600, and sync it to disk.

    Raises StoreError if the file exists or cannot be written. Without the key file the data
    encrypted with it is lost.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise StoreError(f"no key file was made: {error}; name a new file in a folder") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(32).hex().encode() + b"\n")
            file.flush()
            os.fsync(descriptor)
        _sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise StoreError(f"no key file was made: {error}; free space or mend the disk") from error


def _read_secret(path: Path) -> bytes:
    """Return the first 100 bytes of a regular file.

    Raises StoreError if it cannot be read, is not a regular file, or others have access to it.
    """
    try:
        with open(path, "rb", opener=_open_nonblocking) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise StoreError(f"{path} is not a regular file: name a key file")
            if mode & 0o077:
                raise StoreError(
                    f"others may read the key in {path} (mode {mode & 0o777:04o}): "
                    f"chmod 600 {path}, and make another if they may have read it"
                )
            return file.read(100)
    except OSError as error:
        raise StoreError(f"the key cannot be read: {error}; name a key file of yours") from error


def _open_nonblocking(file: str, flags: int) -> int:
    """Open a file without blocking, so that a named pipe does not wait for a writer."""
    return os.open(file, flags | os.O_NONBLOCK)


def _derive_key(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    with _require_cryptography():
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    return HKDF(SHA256(), 32, salt, purpose).derive(key)


@contextmanager
def _require_cryptography() -> Generator[None]:
    """Turn an ImportError of the body into a FedplanError with the install command."""
    try:
        yield
    except ImportError as error:
        raise FedplanError(
            "encryption needs the package cryptography: pip install 'fedplan[flower]'"
        ) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
