# SPDX-License-Identifier: Apache-2.0
"""Identities: which run a folder holds: an id drawn once, and digests of what it is run on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.storage.files import put_file

RUN = "run.json"
"""In a run's folder: its identity."""

_ID = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True)
class Identity:
    """A run: its id, and digests of its study, of the model that it starts from, of each client's
    rows where they are seen, and of every param's start, one after the other.

    No bit of a model follows from the id: it tells the answers of two runs apart, and no more.
    """

    id: str = ""
    study: str = ""
    start: str = ""
    rows: dict[str, str] = field(default_factory=dict[str, str])
    marks: str = ""


def is_id(found: object) -> bool:
    """Whether this is an id as runs have it, and so may be the name of a folder."""
    return isinstance(found, str) and _ID.fullmatch(found) is not None


def identified(folder: Path, asked: Identity) -> Identity:
    """The identity of a folder's run, which must be of what is asked; a new run draws its id.

    Only who has no id yet draws one: two ends of one run may be made with the same.

    Who calls this has claimed the folder.
    """
    file = folder / RUN
    if not file.exists():
        drawn = replace(asked, id=asked.id or token_hex(8))
        put_file(file, json.dumps(asdict(drawn), sort_keys=True) + "\n")
    found = read_identity(folder)
    _require_same(folder, found, asked)
    return found


def read_identity(folder: Path) -> Identity:
    """The identity that stands in a run's folder."""
    file = folder / RUN
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        found = Identity(**cast("dict[str, Any]", said))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise FedplanError(f"{file} does not say which run this is: {error}") from error
    words = (found.study, found.start, found.marks)
    rows = found.rows.items() if type(found.rows) is dict else [(None, None)]
    if not is_id(found.id) or any(type(w) is not str for w in (*words, *sum(rows, ()))):
        raise FedplanError(f"{file} does not say which run this is: put a copy of it back")
    return found


def _require_same(folder: Path, found: Identity, asked: Identity) -> None:
    if found.study != asked.study:
        raise FedplanError(
            f"{folder} holds a run of another study, or the code that this one names has changed "
            "since: name another folder, or take that back"
        )
    if (found.start, found.marks) != (asked.start, asked.marks):
        raise FedplanError(
            f"{folder} holds a run from the model {found.start or '?'}, and this one is "
            f"{asked.start or '?'}: give it the weights that it began with"
        )
    if changed := changed_rows(found.rows, asked.rows):
        raise FedplanError(
            f"{folder} holds a run on other rows of {', '.join(changed[:5])}: put the data back "
            "that it began with, or begin another run"
        )


def changed_rows(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """The clients whose rows differ."""
    return [name for name in sorted(one.keys() | other) if one.get(name) != other.get(name)]
