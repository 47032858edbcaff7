# SPDX-License-Identifier: Apache-2.0
"""A site's own hash-chained log of everything that left it, in all studies and runs.

Refusals and failures are logged too, since their codes leave the site.
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
from fedplan.federation.error_codes import APPROVAL, error_fields
from fedplan.storage.chain import ChainFile, ChainHead, head_file, read_chain
from fedplan.storage.errors import wrap_disk_errors
from fedplan.tensors.message import Message

RECORD, AGREEMENT = "outgoing.jsonl", "agreed.json"
"""Files in a site's folder: the log, and the settings that the site agreed to in a run."""
SCORES, UPDATE, EVALUATION = "scores", "update", "evaluation"
"""Kinds of entries; further kinds are hello, and refused, failed and lacking with a code."""
KEYS, SHARES, CONSENT, UNMASKING = "keys", "shares", "consent", "unmasking"
"""Kinds of secure aggregation messages; the last has the shares that unmask a sum."""
LOW_ENTROPY_KINDS = (SCORES, EVALUATION)
"""Kinds with few numbers: their digests are keyed, since plain ones could be guessed."""

REPEATED_CODES = (APPROVAL, "refused-here", "policy")
"""Codes of studies that are not admitted: their servers repeat the request for days."""
REPEAT_SECONDS, MAX_REPEATED = 600.0, 1000
"""Seconds in which a repeated refusal is only counted; refusals that are remembered."""


@dataclass(frozen=True)
class Authorization:
    """What authorizes an answer: digests of the study and of the server's certificate, and the
    name of the approver."""

    study: str = ""
    server: str = ""
    approver: str = ""


@dataclass(frozen=True)
class EgressEntry:
    """One answer that is about to leave the site.

    `content`: digest of the answer. `up`: bytes of model values; `parts` has them by kind of param.
    `other_bytes`: all other bytes. `down`: bytes of the request.
    `code`: of a refusal or failure; `times`: how often it was sent since its last entry.
    `among`: clients of the sum that a secure aggregation message belongs to.
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
    other_bytes: int = 0
    down: int = 0
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    times: int = 1
    among: tuple[str, ...] = ()


class _Refusal(NamedTuple):
    """Fields by which repeated refusals are counted as one."""

    kind: str
    code: str
    run: str
    authorization: Authorization


class EgressLog:
    """The egress log of a site's folder; creates the folder.

    An entry is on disk before its bytes leave, and is never removed. Several processes may append.
    While a study waits for approval its server repeats the request every few seconds: repeated
    refusals are counted, and their next entry has the count.
    """

    def __init__(self, state_folder: Path) -> None:
        with wrap_disk_errors(
            f"{state_folder} cannot be created", "name a folder that you may write to"
        ):
            state_folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._chain = ChainFile(state_folder / RECORD)
        self._repeats = dict[_Refusal, tuple[float, int]]()

    @property
    def head(self) -> ChainHead:
        """Length and hash of the log; with these a later truncation can be detected."""
        return self._chain.head

    def append(self, entry: EgressEntry, authorization: Authorization | None = None) -> None:
        """Append an entry before its bytes leave; a recently repeated refusal is only counted.

        Any other entry first writes the refusals that were counted. Raises StoreError if the log
        cannot be written.
        """
        authorization = authorization or Authorization()
        if entry.code in REPEATED_CODES:
            times = self._count_refusal(entry, authorization)
            if not times:
                return
            entry = replace(entry, times=times)
        else:
            self.flush()
        self._write(entry, authorization)

    def _write(self, entry: EgressEntry, authorization: Authorization) -> None:
        fields = asdict(entry)
        if not entry.among:
            del fields["among"]
        self._chain.append({**fields, **asdict(authorization)})

    def flush(self) -> None:
        """Write an entry for the refusals that were only counted so far."""
        for refusal, (_, count) in list(self._repeats.items()):
            if count:
                kind, code, run, authorization = refusal
                self._write(EgressEntry(kind, run=run, code=code, times=count), authorization)
            del self._repeats[refusal]

    def _count_refusal(self, entry: EgressEntry, authorization: Authorization) -> int:
        """Count a refusal; return how many are not logged yet, or 0 if it is too soon to log."""
        now = time.monotonic()
        refusal = _Refusal(entry.kind, entry.code, entry.run, authorization)
        last, count = self._repeats.get(refusal, (-inf, 0))
        soon = now - last < REPEAT_SECONDS
        if not soon and len(self._repeats) >= MAX_REPEATED:
            self._repeats.clear()
        self._repeats[refusal] = (last, count + 1) if soon else (now, 0)
        return 0 if soon else count + 1


def error_entry(
    code: str, answer: Message, *, site: str, experiment: str = "", run: str = ""
) -> EgressEntry:
    """Return the entry of an answer that consists of an error code only."""
    (kind,) = error_fields(code)
    return EgressEntry(kind, site, experiment, run, code=code, other_bytes=answer.nbytes)


def content_digest(answer: Message, key: bytes = b"") -> str:
    """Return the SHA-256 of an answer; with a key of the site, an HMAC that cannot be guessed."""
    hasher = hmac.new(key, digestmod=hashlib.sha256) if key else hashlib.sha256()
    for part in (answer.header, *answer.blobs):  # joined they would be a copy of the answer
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def read_egress(state_folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a site's log after checking its hash chain.

    An incomplete last line is left out. Raises FedplanError if there is no log or it is damaged.
    """
    file = state_folder / RECORD
    if not file.exists() and not head_file(file).exists():
        raise FedplanError(f"{state_folder} has no egress log")
    with wrap_disk_errors(f"{file} cannot be read", "restore a copy of it"):
        return read_chain(file)


def read_agreement(folder: Path) -> dict[str, Any]:
    """Return the settings that a site agreed to in a run, as written by its Endpoint.

    Raises FedplanError if the folder has none.
    """
    try:
        return json.loads((folder / AGREEMENT).read_text())
    except (OSError, ValueError) as error:
        raise FedplanError(f"{folder} is no site's folder: {error}") from error


def agreement_folders(state_folder: Path) -> list[Path]:
    """Return the folders under a site's folder with an agreement file, outermost first."""
    return sorted(
        (file.parent for file in state_folder.rglob(AGREEMENT)),
        key=lambda folder: len(folder.parts),
    )


def bytes_by_part(lines: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Return the bytes of log entries by kind of param."""
    totals = dict[str, int]()
    for line in lines:
        for part, count in line["parts"].items():
            totals[part] = totals.get(part, 0) + count
    return totals
