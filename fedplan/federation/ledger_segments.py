# SPDX-License-Identifier: Apache-2.0
"""Ledger segments: the files of a ledger, of which only the last one is appended to.

The first is `ledger.jsonl`, the only one of a small run. The round after a segment has reached its
size limit opens the next, `ledger.000002.jsonl`. Its first line, the header, has the length and
digest of the segment before, and the metrics of all rounds so far. So a run resumes from its last
segment alone, and the last segment proves all others.
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
from fedplan.federation.global_state import LEDGER
from fedplan.federation.history import History, Row, join_scores, ledger_rows
from fedplan.federation.record import Record, RecordError, parse_line, read_record
from fedplan.federation.resume_checks import last_ledger_round
from fedplan.federation.round_warnings import DriftByKind, Drifts, recent_drifts
from fedplan.storage.json_lines import JsonLinesFile, read_json_lines
from fedplan.storage.locks import sync_folder

SEGMENT_BYTES = 32 << 20
"""Size after which a segment takes no more rounds; a resumed run reads one segment."""

SEGMENT_KIND = "segment"
"""Value of "kind" in a segment header."""

VERSION = 1
"""Version of the segment header."""

_NAME = re.compile(r"ledger\.([0-9]{6,12})\.jsonl", re.ASCII)

_FIELDS = {"kind", "version", "number", "before", "rows", "drifts"}


@dataclass(frozen=True)
class SegmentHeader:
    """First line of every segment but the first.

    `number`: which segment this is, from 2. `before`: length and SHA-256 of the segment before.
    `rows`: metrics of all rounds so far. `drifts`: drift of the last rounds, for warnings.
    """

    number: int
    before: tuple[int, str]
    rows: list[Row]
    drifts: Sequence[DriftByKind]

    def json(self) -> dict[str, Any]:
        """Return the header as a ledger line."""
        drifts = [{kind: list(pair) for kind, pair in drift.items()} for drift in self.drifts]
        values = {"number": self.number, "before": list(self.before), "rows": self.rows}
        return {"kind": SEGMENT_KIND, "version": VERSION, "drifts": drifts, **values}


def read_segment_header(line: object) -> SegmentHeader | None:
    """Return the header of a parsed ledger line; None if the line is of another kind.

    Raises RecordError if the header is invalid.
    """
    if type(line) is not dict or cast("dict[str, Any]", line).get("kind") != SEGMENT_KIND:
        return None
    values = cast("dict[str, Any]", line)
    if values.keys() != _FIELDS or values["version"] != VERSION:
        raise RecordError(
            f"a segment header has version {VERSION} and {', '.join(sorted(_FIELDS))}"
        )
    try:
        drifts = [{k: (float(a), float(b)) for k, (a, b) in d.items()} for d in values["drifts"]]
        length, sha256 = values["before"]
        rows = [{str(k): v for k, v in row.items()} for row in values["rows"]]
        return SegmentHeader(int(values["number"]), (int(length), str(sha256)), rows, drifts)
    except (TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"this is not a segment header: {error}") from error


def segment_name(number: int) -> str:
    """Return the file name of a segment, counted from 1."""
    return LEDGER if number == 1 else f"ledger.{number:06}.jsonl"


def segment_number(name: str) -> int:
    """Return the number of a segment by its file name; 0 if the file is not a segment."""
    match = _NAME.fullmatch(name)
    return 1 if name == LEDGER else int(match[1]) if match else 0


def newest_segment(folder: Path) -> Path:
    """Return the path of the last segment in a folder; of the first if there is none."""
    names = os.listdir(folder) if folder.is_dir() else []
    return folder / segment_name(max(map(segment_number, names), default=0) or 1)


def open_ledger(folder: Path, files: Mapping[str, Any], number: int) -> JsonLinesFile:
    """Open the ledger's last segment for round `number + 1`, as committed with round `number`.

    `files` has length and digest of each file at that commit. Truncates the segment and deletes
    later ones, which an interrupted round left. Raises FedplanError if the ledger has later rounds
    than one interrupted round explains, or if the segment before is missing.
    """
    current = _open_number(files)
    file, newest = folder / segment_name(current), newest_segment(folder)
    length, sha256 = files.get(file.name, (0, ""))
    has_later = segment_number(newest.name) > current
    last = last_ledger_round(newest) if has_later else last_ledger_round(file, length)
    if last > number + 1:
        raise FedplanError(
            f"{newest} records round {last}, but the stored global model is of round {number}: the "
            "server has lost its newest global model; restore a copy of it, or start another run"
        )
    ledger = JsonLinesFile(file, length=length, sha256=sha256)
    _require_segment_before(ledger)
    for name in os.listdir(folder) if has_later else ():
        if segment_number(name) > current:
            (folder / name).unlink()
    return ledger


def next_segment(
    ledger: JsonLinesFile, history: History
) -> tuple[JsonLinesFile, list[dict[str, Any]]]:
    """Return the segment for the next round's lines, and the lines to write before them.

    It is the open one, without lines, until that reaches SEGMENT_BYTES; then a new one with its
    header.
    """
    if ledger.length < SEGMENT_BYTES:
        return ledger, []
    # A full disk may have left bytes after the last commit, which nobody would truncate later.
    os.truncate(ledger.file, ledger.length)
    number = segment_number(ledger.file.name) + 1
    before = ledger.length, ledger.sha256
    header = SegmentHeader(number, before, list(history.ledger_rows), list(history.drifts))
    segment = JsonLinesFile(ledger.file.with_name(segment_name(number)), length=0)
    sync_folder(segment.file.parent)
    return segment, [header.json()]


def read_history(ledger: JsonLinesFile, metrics: Path) -> History:
    """Return the history of all rounds, from the open segment and the file of metrics."""
    header, records = read_segment(ledger.file)
    rows, drifts = ledger_rows(records), recent_drifts(records)
    if header is not None:
        rows = [*header.rows, *rows]
        drifts = Drifts([*header.drifts, *drifts], maxlen=drifts.maxlen)
    return History(rows, join_scores(rows, read_json_lines(metrics)), drifts)


def read_segment(file: Path) -> tuple[SegmentHeader | None, list[Record]]:
    """Return the header (None in the first segment) and the records of a segment.

    Ignores an incomplete last line. Raises RecordError if a complete line is invalid.
    """
    content = file.read_bytes()
    lines = [parse_line(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    header = read_segment_header(lines[0]) if lines else None
    return header, [read_record(line) for line in lines[header is not None :]]


def ledger_lines(folder: Path, files: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the committed lines of all segments, without their headers.

    `files` has length and digest of each file at the last commit.
    """
    last = _open_number(files)
    for number in range(1, last + 1):
        name = segment_name(number)
        content = (folder / name).read_bytes()
        lines = content[: files[name][0] if number == last else None].splitlines()
        yield from lines[1:] if number > 1 else lines


def closed_segment_faults(folder: Path, files: Mapping[str, Any]) -> dict[str, str]:
    """Check the segments before the open one, each against the header of the one after it.

    Returns the fault by file name of the last faulty segment; empty if there is none.
    """
    for number in range(_open_number(files), 1, -1):
        name, before = segment_name(number), segment_name(number - 1)
        try:
            header = _header_of(folder / name)
        except (RecordError, OSError) as error:
            return {name: f"{name} has no valid segment header: {error}"}
        if not (folder / before).is_file():
            return {before: f"{before} is lost"}
        content = (folder / before).read_bytes()
        if (len(content), hashlib.sha256(content).hexdigest()) != header.before:
            return {before: f"{before} is not the file that the header of {name} describes"}
        if header.number != number:
            return {name: f"{name} has the header of segment {header.number}"}
    return {}


def segment_header_faults(folder: Path, files: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message for each header whose rounds differ from the segments before it."""
    rows, drifts, last = list[Row](), recent_drifts(()), _open_number(files)
    for number in range(1, last + 1) if last > 1 else ():
        header, records = read_segment(folder / segment_name(number))
        if header and (header.rows, list(header.drifts)) != (rows, list(drifts)):
            yield f"the header of {segment_name(number)} has other rounds than the ledger before it"
        rows += ledger_rows(records)
        drifts.extend(recent_drifts(records))


def _require_segment_before(ledger: JsonLinesFile) -> None:
    """Raise FedplanError if the segment before is missing or has another length."""
    number = segment_number(ledger.file.name)
    if number == 1 or not ledger.length:
        return
    before, (length, _) = segment_name(number - 1), _header_of(ledger.file).before
    file = ledger.file.with_name(before)
    if not file.is_file() or file.stat().st_size != length:
        raise FedplanError(f"{file} is missing or has another length: restore it from a backup")


def _header_of(file: Path) -> SegmentHeader:
    """Return the header of a segment file; raise RecordError if there is none."""
    with file.open("rb") as lines:
        header = read_segment_header(parse_line(lines.readline()))
    if header is None:
        raise RecordError(f"{file.name} does not begin with a line of kind {SEGMENT_KIND!r}")
    return header


def _open_number(files: Mapping[str, Any]) -> int:
    return max(map(segment_number, files), default=0) or 1
