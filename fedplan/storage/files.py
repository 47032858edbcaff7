# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of small files, and folders that are synced to disk."""

from __future__ import annotations

import hashlib
import os
import time
from contextlib import suppress
from glob import escape
from pathlib import Path
from secrets import token_hex

from fedplan.errors import StoreError
from fedplan.storage.errors import wrap_disk_errors
from fedplan.storage.locks import sync_folder

STALE = 3600.0
"""Age in seconds after which a temporary file is a leftover of a killed process."""


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700, each synced to disk.

    An existing folder is not changed. Raises StoreError if a folder cannot be created.
    """
    with wrap_disk_errors(f"{folder} cannot be created", "name a folder that you may write to"):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path.parent)
        folder.mkdir(exist_ok=True)


def write_atomic(file: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Create or replace a file atomically: write a temporary file, sync it, rename it.

    `mode` is the permission of the new file, before the umask. The folder must exist. Also removes
    temporary files of this file that killed processes left over an hour ago. Raises StoreError if
    the path is not a regular file or cannot be written; the file is then the old one or, if only
    the folder could not be synced, the new one.
    """
    data = content.encode() if isinstance(content, str) else content
    if not file.name or (file.exists() and not file.is_file()):
        problem = "it is a folder" if file.is_dir() else "it is not a regular file"
        raise StoreError(f"{file} cannot be written: {problem}; name a file")
    # A random name, so that nobody can have put a symbolic link there.
    temporary = file.with_name(f".{file.name}.{token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        with open(temporary, "wb", opener=lambda name, _: os.open(name, flags, mode)) as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
        for leftover in file.parent.glob(f".{escape(file.name)}.*.tmp"):
            with suppress(OSError):
                if time.time() - leftover.lstat().st_mtime > STALE:
                    leftover.unlink()
        sync_folder(file.parent)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        remedy = "free space, or check that you may write there, then start again"
        if not file.parent.is_dir():
            remedy = f"there is no folder {file.parent}: make it, or name another"
        raise StoreError(f"{file} cannot be written: {error}; {remedy}") from error


def write_if_changed(file: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Call `write_atomic` if the file is missing or its content differs; else touch nothing."""
    data = content.encode() if isinstance(content, str) else content
    if not file.is_file() or file.read_bytes() != data:
        write_atomic(file, data, mode=mode)


def file_size_and_digest(file: Path) -> list[int | str]:
    """Return `[size in bytes, SHA-256 as hex]` of a file, as a list for JSON."""
    content = file.read_bytes()
    return [len(content), hashlib.sha256(content).hexdigest()]
