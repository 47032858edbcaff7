# SPDX-License-Identifier: Apache-2.0
"""Ledger segments: the files of a ledger, of which only the last one is appended to.

The first is `ledger.jsonl`, the only one of a small run. The round after a segment has reached its
size limit opens the next, `ledger.000002.jsonl`. Its first line, the header, has the length and
digest of the segment before, and the metrics of all rounds so far. So the last segment proves all
others: a resumed run reads its records alone, and compares the digests of the others.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.federation.global_state import LEDGER
from fedplan.federation.ledger.history import (
    DriftByKind,
    Drifts,
    History,
    Row,
    join_scores,
    ledger_rows,
    recent_drifts,
)
from fedplan.federation.ledger.records import Record, RecordError, parse_line, read_record
from fedplan.storage.append_log import CommittedLog, read_json_lines

log = logging.getLogger("fedplan")

SEGMENT_BYTES = 32 << 20
"""Size after which a segment takes no more rounds; a resumed run parses one segment."""

SEGMENT_KIND = "segment"
"""Value of "kind" in a segment header."""

VERSION = 1
"""Version of the segment header."""

_NAME = re.compile(r"ledger\.([0-9]{6,12})\.jsonl", re.ASCII)

_FIELDS = {"kind", "version", "number", "before", "metrics", "drifts"}


@dataclass(frozen=True)
class SegmentHeader:
    """First line of every segment file but the first.

    `number`: number of the segment, from 2. `before`: (length in bytes, SHA-256) of the segment
    before. `metrics`: rows of all earlier rounds, without evaluation metrics. `drifts`: drift of
    the last DRIFT_WINDOW rounds, for warnings.
    """

    number: int
    before: tuple[int, str]
    metrics: list[Row]
    drifts: Sequence[DriftByKind]

    def json(self) -> dict[str, Any]:
        """Return the header as a ledger line."""
        drifts = [{kind: list(pair) for kind, pair in drift.items()} for drift in self.drifts]
        values = {"number": self.number, "before": list(self.before), "metrics": self.metrics}
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
        rows = [{str(k): v for k, v in row.items()} for row in values["metrics"]]
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


def open_ledger(folder: Path, files: Mapping[str, Any], number: int) -> CommittedLog:
    """Open the last committed segment of the ledger in `folder`, to append round `number + 1`.

    `number`: last committed round. `files`: [length, digest] by name of each file at that commit.
    Creates the first segment if missing. Truncates the segment and deletes later segments, which an
    interrupted round left. Raises FedplanError if the ledger has a later round than `number + 1`,
    or if this segment or one before was changed or is missing.
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
    if last > number:
        text = "round %d is repeated: its global model was not stored, or is lost from %s"
        log.warning(text, last, folder)
    ledger = CommittedLog(file, length=length, sha256=sha256)
    if ledger.length and (closed := closed_segment_faults(folder, files)):
        raise FedplanError(f"{folder}: {min(closed.values())}: restore it from a backup")
    for name in os.listdir(folder) if has_later else ():
        if segment_number(name) > current:
            (folder / name).unlink()
    return ledger


def next_segment(
    ledger: CommittedLog, history: History
) -> tuple[CommittedLog, list[dict[str, Any]]]:
    """Return (segment for the next round's lines, lines to append before these lines).

    While `ledger`, the open segment, is below SEGMENT_BYTES: `ledger` and no lines. Else a new
    segment file, which this creates, and one line, the segment's header, which has metrics and
    drift of the `history` of all rounds so far.
    """
    if ledger.length < SEGMENT_BYTES:
        return ledger, []
    # A full disk may have left bytes after the last commit, which nobody would truncate later.
    os.truncate(ledger.file, ledger.length)
    number = segment_number(ledger.file.name) + 1
    before = ledger.length, ledger.sha256
    header = SegmentHeader(number, before, list(history.ledger_rows), list(history.drifts))
    segment = CommittedLog(ledger.file.with_name(segment_name(number)), length=0)
    return segment, [header.json()]


def read_history(ledger: CommittedLog, metrics: Path) -> History:
    """Return the history of all rounds, from the open segment `ledger` and the file of metrics.

    Rounds of earlier segments are read from the header of the open segment. Raises RecordError if a
    line of the segment is invalid.
    """
    header, records = read_segment(ledger.file)
    rows, drifts = ledger_rows(records), recent_drifts(records)
    if header is not None:
        rows = [*header.metrics, *rows]
        drifts = Drifts([*header.drifts, *drifts], maxlen=drifts.maxlen)
    return History(rows, join_scores(rows, read_json_lines(metrics)), drifts)


def read_segment(file: Path) -> tuple[SegmentHeader | None, list[Record]]:
    """Return (header, or None in the first segment; records) of a segment file.

    Ignores an incomplete last line. Raises RecordError if a complete line is invalid, OSError if
    the file is missing.
    """
    content = file.read_bytes()
    lines = [parse_line(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    header = read_segment_header(lines[0]) if lines else None
    return header, [read_record(line) for line in lines[header is not None :]]


def ledger_lines(folder: Path, files: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the committed lines of all segments in `folder`, in order, without the headers.

    `files`: [length, digest] by name of each file at the last commit. Checks no digest; raises
    OSError if a segment is missing.
    """
    last = _open_number(files)
    for number in range(1, last + 1):
        name = segment_name(number)
        content = (folder / name).read_bytes()
        lines = content[: files[name][0] if number == last else None].splitlines()
        yield from lines[1:] if number > 1 else lines


def closed_segment_faults(folder: Path, files: Mapping[str, Any]) -> dict[str, str]:
    """Check each segment before the open segment against the header of the segment after.

    `files`: [length, digest] by name of each file at the last commit. Goes from the last segment in
    `folder` to the first, and stops at the first fault. Returns {file name: sentence} for this
    fault; an empty dict if there is none.
    """
    for number in range(_open_number(files), 1, -1):
        name, before = segment_name(number), segment_name(number - 1)
        try:
            header = _header_of(folder / name)
        except (RecordError, OSError) as error:
            return {name: f"{name} has no valid segment header: {error}"}
        if not (folder / before).is_file():
            return {before: f"{before} is lost"}
        with (folder / before).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            is_same = (file.tell(), digest) == header.before
        if not is_same:
            return {before: f"{before} is not the file that the header of {name} describes"}
        if header.number != number:
            return {name: f"{name} has the header of segment {header.number}"}
    return {}


def segment_header_faults(folder: Path, files: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each segment header with metrics or drift other than the ledger before.

    Computes both from the records of all earlier segments. `files`: [length, digest] by name of
    each file in `folder` at the last commit. Raises RecordError for an invalid line.
    """
    rows, drifts, last = list[Row](), recent_drifts(()), _open_number(files)
    for number in range(1, last + 1) if last > 1 else ():
        header, records = read_segment(folder / segment_name(number))
        if header and (header.metrics, list(header.drifts)) != (rows, list(drifts)):
            yield f"the header of {segment_name(number)} has other rounds than the ledger before it"
        rows += ledger_rows(records)
        drifts.extend(recent_drifts(records))


def _header_of(file: Path) -> SegmentHeader:
    """Return the header of a segment file; raise RecordError if there is none."""
    with file.open("rb") as lines:
        header = read_segment_header(parse_line(lines.readline()))
    if header is None:
        raise RecordError(f"{file.name} does not begin with a line of kind {SEGMENT_KIND!r}")
    return header


def _open_number(files: Mapping[str, Any]) -> int:
    return max(map(segment_number, files), default=0) or 1


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
