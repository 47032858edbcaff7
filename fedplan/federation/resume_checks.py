# SPDX-License-Identifier: Apache-2.0
"""Checks of a run's folder before it resumes, made before any file is changed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.federation.ledger.records import RecordError, parse_line
from fedplan.privacy.guard import SECRET_FILE
from fedplan.storage.files import file_size_and_digest


def last_ledger_round(ledger: Path, offset: int = 0) -> int:
    """Return the highest round number in a ledger file after `offset` bytes; 0 if there is none.

    Invalid lines are skipped; a missing file counts as empty.
    """
    last = 0
    for line in ledger.read_bytes()[offset:].splitlines() if ledger.is_file() else ():
        with suppress(RecordError):
            value = parse_line(line)
            number = cast("dict[str, Any]", value).get("round") if type(value) is dict else None
            last = max(last, number) if type(number) is int else last
    return last


def check_noise_secrets(folder: Path, files: Mapping[str, Any]) -> None:
    """Raise FedplanError if a noise secret in `folder` is missing or changed.

    Noise secrets are the files in `files` that are called SECRET_FILE. `files`: [length, digest] by
    path of each file at the last commit. Changes no file.
    """
    # Another secret would draw other noise for values that were already released.
    for name in (name for name in files if Path(name).name == SECRET_FILE):
        file = folder / name
        if not file.is_file() or file_size_and_digest(file) != files[name]:
            raise FedplanError(f"{file} is missing or changed: restore it from a backup")
