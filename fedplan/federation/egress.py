# SPDX-License-Identifier: Apache-2.0
"""Egress: a site's own record of every byte that left it in one experiment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.storage.errors import explained
from fedplan.storage.lines import Lines
from fedplan.storage.locks import alone

RECORD, AGREEMENT = "outgoing.jsonl", "agreed.json"


class Egress:
    """The record of one site in one experiment. A line is on disk before its bytes leave.

    Several processes may write it: of a simulation, or a worker that is started beside another.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with explained(f"{folder} cannot be made", "name a folder that you may write to"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / RECORD).touch(mode=0o600)

    def note(self, line: Mapping[str, Any]) -> None:
        """Write down what is about to leave."""
        file, asked = self._folder / RECORD, (line["request"], line["answer"])
        with alone(self._folder, wait=60.0):
            before = read_egress(self._folder)
            again = any((each["request"], each["answer"]) == asked for each in before)
            # What a kill cut off never left: its line is written before its bytes go.
            Lines(file, length=_whole(file)).append([{**line, "again": again}])


def read_egress(folder: Path) -> list[dict[str, Any]]:
    """The lines of a site's record; one that a kill cut off is not among them."""
    try:
        whole = (folder / RECORD).read_bytes()[: _whole(folder / RECORD)]
        return [json.loads(line) for line in whole.splitlines()]
    except (OSError, ValueError) as error:
        raise FedplanError(f"{folder} has no record of what left it: {error}") from error


def read_agreement(folder: Path) -> dict[str, Any]:
    """What a site agreed to."""
    try:
        return json.loads((folder / AGREEMENT).read_text())
    except (OSError, ValueError) as error:
        raise FedplanError(f"{folder} is no site's folder: {error}") from error


def records_in(folder: Path) -> list[Path]:
    """The folders of all experiments under a site's home."""
    return sorted(found.parent for found in folder.rglob(RECORD))


def by_part(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes that left, by part."""
    found = dict[str, int]()
    for line in lines:
        for part, count in line["parts"].items():
            found[part] = found.get(part, 0) + count
    return found


def _whole(file: Path) -> int:
    """The length of a file up to its last full line."""
    with file.open("rb") as held:
        end = held.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - 65536)
            held.seek(start)
            place = held.read(end - start).rfind(b"\n")
            if place >= 0:
                return start + place + 1
            end = start
    return 0
