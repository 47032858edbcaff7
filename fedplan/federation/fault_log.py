# SPDX-License-Identifier: Apache-2.0
"""Error log of a site: full tracebacks, which never leave the site.

Tracebacks may reveal examples, so they are encrypted if the site has a key.
"""

from __future__ import annotations

import json
import traceback
from base64 import b64decode, b64encode
from contextlib import suppress
from pathlib import Path

from fedplan.errors import FedplanError, StoreError
from fedplan.federation.error_codes import encode_code, error_code_of
from fedplan.storage.append_log import AppendLog
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import make_folder
from fedplan.storage.logs import utc_now

LOG = "faults.log"
MAX_LOG_BYTES = 4 << 20
"""Size after which the log is renamed to .old: a server may cause errors without end."""
_PURPOSE = "fault of a site"
"""Purpose of the encryption, bound to each line."""


class FaultLog:
    """Append-only error log of a site in `folder`/faults.log.

    `encryption`: encrypts each line; None writes plain JSON. The folder is created by the first
    `append`. Above 4 MiB the file is renamed to faults.old, over an earlier one.
    """

    def __init__(self, folder: Path, encryption: Encryption | None = None) -> None:
        self.folder, self._encryption = folder, encryption

    def append(self, error: BaseException) -> str:
        """Append the time, error code and traceback of an error, and return the error code.

        A disk error while writing is ignored, so that the caller can still report the error.
        """
        code = error_code_of(error)
        text = "".join(traceback.format_exception(error))
        line = {"time": utc_now(), "code": code, "text": text}
        if self._encryption is not None:
            encrypted = self._encryption.encrypt(json.dumps(line).encode(), _PURPOSE)
            line = {"encrypted": b64encode(encrypted).decode()}
        with suppress(OSError, StoreError):
            make_folder(self.folder)
            file = self.folder / LOG
            if file.exists() and file.stat().st_size > MAX_LOG_BYTES:
                file.replace(file.with_suffix(".old"))
            AppendLog(file).append(line)
        return code


def read_faults(folder: Path, encryption: Encryption | None = None) -> list[str]:
    """Return the errors in a site folder's log as text (time, code, traceback), oldest first.

    The renamed older log is not read. A line that is damaged, or encrypted while `encryption` is
    None, becomes a remark. Raises FedplanError if there is no log.
    """
    try:
        lines = (folder / LOG).read_bytes().splitlines()
    except OSError as error:
        raise FedplanError(f"{folder} has no error log: {error}") from error
    texts = list[str]()
    for line in lines:
        try:
            fields = json.loads(line)
            if "encrypted" in fields:
                if encryption is None:
                    texts.append("an encrypted line: give the site's key (--key)")
                    continue
                fields = json.loads(encryption.decrypt(b64decode(fields["encrypted"]), _PURPOSE))
            texts.append(f"{fields['time']} {encode_code(fields['code'])}\n{fields['text']}")
        except (FedplanError, ValueError, KeyError, TypeError) as error:
            texts.append(f"a line that cannot be read: {error}")
    return texts
