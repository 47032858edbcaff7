# SPDX-License-Identifier: Apache-2.0
"""Error log of a site: full tracebacks, which never leave the site.

Tracebacks may reveal examples, so they are encrypted if the site has a key.
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
from fedplan.federation.error_codes import encode_code, error_code_of
from fedplan.storage.encryption import Encryption

LOG = "faults.log"
MAX_LOG_BYTES = 4 << 20
"""Size after which the log is renamed to .old: a server may cause errors without end."""
_PURPOSE = "fault of a site"
"""Purpose of the encryption, bound to each line."""


class FaultLog:
    """The error log of a folder; lines are encrypted if `encryption` is given."""

    def __init__(self, folder: Path, encryption: Encryption | None = None) -> None:
        self.folder, self._encryption = folder, encryption

    def append(self, error: BaseException) -> str:
        """Append an error with its traceback and return its code.

        An OSError while writing is ignored, so that the error itself is reported.
        """
        code = error_code_of(error)
        text = "".join(traceback.format_exception(error))
        line = json.dumps({"time": _now(), "code": code, "text": text}).encode()
        if self._encryption is not None:
            line = b64encode(self._encryption.encrypt(line, _PURPOSE))
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._append(line + b"\n")
        return code

    def _append(self, line: bytes) -> None:
        """Append a line to the file; rename the file first if it is too large."""
        file = self.folder / LOG
        if file.exists() and file.stat().st_size > MAX_LOG_BYTES:
            file.replace(file.with_suffix(".old"))
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            # After an incomplete line, which a full disk leaves, a new line starts.
            complete = not size or os.pread(descriptor, 1, size - 1) == b"\n"
            os.write(descriptor, line if complete else b"\n" + line)
        finally:
            os.close(descriptor)


def read_faults(folder: Path, encryption: Encryption | None = None) -> list[str]:
    """Return the errors of a site as text, oldest first.

    A line that is damaged, or encrypted while no key is given, becomes a remark. Raises
    FedplanError if there is no log.
    """
    try:
        lines = (folder / LOG).read_bytes().splitlines()
    except OSError as error:
        raise FedplanError(f"{folder} has no error log: {error}") from error
    return [_format_line(line, encryption) for line in lines]


def _format_line(line: bytes, encryption: Encryption | None) -> str:
    """Return time, code and traceback of a log line, or a remark if it cannot be read."""
    try:
        if not line.startswith(b"{"):
            if encryption is None:
                return "an encrypted line: give the site's key (--key)"
            line = encryption.decrypt(b64decode(line), _PURPOSE)
        fields = json.loads(line)
        return f"{fields['time']} {encode_code(fields['code'])}\n{fields['text']}"
    except (FedplanError, ValueError, KeyError, TypeError) as error:
        return f"a line that cannot be read: {error}"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
