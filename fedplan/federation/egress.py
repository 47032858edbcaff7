# SPDX-License-Identifier: Apache-2.0
"""Egress: a site's own record of all that left it, in every study and run, as one chain.

What it refused and what failed stand in it too: of these a code has left.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

from fedplan.errors import FedplanError
from fedplan.federation.codes import APPROVAL, said_of
from fedplan.storage.chain import ChainFile, Head, head_file, read_chain
from fedplan.storage.errors import explained
from fedplan.tensors.message import Message

RECORD, AGREEMENT = "outgoing.jsonl", "agreed.json"
SCORES, UPDATE, EVALUATION = "scores", "update", "evaluation"
"""What leaves, by kind; beside these are hello, and refused, failed and lacking with a code."""
KEYS, SHARES, CONSENT, UNMASKING = "keys", "shares", "consent", "unmasking"
"""What leaves beside the update where sums are masked; the last is what opens a sum."""
GUESSED = (SCORES, EVALUATION)
"""A few numbers of the site's rows: a plain digest of them could be guessed at."""

UNDECIDED = (APPROVAL, "refused-here", "policy")
"""The codes of a study that is not let in: its server greets the site again and again."""
SOON, MOST = 600.0, 1000
"""Seconds in which such a refusal is not written again; refusals that are kept in mind."""


@dataclass(frozen=True)
class Warrant:
    """By whose word something leaves: the study by its whole digest, the server by that of its
    certificate, and who approved."""

    study: str = ""
    server: str = ""
    approver: str = ""


@dataclass(frozen=True)
class Leaving:
    """One answer that is about to leave: of what kind, in which run, to which request.

    `up` are the bytes of the model's parts, `said` all others, `down` those of the request. Of a
    refusal or a failure there is the code, and how many `times` it was told since its last line.
    Of what left under masks, or opens a masked sum, `among` are those whose sum it is.
    """

    kind: str
    site: str = ""
    experiment: str = ""
    run: str = ""
    round: int = 0
    phase: str = ""
    request: str = ""
    content: str = ""
    code: str = ""
    up: int = 0
    said: int = 0
    down: int = 0
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    times: int = 1
    among: tuple[str, ...] = ()


class _Alike(NamedTuple):
    """What two refusals have in common that one line tells of."""

    kind: str
    code: str
    run: str
    warrant: Warrant


class Egress:
    """The record of a home. A line is on disk before its bytes leave; none is ever taken back.

    Several processes may write it. A server asks a site that waits for a person every few seconds,
    for days: the same refusal again is counted, and told by the next line of it.
    """

    def __init__(self, home: Path) -> None:
        with explained(f"{home} cannot be made", "name a folder that you may write to"):
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._chain = ChainFile(home / RECORD)
        self._told = dict[_Alike, tuple[float, int]]()

    @property
    def head(self) -> Head:
        """How far the record goes: who hears of it can tell later whether it was cut."""
        return self._chain.head

    def note(self, leaving: Leaving, warrant: Warrant | None = None) -> None:
        """Write down what is about to leave, and by whose word."""
        by = warrant or Warrant()
        if leaving.code in UNDECIDED:
            times = self._again(leaving, by)
            if not times:
                return
            leaving = replace(leaving, times=times)
        else:
            self.settle()
        said = asdict(leaving)
        if not leaving.among:
            del said["among"]
        self._chain.append({**said, **asdict(by)})

    def settle(self) -> None:
        """Write down the refusals that no line says yet."""
        for alike, (_, count) in list(self._told.items()):
            if count:
                told = Leaving(alike.kind, run=alike.run, code=alike.code, times=count)
                said = asdict(told)
                del said["among"]
                self._chain.append({**said, **asdict(alike.warrant)})
            del self._told[alike]

    def _again(self, leaving: Leaving, warrant: Warrant) -> int:
        """How many times a code was told that no line says yet; none if it is too soon for one."""
        now, alike = time.monotonic(), _Alike(leaving.kind, leaving.code, leaving.run, warrant)
        last, count = self._told.get(alike, (-inf, 0))
        soon = now - last < SOON
        if not soon and len(self._told) >= MOST:
            self._told.clear()
        self._told[alike] = (last, count + 1) if soon else (now, 0)
        return 0 if soon else count + 1


def ended(code: str, answer: Message, *, site: str, experiment: str = "", run: str = "") -> Leaving:
    """What leaves if nothing else does: a code."""
    (kind,) = said_of(code)
    return Leaving(kind, site, experiment, run, code=code, said=answer.nbytes)


def content_mark(answer: Message, key: bytes = b"") -> str:
    """The digest of all that an answer holds; with a key of the site's, one that nobody guesses."""
    found = hmac.new(key, digestmod=hashlib.sha256) if key else hashlib.sha256()
    for each in (answer.header, *answer.blobs):
        found.update(len(each).to_bytes(8, "little"))
        found.update(each)  # apart: put together they would be a copy of what leaves
    return found.hexdigest()


def read_egress(home: Path) -> list[dict[str, Any]]:
    """The lines of a home's record, proved; one that a kill cut off is not among them."""
    file = home / RECORD
    if not file.exists() and not head_file(file).exists():
        raise FedplanError(f"{home} has no record of what left it")
    with explained(f"{file} cannot be read", "put a copy of it back"):
        return read_chain(file)


def read_agreement(folder: Path) -> dict[str, Any]:
    """What a site agreed to."""
    try:
        return json.loads((folder / AGREEMENT).read_text())
    except (OSError, ValueError) as error:
        raise FedplanError(f"{folder} is no site's folder: {error}") from error


def agreements_in(home: Path) -> list[Path]:
    """The folders under a home in which it says what it agreed to: of each run the innermost."""
    return sorted((found.parent for found in home.rglob(AGREEMENT)), key=lambda f: len(f.parts))


def by_part(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Bytes that left, by part."""
    found = dict[str, int]()
    for line in lines:
        for part, count in line["parts"].items():
            found[part] = found.get(part, 0) + count
    return found
