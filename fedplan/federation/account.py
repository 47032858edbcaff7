# SPDX-License-Identifier: Apache-2.0
"""A site's account of one dataset: every answer computed from it, and the site's own limits.

One account covers all studies, runs and seeds. The site names the dataset, never the server.
Answers are identified by the digest of their inputs, not by the names of their requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedplan.federation.messages import RequestRefused
from fedplan.privacy.guard import SECRET_FILE
from fedplan.privacy.mechanisms.noise import derive_key, load_or_create_secret
from fedplan.storage.append_log import AppendLog
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import make_folder, wrap_disk_errors

REPLIES = "replies.jsonl"
"""File of an account: one JSON line for each reply."""
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

    `kind`: "update", "scores" or "evaluation". `request`: name of the server's request.
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
        self._log = AppendLog(folder / REPLIES)
        self._secret = load_or_create_secret(folder / SECRET_FILE, encryption)

    def charge(self, answer: Answer) -> None:
        """Append `answer`, the description of a reply, to the account's file, synced to disk.

        Call this before computing the reply. A reply with the same content as an earlier reply adds
        only bytes. An empty content stands for the content of the last reply to the same request.
        Waits up to 60 s for the file's lock. Raises RequestRefused, and appends nothing, if a limit
        would be exceeded, or if the site limits epsilon and this reply or an earlier one is not
        protected. Raises StoreError if the file stays locked or cannot be written, and DamagedLog
        if the file is damaged.
        """
        with self._log.locked():
            lines, of_request = self._log.read(), (answer.request, answer.kind)
            earlier = [x["content"] for x in lines if (x["request"], x["kind"]) == of_request]
            inputs = answer.content or answer.request
            content = derive_key(self._secret, "content", answer.kind, inputs).hex()[:32]
            line = {
                "kind": answer.kind,
                "request": answer.request,
                "content": earlier[-1] if earlier and not answer.content else content,
                "bytes": answer.nbytes,
                "protected": answer.protected,
            }
            self._require_within_limits(line, lines)
            self._log.append(line)

    def _require_within_limits(self, line: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        """Raise RequestRefused if a new line of the file exceeds a limit, given earlier `lines`.

        Checks epsilon (all lines must be "protected"), the number of distinct contents of this
        kind, and the sum of bytes, in this order; a limit of 0 is not checked. Changes nothing.
        """
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
                f"{sent} bytes were sent from {self.folder}, and {line['bytes']} more exceed the "
                f"limit of {limits.bytes}"
            ).with_code("limit-bytes")


def read_replies(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of an account folder's file of replies as dicts, oldest first.

    Keys: kind, request, content (keyed digest), bytes, protected. An incomplete last line is
    left out; a missing file gives []. Raises StoreError if the file
    cannot be read, DamagedLog if a line was edited.
    """
    with wrap_disk_errors(f"{folder / REPLIES} cannot be read", "restore a copy of it"):
        return AppendLog(folder / REPLIES).read()
