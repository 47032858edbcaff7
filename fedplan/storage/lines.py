# SPDX-License-Identifier: Apache-2.0
"""Lines: a file of JSON lines that only grows."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.storage.locks import synced


class Lines:
    """A file of JSON lines that only grows, and can be taken back to a length it once had.

    `length` and `sha256` are those of all its lines: what a kill or a full disk left behind them is
    cut off before the next is written.
    """

    def __init__(self, file: Path, *, length: int | None = None, sha256: str = "") -> None:
        self.file = file
        if not file.exists():
            file.touch()
            synced(file.parent)
        content = file.read_bytes()
        self.length = len(content) if length is None else length
        if len(content) < self.length:
            raise FedplanError(
                f"{file} is shorter than the {length} bytes it once had: put a copy of it back"
            )
        self._hash = hashlib.sha256(content[: self.length])
        if sha256 and self.sha256 != sha256:
            raise FedplanError(f"{file} was changed since it was written: put a copy of it back")
        if len(content) > self.length:
            os.truncate(file, self.length)

    @property
    def sha256(self) -> str:
        """The digest of all its lines."""
        return self._hash.hexdigest()

    @property
    def mark(self) -> list[int | str]:
        """Its length and its digest, as a list for JSON."""
        return [self.length, self.sha256]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines for good."""
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
                f"{self.file} cannot be written: {error}; make room, then go on by --resume"
            ) from error
        self.length += len(content)
        self._hash.update(content)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, as far as they are whole: the last may be in writing, or cut off."""
    content = file.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
