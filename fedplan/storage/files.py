# SPDX-License-Identifier: Apache-2.0
"""Files: small files that are there whole or not at all, whenever a process or a disk ends."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from glob import escape
from pathlib import Path
from secrets import token_hex

from fedplan.errors import StoreError
from fedplan.storage.locks import synced

STALE = 3600.0
"""Seconds after which nobody writes a small file any more."""


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
    """Have a file hold this and nothing else: written beside, synced, then renamed.

    The name beside it is new each time: whoever may write into the folder cannot have it point
    elsewhere.
    """
    data = content.encode() if isinstance(content, str) else content
    if not file.name or (file.exists() and not file.is_file()):
        what = "it is a folder" if file.is_dir() else "it is no plain file"
        raise StoreError(f"{file} cannot be written: {what}; name a file")
    beside = file.with_name(f".{file.name}.{token_hex(8)}.tmp")
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(beside, "wb", opener=lambda name, _: os.open(name, new, mode)) as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file)
        _swept(file)
        synced(file.parent)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise StoreError(f"{file} cannot be written: {error}; {_remedy(file)}") from error


def _swept(file: Path) -> None:
    """Take away what kills have left beside a file, unless it may still be in writing."""
    for left in file.parent.glob(f".{escape(file.name)}.*.tmp"):
        with suppress(OSError):
            if time.time() - left.lstat().st_mtime > STALE:
                left.unlink()


def _remedy(file: Path) -> str:
    """What helps where a file cannot be written."""
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}: make it, or name another"
    return "make room, or see that you may write there, then start again"


def keep_file(file: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """The same, if the file does not hold it already."""
    data = content.encode() if isinstance(content, str) else content
    if not file.is_file() or file.read_bytes() != data:
        put_file(file, data, mode=mode)


def mark_of_file(file: Path) -> list[int | str]:
    """The length of a file and the digest of its bytes, as a list for JSON."""
    content = file.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]
