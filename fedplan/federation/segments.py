# SPDX-License-Identifier: Apache-2.0
"""Segments: the files of a ledger, of which only the last one is open.

The first is `ledger.jsonl`, and all of a small run's. A round that begins after a segment has grown
to its limit opens the next, `ledger.000002.jsonl`, whose first line holds the length and the digest
of the one before and the numbers of all rounds so far. So a run goes on from its last segment
alone, and the last segment proves all others.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.federation.history import Past, Row, told_rows, with_scores
from fedplan.federation.record import Record, RecordError, parsed, read_record
from fedplan.federation.remains import last_told
from fedplan.federation.warnings import ByKind, Drifts, drifts_of
from fedplan.federation.world import LEDGER
from fedplan.storage.lines import Lines, read_lines
from fedplan.storage.locks import synced

LIMIT = 32 << 20
"""Bytes after which a segment takes no more rounds: what is read when a run goes on."""

OPENING = "segment"
"""The kind of a segment's first line."""

VERSION = 1

_NAME = re.compile(r"ledger\.([0-9]{6,12})\.jsonl", re.ASCII)

_FIELDS = {"kind", "version", "number", "before", "rows", "drifts"}


@dataclass(frozen=True)
class Opening:
    """The first line of a segment: which it is, what the one before was, and all rounds so far.

    `rows` are the numbers of the rounds, and `drifts` those of the last ones, which warnings need.
    """

    number: int
    before: tuple[int, str]
    rows: list[Row]
    drifts: Sequence[ByKind]

    def json(self) -> dict[str, Any]:
        """It as a line."""
        drifts = [{kind: list(pair) for kind, pair in each.items()} for each in self.drifts]
        said = {"number": self.number, "before": list(self.before), "rows": self.rows}
        return {"kind": OPENING, "version": VERSION, "drifts": drifts, **said}


def read_opening(line: object) -> Opening | None:
    """The opening that a line is, if it is one."""
    if type(line) is not dict or cast("dict[str, Any]", line).get("kind") != OPENING:
        return None
    said = cast("dict[str, Any]", line)
    if said.keys() != _FIELDS or said["version"] != VERSION:
        raise RecordError(f"an opening has version {VERSION} and {', '.join(sorted(_FIELDS))}")
    try:
        drifts = [{k: (float(a), float(b)) for k, (a, b) in d.items()} for d in said["drifts"]]
        length, sha256 = said["before"]
        rows = [{str(k): v for k, v in row.items()} for row in said["rows"]]
        return Opening(int(said["number"]), (int(length), str(sha256)), rows, drifts)
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"this is no opening of a segment: {error}") from error


def segment_name(number: int) -> str:
    """What the file of a segment is called."""
    return LEDGER if number == 1 else f"ledger.{number:06}.jsonl"


def segment_number(name: str) -> int:
    """Which segment a file is; 0 if it is none."""
    found = _NAME.fullmatch(name)
    return 1 if name == LEDGER else int(found[1]) if found else 0


def newest_segment(folder: Path) -> Path:
    """The last segment that lies in a folder."""
    names = os.listdir(folder) if folder.is_dir() else []
    return folder / segment_name(max(map(segment_number, names), default=0) or 1)


def open_ledger(folder: Path, files: Mapping[str, Any], number: int) -> Lines:
    """The segment that was open when round `number` was committed, as it then was.

    What a kill left behind it is cut off, unless it tells that the world beside it is too old.
    """
    at = _open_number(files)
    file, newest = folder / segment_name(at), newest_segment(folder)
    length, sha256 = files.get(file.name, (0, ""))
    later = segment_number(newest.name) > at
    last = last_told(newest) if later else last_told(file, length)
    if last > number + 1:
        raise FedplanError(
            f"{newest} tells of round {last}, and the world beside it is of round {number}: the "
            "server has lost its world; put a copy back, or begin another run"
        )
    ledger = Lines(file, length=length, sha256=sha256)
    _require_before(ledger)
    for name in os.listdir(folder) if later else ():
        if segment_number(name) > at:
            (folder / name).unlink()
    return ledger


def next_segment(ledger: Lines, past: Past) -> tuple[Lines, list[dict[str, Any]]]:
    """Where a round's lines go, and what stands before them if that is a new segment."""
    if ledger.length < LIMIT:
        return ledger, []
    os.truncate(ledger.file, ledger.length)  # what a full disk left: nobody cuts it off later
    number = segment_number(ledger.file.name) + 1
    length, sha256 = ledger.length, ledger.sha256
    opening = Opening(number, (length, sha256), list(past.told), list(past.drifts))
    following = Lines(ledger.file.with_name(segment_name(number)), length=0)
    synced(following.file.parent)
    return following, [opening.json()]


def read_past(ledger: Lines, metrics: Path) -> Past:
    """What an open segment, and the scores beside it, tell of all rounds."""
    opening, records = read_segment(ledger.file)
    told, drifts = told_rows(records), drifts_of(records)
    if opening is not None:
        told = [*opening.rows, *told]
        drifts = Drifts([*opening.drifts, *drifts], maxlen=drifts.maxlen)
    return Past(told, with_scores(told, read_lines(metrics)), drifts)


def read_segment(file: Path) -> tuple[Opening | None, list[Record]]:
    """What a segment opens with, if it is not the first, and its records; all that is whole."""
    content = file.read_bytes()
    lines = [parsed(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    opening = read_opening(lines[0]) if lines else None
    return opening, [read_record(line) for line in lines[opening is not None :]]


def ledger_lines(folder: Path, files: Mapping[str, Any]) -> Iterator[bytes]:
    """The lines of all segments but their openings, as far as the last was committed."""
    last = _open_number(files)
    for number in range(1, last + 1):
        name = segment_name(number)
        content = (folder / name).read_bytes()
        lines = content[: files[name][0] if number == last else None].splitlines()
        yield from lines[1:] if number > 1 else lines


def closed_faults(folder: Path, files: Mapping[str, Any]) -> dict[str, str]:
    """What is wrong with the segments before the open one: each is proved by the one after it."""
    for number in range(_open_number(files), 1, -1):
        name, before = segment_name(number), segment_name(number - 1)
        try:
            opening = _opening_of(folder / name)
        except (RecordError, OSError) as error:
            return {name: f"{name} does not open as a segment does: {error}"}
        if not (folder / before).is_file():
            return {before: f"{before} is lost"}
        content = (folder / before).read_bytes()
        if (len(content), hashlib.sha256(content).hexdigest()) != opening.before:
            return {before: f"{before} is not what {name} was opened after"}
        if opening.number != number:
            return {name: f"{name} says that it is segment {opening.number}"}
    return {}


def opening_faults(folder: Path, files: Mapping[str, Any]) -> Iterator[str]:
    """Openings that tell other rounds than the segments before them."""
    told, drifts, last = list[Row](), drifts_of(()), _open_number(files)
    for number in range(1, last + 1) if last > 1 else ():
        opening, records = read_segment(folder / segment_name(number))
        if opening and (opening.rows, list(opening.drifts)) != (told, list(drifts)):
            yield f"{segment_name(number)} opens with other rounds than were told before it"
        told += told_rows(records)
        drifts.extend(drifts_of(records))


def _require_before(ledger: Lines) -> None:
    """Refuse to go on where the segment before the open one is not there as it was."""
    number = segment_number(ledger.file.name)
    if number == 1 or not ledger.length:
        return
    before, (length, _) = segment_name(number - 1), _opening_of(ledger.file).before
    file = ledger.file.with_name(before)
    if not file.is_file() or file.stat().st_size != length:
        raise FedplanError(f"{file} is lost, or not as long as it was: put a copy of it back")


def _opening_of(file: Path) -> Opening:
    with file.open("rb") as lines:
        opening = read_opening(parsed(lines.readline()))
    if opening is None:
        raise RecordError(f"{file.name} does not begin with a line of kind {OPENING!r}")
    return opening


def _open_number(files: Mapping[str, Any]) -> int:
    return max(map(segment_number, files), default=0) or 1
