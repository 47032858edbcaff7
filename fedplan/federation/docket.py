# SPDX-License-Identifier: Apache-2.0
"""Dockets: what a server has told sites in a masked round, on its disk before it is told.

A site is told one roster, one delivery and one list of survivors. So a server that was killed must
tell the same again; nothing in it is a secret of anybody.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedplan.errors import StoreError
from fedplan.storage.files import put_file

DOCKET, POLL_DOCKET = "masking.json", "masked_poll.json"
"""In a run's folder: the masked round that is open, and the poll before it."""


@dataclass(frozen=True)
class Docket:
    """A masked round: how often it was begun, and its letters as JSON, as far as they were told."""

    round: int
    attempt: int = 1
    adverts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    boxes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    survivors: tuple[str, ...] = ()

    def again(self) -> Docket:
        """The same round, begun anew."""
        return Docket(self.round, self.attempt + 1)


def read_docket(file: Path, number: int) -> Docket:
    """The docket of a round: as it was left, or a new one."""
    try:
        said: Any = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        held = Docket(**said) if said else Docket(number)
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{file} cannot be read: {error}; put a copy of it back") from error
    if held.round != number:
        return Docket(number)
    return replace(held, survivors=tuple(held.survivors))


def note_docket(file: Path, docket: Docket) -> Docket:
    """Write a docket down, before anybody is told what it says."""
    put_file(file, json.dumps(asdict(docket)), mode=0o600)
    return docket
