# SPDX-License-Identifier: Apache-2.0
"""Remains: what must lie beside a world before a run goes on: else nothing is cut or drawn."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.federation.record import RecordError, parsed
from fedplan.privacy.guard import SECRET
from fedplan.storage.files import mark_of_file


def last_told(ledger: Path, after: int = 0) -> int:
    """The last round that a ledger tells of after so many bytes; what is no line is passed over."""
    last = 0
    for line in ledger.read_bytes()[after:].splitlines() if ledger.is_file() else ():
        with suppress(RecordError):
            found = parsed(line)
            number = cast("dict[str, Any]", found).get("round") if type(found) is dict else None
            last = max(last, number) if type(number) is int else last
    return last


def require_secrets(folder: Path, files: Mapping[str, Any]) -> None:
    """Refuse to draw noise by another secret: what was released once must not be drawn again."""
    for name in (name for name in files if Path(name).name == SECRET):
        file = folder / name
        if not file.is_file() or mark_of_file(file) != files[name]:
            raise FedplanError(f"{file} is lost, or not that of the run: put a copy of it back")
