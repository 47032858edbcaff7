# SPDX-License-Identifier: Apache-2.0
"""Secret: 32 bytes that only the server has, and keys that follow from them.

Whoever has the secret can take the noise off every release. It stays in a file of its own, that
only its owner may read, and in no checkpoint that leaves the server.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from pathlib import Path

from fedplan.privacy.errors import PrivacyError

SIZE = 32


def secret_of(file: Path) -> bytes:
    """The secret in a file; one is drawn from the system's source if there is no file."""
    try:
        if not file.exists():
            _make(file)
        mode = file.stat().st_mode
        content = file.read_bytes()
    except OSError as error:
        raise PrivacyError(f"the secret {file} cannot be used: {error}") from error
    if stat.S_IMODE(mode) & 0o077:
        raise PrivacyError(f"others may read the secret {file}: chmod 600 it, or begin anew")
    return checked(content)


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


def _make(file: Path) -> None:
    """Write a new secret: the file is there whole or not at all."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.unlink(missing_ok=True)
    opened = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(opened, os.urandom(SIZE))
        os.fsync(opened)
    finally:
        os.close(opened)
    temporary.rename(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
