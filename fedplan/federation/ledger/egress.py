# SPDX-License-Identifier: Apache-2.0
"""What left a site: a hash-chained log of all replies, and an account of each dataset's answers.

Both cover all studies, runs and seeds. The log has refusals and failures too, since their codes
leave the site. The account enforces the site's own limits: the site names the dataset, never the
server, and answers are identified by the digest of their inputs, not by the names of requests.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.ledger.faults import APPROVAL, error_fields
from fedplan.federation.messages import RequestRefused
from fedplan.privacy.guarantee import evaluation_name, vote_name
from fedplan.privacy.guard import CHARGES_FILE, SECRET_FILE
from fedplan.privacy.mechanisms.noise import derive_key, load_or_create_secret
from fedplan.storage.append_log import AppendLog, DamagedLog, LogHead, head_file, timestamp
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import make_folder, wrap_disk_errors
from fedplan.tensors.message import Message

EGRESS_LOG, AGREEMENT = "egress.jsonl", "agreement.json"
"""Files in a site's folder: the log, and the settings that the site agreed to in a run."""
SCORES, UPDATE, EVALUATION, STATISTICS = "scores", "update", "evaluation", "statistics"
"""Kinds of entries; further kinds are hello, and refused, failed and missing with a code."""
KEYS, SHARES, SIGNATURE, UNMASKING = "keys", "shares", "signature", "unmasking"
"""Kinds of secure aggregation messages; the last has the shares that unmask a sum."""
LOW_ENTROPY_KINDS = (SCORES, EVALUATION)
"""Kinds with few numbers: their digests are keyed, since plain ones could be guessed."""

REPEATED_CODES = (APPROVAL, "study-refused", "policy")
"""Codes of studies that are not admitted: their servers repeat the request for days."""
REPEAT_SECONDS, MAX_REPEATED = 600.0, 1000
"""Seconds in which a repeated refusal is only counted; refusals that are remembered."""


@dataclass(frozen=True)
class Authorization:
    """Authorization of a reply: digests of the study and of the server's certificate, and the name
    of the approver."""

    study: str = ""
    server: str = ""
    approver: str = ""


@dataclass(frozen=True)
class EgressEntry:
    """One entry of the egress log: a reply that is about to leave the site.

    `kind`: one of SCORES, UPDATE, EVALUATION, STATISTICS, KEYS, SHARES, SIGNATURE, UNMASKING or
    "hello"; for a reply with an error code "refused", "failed" or "missing". `site`, `experiment`,
    `run`, `round`, `phase`, `request`: the client, and the server's request. `content`: digest of
    the reply.
    `code`: error code. `upload_bytes`: bytes of model values in the reply; `parts`: the same by
    kind of param. `other_bytes`: all other bytes of the reply. `download_bytes`: bytes of model
    values in the request. `count`: how often an error code was sent since the last entry.
    `clients`: clients of the sum to which a secure aggregation message belongs.
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
    upload_bytes: int = 0
    other_bytes: int = 0
    download_bytes: int = 0
    parts: Mapping[str, int] = field(default_factory=dict[str, int])
    count: int = 1
    clients: tuple[str, ...] = ()


_Refusal = tuple[str, str, str, Authorization]
"""Kind, code, run and authorization: equal refusals are counted as one."""


class EgressLog:
    """Append-only, hash-chained log file of all replies of a site, in `state_folder`.

    The folder is created if missing. Call `append` before the bytes of a reply leave; the entry is
    then on disk, and is never removed. Several processes may append. A refusal with a code of
    REPEATED_CODES is written once in REPEAT_SECONDS. Repetitions are only counted in memory; the
    count is written with the next such refusal, before the next other entry, or by `flush`. Read
    the log with `read_egress`.
    """

    def __init__(self, state_folder: Path) -> None:
        make_folder(state_folder)
        self._log = AppendLog(state_folder / EGRESS_LOG, chained=True)
        self._repeats = dict[_Refusal, tuple[float, int]]()

    @property
    def head(self) -> LogHead:
        """Length and hash of the log; with these a later truncation can be detected."""
        return self._log.head

    def read(self) -> list[dict[str, Any]]:
        """Return all entries as dicts, oldest first; raise as `read_egress` does."""
        return self._log.read()

    def append(self, entry: EgressEntry, authorization: Authorization | None = None) -> None:
        """Append an entry with an authorization to the file; a repeated refusal is only counted.

        `authorization`: who allowed the reply; None gives empty fields. An entry with a code
        outside REPEATED_CODES, or without a code, first writes the counted refusals. Raises
        StoreError if the log cannot be written.
        """
        authorization = authorization or Authorization()
        if entry.code not in REPEATED_CODES:
            self.flush()
        else:
            now, refusal = time.monotonic(), (entry.kind, entry.code, entry.run, authorization)
            last, count = self._repeats.get(refusal, (-inf, 0))
            if now - last < REPEAT_SECONDS:
                self._repeats[refusal] = last, count + 1
                return
            if len(self._repeats) >= MAX_REPEATED:
                self._repeats.clear()
            self._repeats[refusal] = now, 0
            entry = replace(entry, count=count + 1)
        self._write(entry, authorization)

    def _write(self, entry: EgressEntry, authorization: Authorization) -> None:
        fields = dict(vars(entry))
        if not entry.clients:
            del fields["clients"]
        self._log.append({**fields, **vars(authorization), "time": timestamp()})

    def flush(self) -> None:
        """Write an entry for the refusals that were only counted so far."""
        for refusal, (_, count) in list(self._repeats.items()):
            kind, code, run, authorization = refusal
            if count:
                self._write(EgressEntry(kind, run=run, code=code, count=count), authorization)
            del self._repeats[refusal]


def error_entry(
    code: str, answer: Message, *, site: str, experiment: str = "", run: str = ""
) -> EgressEntry:
    """Return the log entry of `answer`, a reply that consists of an error code only."""
    (kind,) = error_fields(code)
    return EgressEntry(kind, site, experiment, run, code=code, other_bytes=answer.nbytes)


def content_digest(answer: Message, key: bytes = b"") -> str:
    """Return the SHA-256 of `answer`, a reply, as hex; with a key, an HMAC that cannot be guessed.

    The header and each blob are hashed with their lengths.
    """
    hasher = hmac.new(key, digestmod=hashlib.sha256) if key else hashlib.sha256()
    for part in (answer.header, *answer.blobs):
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def read_egress(state_folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a site's egress log as dicts, oldest first, after checking the chain.

    `state_folder`: the site's folder. An incomplete last line is left out. Raises FedplanError if
    there is no log, or if the log is damaged or cannot be read.
    """
    file = state_folder / EGRESS_LOG
    if not file.exists() and not head_file(file).exists():
        raise FedplanError(f"{state_folder} has no egress log")
    with wrap_disk_errors(f"{file} cannot be read", "restore a copy of it"):
        return AppendLog(file, chained=True).read()


def read_agreement(folder: Path) -> dict[str, Any]:
    """Return the agreement file of a site's run folder as a dict, as written by Endpoint.

    Keys are for example site, experiment, plan, fingerprint and limits. Raises FedplanError if the
    file is missing or no JSON.
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
    """Return the sum of the `parts` (bytes by kind of param) of egress log entries."""
    totals = dict[str, int]()
    for line in lines:
        for part, count in line["parts"].items():
            totals[part] = totals.get(part, 0) + count
    return totals


REPLIES = "replies.jsonl"
"""File of an account: one JSON line for each reply."""
REVEAL_LOG, EMPTIED = "reveals.jsonl", "emptied"
"""File of the sums that a client helped to unmask, and a field of its first line if its owner had
emptied it. It lies beside the client's account, if there is one, since it counts for all runs."""
DELTA = 1e-5
"""Default delta of a site's epsilon limit."""


@dataclass(frozen=True)
class Limits:
    """Limits that a site sets for all use of one dataset; 0 means no limit.

    `rounds`: number of distinct replies of each kind (updates, layer scores, evaluations).
    `bytes`: total bytes of values sent. `epsilon`, `delta`: differential privacy budget.
    """

    rounds: int = 0
    bytes: int = 0
    epsilon: float = 0.0
    delta: float = DELTA


@dataclass(frozen=True)
class Answer:
    """Description of one reply of a site to the server, for the site's Account.

    `kind`: "update", "scores", "evaluation" or "statistics". `request`: name of the request.
    `content`: digest of all inputs of the reply; empty if the journal's stored reply is sent again.
    `nbytes`: bytes of values in the reply. `protected`: the reply has differential privacy noise
    for every example, or does not depend on examples.
    """

    kind: str
    request: str
    content: str
    nbytes: int
    protected: bool = False


class Account:
    """Log of all replies computed from one dataset of a site, with the site's limits on them.

    `folder`: one folder per dataset, created if missing, with a secret key file (created too), the
    privacy ledger of the DP guards, and the file of replies (`read_replies`).
    `limits`: None sets no limit. `encryption`: encrypts the secret on disk if not None.
    Call `charge(answer)` before computing a reply. Several processes may use one folder.
    """

    def __init__(
        self, folder: Path, limits: Limits | None = None, *, encryption: Encryption | None = None
    ) -> None:
        self.folder, self.limits, self.encryption = folder, limits or Limits(), encryption
        make_folder(folder)
        self._log = AppendLog(folder / REPLIES, chained=True)
        self._secret = load_or_create_secret(
            folder / SECRET_FILE, encryption, used_by=self._log.file
        )

    def content_key(self) -> bytes:
        """Return a secret key for digests of replies with few numbers, which could be guessed."""
        return derive_key(self._secret, "content key")

    def charge(self, answer: Answer) -> None:
        """Append `answer`, the description of a reply, to the account's file, synced to disk.

        Call this before computing the reply. A reply with the same content as an earlier reply adds
        only bytes. An empty content stands for the content of the last reply to the same request.
        Waits up to 60 s for the file's lock. Raises RequestRefused, and appends nothing, if a limit
        would be exceeded, if an evaluation of the same request had other content, or if the site
        limits epsilon and this reply or an earlier one is not protected. Raises StoreError if the
        file stays locked or cannot be written, and DamagedLog if the file is damaged.
        """
        with self._log.locked():
            lines, of_request = self._log.read(), (answer.request, answer.kind)
            earlier = [x["content"] for x in lines if (x["request"], x["kind"]) == of_request]
            inputs = answer.content or answer.request
            content = derive_key(self._secret, "content", answer.kind, inputs).hex()[:32]
            line: dict[str, Any] = {
                "kind": answer.kind,
                "request": answer.request,
                "content": earlier[-1] if earlier and not answer.content else content,
                "bytes": answer.nbytes,
                "protected": answer.protected,
            }
            if answer.kind == EVALUATION and earlier and line["content"] not in earlier:
                # Else a server could learn personal values by evaluations of chosen global values.
                raise RequestRefused(
                    f"{answer.request[:80]!r} was evaluated before, with other values"
                ).with_code("no-evaluation")
            limits, sent = self.limits, sum(each["bytes"] for each in lines)
            contents = {each["content"] for each in lines if each["kind"] == line["kind"]}
            if limits.epsilon and not all(each["protected"] for each in (*lines, line)):
                raise RequestRefused(
                    f"{self.folder} limits epsilon, and this reply or an earlier one has no "
                    "differential privacy: remove the limit, or name another dataset"
                ).with_code("unprotected")
            if limits.rounds and line["content"] not in contents and len(contents) >= limits.rounds:
                raise RequestRefused(
                    f"{self.folder} has {len(contents)} replies of this kind, and the limit is "
                    f"{limits.rounds}"
                ).with_code("limit-rounds")
            if limits.bytes and sent + line["bytes"] > limits.bytes:
                raise RequestRefused(
                    f"{sent} bytes were sent from {self.folder}, and {line['bytes']} more exceed "
                    f"the limit of {limits.bytes}"
                ).with_code("limit-bytes")
            self._log.append(line)


def read_replies(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of an account folder's file of replies as dicts, oldest first.

    Keys: kind, request, content (keyed digest), bytes, protected. An incomplete last line is
    left out; a missing file gives []. Raises StoreError if the file
    cannot be read, DamagedLog if a line was edited.
    """
    with wrap_disk_errors(f"{folder / REPLIES} cannot be read", "restore a copy of it"):
        return AppendLog(folder / REPLIES, chained=True).read()


def unaccounted_answers(
    entries: Iterable[Mapping[str, Any]],
    accounts: Iterable[Path],
    agreements: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each answer in an egress log's entries that no account explains, and the reason.

    `accounts`: the folders of all accounts of the site. `agreements`: of the runs, as returned by
    `read_agreement`; without that of a run its votes need no charge. Raises DamagedLog if a log is
    damaged.
    """
    # Protected scores of a run without votes need no examples, and are not charged.
    voting = {agreement.get("run") for agreement in agreements if agreement.get("votes")}
    protected, charged = dict[tuple[str, str], bool](), set[str]()
    for folder in accounts:
        for line in read_replies(folder):
            reply = str(line.get("kind")), str(line.get("request"))
            protected[reply] = bool(line.get("protected"))
        charges = AppendLog(folder / CHARGES_FILE, chained=True).read()
        charged |= {str(line.get("request")) for line in charges}
    charge_names = {UPDATE: str, SCORES: vote_name, EVALUATION: evaluation_name}
    charge_names[STATISTICS] = str
    for entry in entries:
        kind, request = entry["kind"], entry["request"]
        if kind not in charge_names:
            continue
        if (kind, request) not in protected:
            yield entry, f"the {kind} is missing from the accounts of this site's datasets"
        elif (
            protected[kind, request]
            and (kind != SCORES or entry["run"] in voting)
            and charge_names[kind](request) not in charged
        ):
            yield (
                entry,
                f"the account says that noise was added to the {kind}, but no epsilon was charged",
            )


def require_complete_account(account: Account, egress: EgressLog) -> None:
    """Raise DamagedLog if an account, or the egress log, has lost what the other still has.

    Each is the witness of the other: an update is in an account before the log has it, and in the
    log before it leaves. So limits are not forgotten with the files that count towards them, nor
    sums that were unmasked with the files of them. If an owner emptied one of these, their lines
    are not counted.
    """
    folder, entries = account.folder.parent, egress.read()
    accounts = sorted(file.parent for file in folder.glob(f"*/{SECRET_FILE}"))
    agreements = list[dict[str, Any]]()
    for each in agreement_folders(folder.parent):
        with suppress(FedplanError):  # Endpoint writes a damaged one again
            agreements.append(read_agreement(each))
    for entry, problem in unaccounted_answers(entries, accounts, agreements):
        raise DamagedLog(
            f"{folder} and {EGRESS_LOG} do not agree on run {entry['run']}, round "
            f"{entry['round']}: {problem}; restore a copy of the folder"
        )
    unmasked = {(x["request"], x["content"]) for x in entries if x["kind"] == UNMASKING}
    files = [file for each in accounts if (file := each / REVEAL_LOG).exists()]
    logs = [AppendLog(file, chained=True).read() for file in files]
    emptied = any(not lines or lines[0].get(EMPTIED) for lines in logs)
    if not emptied and sum(map(len, logs)) < len(unmasked):
        raise DamagedLog(
            f"this site helped to unmask {len(unmasked)} sums, and a {REVEAL_LOG} in {folder} is "
            "lost or an older copy: restore the latest copy of it and of its .head file; if its "
            "owner emptied it, empty it again"
        )
    # Counts are stored once the log has them: those that were charged only have not left.
    counted = any(folder.with_name(STATISTICS).glob("*.json"))
    replies = (line for each in accounts for line in read_replies(each))
    answered = any(counted or line["kind"] != STATISTICS for line in replies)
    if not any(not entry["code"] for entry in entries) and answered:
        raise DamagedLog(
            f"{folder} has replies of this site, and its {EGRESS_LOG} has none: restore a copy of "
            "the log"
        )
