# SPDX-License-Identifier: Apache-2.0
"""Faults: what went wrong at a site, in full, in a log that stays there.

The text of an error may tell of rows: with a key, it is sealed like all that the site keeps.
"""

from __future__ import annotations

import json
import os
import traceback
from base64 import b64decode, b64encode
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.federation.codes import code_of, told
from fedplan.storage.encryption import Encryption

LOG = "faults.log"
LARGEST = 4 << 20
"""Bytes after which a log begins anew, beside the one before: a server may ask without end."""
_ABOUT = "fault of a site"


class FaultLog:
    """The log of a folder."""

    def __init__(self, folder: Path, seal: Encryption | None = None) -> None:
        self.folder, self._seal = folder, seal

    def note(self, error: BaseException) -> str:
        """Write an error down, and say its code. A disk that is full is no other error."""
        code = code_of(error)
        text = "".join(traceback.format_exception(error))
        line = json.dumps({"time": _now(), "code": code, "text": text}).encode()
        if self._seal is not None:
            line = b64encode(self._seal.close(line, _ABOUT))
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._append(line + b"\n")
        return code

    def _append(self, line: bytes) -> None:
        file = self.folder / LOG
        if file.exists() and file.stat().st_size > LARGEST:
            file.replace(file.with_suffix(".old"))
        opened = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(opened).st_size
            # A full disk cuts a line: the next one is not to be lost with it.
            whole = not size or os.pread(opened, 1, size - 1) == b"\n"
            os.write(opened, line if whole else b"\n" + line)
        finally:
            os.close(opened)


def read_faults(folder: Path, seal: Encryption | None = None) -> list[str]:
    """What went wrong at a site, the oldest first."""
    try:
        lines = (folder / LOG).read_bytes().splitlines()
    except OSError as error:
        raise FedplanError(f"{folder} has no log of faults: {error}") from error
    return [_read(line, seal) for line in lines]


def _read(line: bytes, seal: Encryption | None) -> str:
    try:
        if not line.startswith(b"{"):
            if seal is None:
                return "a sealed line: give the site's key (--key)"
            line = seal.open(b64decode(line), _ABOUT)
        found = json.loads(line)
        return f"{found['time']} {told(found['code'])}\n{found['text']}"
    except (FedplanError, ValueError, KeyError, TypeError) as error:
        return f"a line that cannot be read: {error}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
