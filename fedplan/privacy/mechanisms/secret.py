# SPDX-License-Identifier: Apache-2.0
"""Secret of a server or site: 32 random bytes in a file, and the keys derived from them.

With the secret, the noise of every release can be removed. It is stored in a file that only its
owner may read, encrypted if an `Encryption` is given, and in no checkpoint.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from fedplan.privacy.errors import PrivacyError
from fedplan.storage.encryption import Encryption
from fedplan.storage.locks import sync_folder

SECRET_SIZE = 32
"""Bytes of a secret."""
_ABOUT = "secret"


def load_or_create_secret(file: Path, encryption: Encryption | None = None) -> bytes:
    """Read the secret in a file; if there is no file, write a new random secret first.

    encryption: encrypts the file's content; None: plain bytes. The folder must exist. Creation is
    atomic: of several processes, all get the same secret. Raises a PrivacyError if the file cannot
    be written, and as `read_secret` does.
    """
    try:
        if not file.exists():
            secret = os.urandom(SECRET_SIZE)
            content = secret if encryption is None else encryption.encrypt(secret, _ABOUT)
            descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
            try:
                os.write(descriptor, content)
                os.fsync(descriptor)
                with suppress(FileExistsError):
                    os.link(temporary, file)
            finally:
                os.close(descriptor)
                os.unlink(temporary)
        sync_folder(file.parent)
    except OSError as error:
        raise PrivacyError(f"the secret {file} cannot be used: {error}") from error
    return read_secret(file, encryption)


def read_secret(file: Path, encryption: Encryption | None = None) -> bytes:
    """Read the secret in an existing file, decrypted if an encryption is given. Writes nothing.

    Raises a PrivacyError if the file is missing, open to other users, or of the wrong size, and
    StoreError if the content cannot be decrypted.
    """
    try:
        mode = file.stat().st_mode
        content = file.read_bytes()
    except OSError as error:
        raise PrivacyError(f"the secret {file} cannot be used: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise PrivacyError(f"others may read the secret {file}: chmod 600 it, or start a new run")
    secret = content if encryption is None else encryption.decrypt(content, _ABOUT)
    if len(secret) != SECRET_SIZE:
        raise PrivacyError(
            f"{file} must have {SECRET_SIZE} bytes, not {len(secret)}: restore a copy"
        )
    return secret


def derive_key(secret: bytes, purpose: str, *words: str | int | bytes) -> bytes:
    """Derive a 32-byte key for one purpose: HMAC-SHA256 of the words under the secret.

    Each word goes in with type and length: different lists give different keys. Raises a
    PrivacyError if the secret has not 32 bytes.
    """
    if len(secret) != SECRET_SIZE:
        raise PrivacyError(
            f"a secret has {SECRET_SIZE} bytes, not {len(secret)}: use load_or_create_secret()"
        )
    mac = hmac.new(secret, purpose.encode() + b"\0", hashlib.sha256)
    for word in words:
        content = word if isinstance(word, bytes) else str(word).encode()
        mac.update(f"{type(word).__name__} {len(content)}:".encode() + content)
    return mac.digest()
