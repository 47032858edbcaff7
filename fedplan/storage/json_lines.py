# SPDX-License-Identifier: Apache-2.0
"""Append-only files of JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.storage.locks import sync_folder


class JsonLinesFile:
    """An append-only file of JSON lines that can be cut back to an earlier length.

    Opening creates the file if it is missing, and truncates it to `length` bytes (default: all).
    Raises FedplanError if the file is shorter, or its first `length` bytes do not have the digest
    `sha256` (if not empty). Attributes `length` and `sha256` describe the valid bytes; store
    `length_and_digest` elsewhere to reopen at this point. For one writer; no lock is taken.
    """

    def __init__(self, file: Path, *, length: int | None = None, sha256: str = "") -> None:
        self.file = file
        if not file.exists():
            file.touch()
            sync_folder(file.parent)
        content = file.read_bytes()
        self.length = len(content) if length is None else length
        if len(content) < self.length:
            raise FedplanError(
                f"{file} is shorter than the {length} bytes it once had: restore it from a backup"
            )
        self._hash = hashlib.sha256(content[: self.length])
        if sha256 and self.sha256 != sha256:
            raise FedplanError(f"{file} was changed since it was written: restore it from a backup")
        if len(content) > self.length:
            os.truncate(file, self.length)

    @property
    def sha256(self) -> str:
        """SHA-256 of all lines, as hex."""
        return self._hash.hexdigest()

    @property
    def length_and_digest(self) -> list[int | str]:
        """`[length, sha256]`, as a list for JSON."""
        return [self.length, self.sha256]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Append one JSON line per mapping and sync to disk; FedplanError if the disk fails.

        Bytes after `length`, left by a failed append, are overwritten.
        """
        content = b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)
        try:
            with self.file.open("r+b") as out:
                out.truncate(self.length)
                out.seek(self.length)
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise FedplanError(
                f"{self.file} cannot be written: {error}; free space, then go on by --resume"
            ) from error
        self.length += len(content)
        self._hash.update(content)


def read_json_lines(file: Path) -> list[dict[str, Any]]:
    """Return each line of a file as a dict; an incomplete last line is left out."""
    content = file.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
