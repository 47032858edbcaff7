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
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from fedplan.errors import StoreError, needs_extra
from fedplan.storage.locks import sync_folder

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK = 64 << 20
"""Plaintext bytes per chunk for new messages; a message stores its chunk size in its header."""

_MAGIC = b"fedplan sealed 1"
_HEADER = struct.Struct(">16sI32s")
"""Magic, chunk size in bytes, salt."""
_LARGEST_CHUNK = 1 << 30
_TAG = 16
_KEY_FILE = re.compile(r"([0-9a-fA-F]{64})(?: ([0-9a-f]{16}))?\n?")
"""A key in hex digits, and its `key_id`, which a damaged key does not have."""


class Encryption:
    """Encrypts and decrypts bytes (AES-256-GCM) with one 32-byte `key`; needs `cryptography`.

    Make a key file with `new_key_file`, load it with `Encryption.from_file`. `label` names the
    content, such as "tensors 7"; `decrypt` needs the label that was used to encrypt. `key_id`
    identifies the key and is not secret. Raises FedplanError if the package is missing, StoreError
    if the key does not have 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        """Raise StoreError if the key does not have 32 bytes."""
        if len(key) != 32:
            raise StoreError(f"the key has {len(key)} bytes: make one of 32 with new_key_file()")
        self._key = key
        self.key_id = _derive_key(key, b"", b"fedplan: name of the key")[:8].hex()

    @classmethod
    def from_file(cls, path: Path) -> Encryption:
        """Read a key file of 32 raw bytes or 64 hex digits, which the `key_id` may follow.

        Raises StoreError if the file cannot be read, is not a regular file, holds no key or a
        damaged one, or its mode gives other users any access.
        """
        try:
            # Without blocking, so that a named pipe does not wait for a writer.
            with open(path, "rb", opener=lambda p, mode: os.open(p, mode | os.O_NONBLOCK)) as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise StoreError(f"{path} is not a regular file: name a key file")
                if mode & 0o077:
                    raise StoreError(
                        f"others may read the key in {path} (mode {mode & 0o777:04o}): "
                        f"chmod 600 {path}, and make another if they may have read it"
                    )
                content = file.read(100)
        except OSError as error:
            raise StoreError(
                f"the key cannot be read: {error}; name a key file of yours"
            ) from error
        if len(content) == 32:
            return cls(content)
        if not (parts := _KEY_FILE.fullmatch(content.decode("latin-1"))):
            raise StoreError(
                f"{path} holds no key, which is 32 bytes or 64 hex digits: name the right file, "
                "or make one with new_key_file()"
            )
        encryption, key_id = cls(bytes.fromhex(parts[1])), parts[2]
        if key_id not in (None, encryption.key_id):
            raise StoreError(f"the key {key_id} in {path} is damaged: restore a copy of the file")
        return encryption

    def encrypt(self, data: bytes, label: str) -> bytes:
        """Return header (salt, chunk size) and ciphertext of `data`, about as long as `data`."""
        return b"".join(self.encrypt_chunks(data, label))

    def encrypt_chunks(self, data: bytes, label: str) -> Iterator[bytes]:
        """Yield the result of `encrypt` in pieces of about 64 MiB, to write it with little memory.

        Each call uses a new random salt. `data` is not copied; `label` must be given to `decrypt`.
        """
        size, salt = CHUNK, os.urandom(32)
        header = _HEADER.pack(_MAGIC, size, salt)
        yield header
        cipher, view = self._cipher(salt), memoryview(data)
        for start, nonce, associated in _chunks(len(data), size, header, label):
            yield cipher.encrypt(nonce, view[start : start + size], associated)

    def decrypt(self, data: bytes, label: str) -> bytes:
        """Return the plaintext of `data`, the whole result of `encrypt` with the same label.

        Raises StoreError if `data` is damaged, incomplete, or was encrypted under another label or
        with another key.
        """
        from cryptography.exceptions import InvalidTag

        header, body = data[: _HEADER.size], memoryview(data)[_HEADER.size :]
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise StoreError(f"the {label} is not encrypted, or damaged: restore it from a copy")
        _, size, salt = _HEADER.unpack(header)
        if not 0 < size <= _LARGEST_CHUNK:
            raise StoreError(f"the {label} is damaged (chunks of {size}): restore it from a copy")
        cipher, step = self._cipher(salt), size + _TAG
        try:
            return b"".join(
                cipher.decrypt(nonce, body[start : start + step], associated)
                for start, nonce, associated in _chunks(len(body), step, header, label)
            )
        except InvalidTag as error:
            raise StoreError(
                f"the {label} cannot be decrypted: it is damaged, or was encrypted as something "
                f"else or with another key than {self.key_id}; restore it from a copy, or give "
                "that key"
            ) from error

    def _cipher(self, salt: bytes) -> AESGCM:
        with needs_extra("encryption"):
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
        return AESGCM(_derive_key(self._key, salt, b"fedplan: sealed data"))


def _chunks(
    length: int, size: int, header: bytes, label: str
) -> Iterator[tuple[int, bytes, bytes]]:
    """Yield (start, nonce, associated data) of each chunk of `size` in a message of `length` bytes.

    Empty data is one empty chunk, so that its removal is detected.
    """
    for number, start in enumerate(range(0, max(length, 1), size)):
        last = start + size >= length
        associated = header + struct.pack(">Q?", number, last) + label.encode()
        yield start, number.to_bytes(12, "big"), associated


def new_key_file(path: Path) -> None:
    """Write a new random key to the new file `path` with mode 600, synced to disk.

    Raises StoreError if the file exists (it is kept) or cannot be written, FedplanError without the
    package `cryptography`. Data encrypted with a lost key file cannot be recovered.
    """
    key = os.urandom(32)
    # Without its id, a key that is damaged before its first use would be another key.
    content = f"{key.hex()} {Encryption(key).key_id}\n".encode()
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise StoreError(f"no key file was made: {error}; name a new file in a folder") from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            path.unlink()
        raise StoreError(f"no key file was made: {error}; free space or mend the disk") from error


def _derive_key(key: bytes, salt: bytes, purpose: bytes) -> bytes:
    with needs_extra("encryption"):
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    return HKDF(SHA256(), 32, salt, purpose).derive(key)
