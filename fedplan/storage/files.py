# SPDX-License-Identifier: Apache-2.0
"""Files: small files that are there whole or not at all, whenever a process or a disk ends."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from fedplan.errors import StoreError
from fedplan.storage.locks import synced


def make_folder(folder: Path) -> None:
    """Have a folder be there, and those above it: what is made is its owner's alone, for good."""
    if folder.is_dir():
        return
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        synced(each.parent)
    folder.mkdir(exist_ok=True)


def put_file(file: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Have a file hold this and nothing else: written beside, synced, then renamed."""
    data = content.encode() if isinstance(content, str) else content
    beside = file.with_name(f".{file.name}.tmp")
    try:
        with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file)
        synced(file.parent)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise StoreError(
            f"{file} cannot be written: {error}; make room, then start again"
        ) from error


def keep_file(file: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """The same, if the file does not hold it already."""
    data = content.encode() if isinstance(content, str) else content
    if not file.is_file() or file.read_bytes() != data:
        put_file(file, data, mode=mode)


def mark_of_file(file: Path) -> list[int | str]:
    """The length of a file and the digest of its bytes, as a list for JSON."""
    content = file.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]
