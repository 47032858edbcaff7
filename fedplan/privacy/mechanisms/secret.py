# SPDX-License-Identifier: Apache-2.0
"""Secret: 32 bytes that only the server, or the site, has, and keys that follow from them.

Whoever has the secret can take the noise off every release. It stays in a file of its own, that
only its owner may read, and in no checkpoint that leaves it. With a seal the file is sealed.
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
from fedplan.storage.locks import synced

SIZE = 32
_ABOUT = "secret"


def secret_of(file: Path, seal: Encryption | None = None) -> bytes:
    """The secret in a file; one is drawn from the system's source if there is no file."""
    try:
        if not file.exists():
            _make(file, seal)
        synced(file.parent)
    except OSError as error:
        raise PrivacyError(f"the secret {file} cannot be used: {error}") from error
    return read_secret(file, seal)


def read_secret(file: Path, seal: Encryption | None = None) -> bytes:
    """The secret in a file that is there. Nothing is drawn, and nothing on the disk is changed."""
    try:
        mode = file.stat().st_mode
        content = file.read_bytes()
    except OSError as error:
        raise PrivacyError(f"the secret {file} cannot be used: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise PrivacyError(f"others may read the secret {file}: chmod 600 it, or begin anew")
    found = content if seal is None else seal.open(content, _ABOUT)
    if len(found) != SIZE:
        raise PrivacyError(f"{file} must have {SIZE} bytes, not {len(found)}: put a copy back")
    return found


def checked(secret: bytes) -> bytes:
    """A secret of the right size, or an error."""
    if len(secret) != SIZE:
        raise PrivacyError(f"a secret has {SIZE} bytes, not {len(secret)}: use secret_of()")
    return secret


def derived(secret: bytes, purpose: str, *words: str | int | bytes) -> bytes:
    """A key for one purpose: HMAC-SHA256 of the words, each with its type and length."""
    said = hmac.new(checked(secret), purpose.encode() + b"\0", hashlib.sha256)
    for word in words:
        content = word if isinstance(word, bytes) else str(word).encode()
        said.update(f"{type(word).__name__} {len(content)}:".encode() + content)
    return said.digest()


def _make(file: Path, seal: Encryption | None) -> None:
    """Write a new secret: the file is there whole or not at all, and the first one stays."""
    drawn = os.urandom(SIZE)
    opened, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        os.write(opened, drawn if seal is None else seal.close(drawn, _ABOUT))
        os.fsync(opened)
        with suppress(FileExistsError):
            os.link(temporary, file)
    finally:
        os.close(opened)
        os.unlink(temporary)
