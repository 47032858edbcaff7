# SPDX-License-Identifier: Apache-2.0
"""A site's account of one dataset: every answer computed from it, and the site's own limits.

One account covers all studies, runs and seeds. The site names the dataset, never the server.
Answers are identified by the digest of their inputs, not by the names of their requests.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.messages import RequestRefused
from fedplan.privacy.guard import SECRET_FILE
from fedplan.privacy.mechanisms.secret import derive_key, load_or_create_secret
from fedplan.storage.encryption import Encryption
from fedplan.storage.errors import wrap_disk_errors
from fedplan.storage.locks import locked_folder, sync_folder

ANSWERS = "answers.jsonl"
"""File of an account: one JSON line for each answer."""
DELTA = 1e-5
"""Default delta of a site's epsilon limit."""


@dataclass(frozen=True)
class Limits:
    """Limits that a site sets for one dataset; 0 is no limit.

    `rounds`: answers of each kind: updates, polls, evaluations. `bytes`: bytes of values sent.
    `epsilon`, `delta`: differential privacy budget.
    """

    rounds: int = 0
    bytes: int = 0
    epsilon: float = 0.0
    delta: float = DELTA


@dataclass(frozen=True)
class Answer:
    """One answer of a site, before it is computed.

    `kind`: update, scores or evaluation. `request`: name of the request.
    `content`: digest of all inputs; empty if the answer is read from the journal.
    `nbytes`: bytes of values. `protected`: noise hides every example, or no example is used.
    """

    kind: str
    request: str
    content: str
    nbytes: int
    protected: bool = False


class Account:
    """The account of one dataset: a folder with a secret, privacy charges, and all answers.

    `encryption`: encrypts the secret on disk, if given. Creates the folder and the secret.
    """

    def __init__(
        self, folder: Path, limits: Limits | None = None, *, encryption: Encryption | None = None
    ) -> None:
        self.folder, self.limits, self.encryption = folder, limits or Limits(), encryption
        make_private_folder(folder)
        self._secret = load_or_create_secret(folder / SECRET_FILE, encryption)

    def charge(self, answer: Answer) -> None:
        """Record an answer; call this before computing it.

        An answer with the same content as an earlier one counts only its bytes. Raises
        RequestRefused if a limit would be exceeded, or if the site limits epsilon and an answer is
        not protected; then nothing is recorded.
        """
        with locked_folder(self.folder, require_locks=True, timeout=60.0):
            lines = _read_repaired(self.folder)
            line = self._make_line(answer, lines)
            self._require_within_limits(line, lines)
            _append(self.folder / ANSWERS, line)

    def _make_line(self, answer: Answer, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Return an answer as a line of the file, with a keyed digest of its content.

        An answer without content takes the content of the last line with its request and kind.
        """
        earlier = [
            line["content"]
            for line in lines
            if (line["request"], line["answer"]) == (answer.request, answer.kind)
        ]
        inputs = answer.content or answer.request
        content = derive_key(self._secret, "content", answer.kind, inputs).hex()[:32]
        return {
            "answer": answer.kind,
            "request": answer.request,
            "content": earlier[-1] if earlier and not answer.content else content,
            "bytes": answer.nbytes,
            "hidden": answer.protected,
        }

    def _require_within_limits(self, line: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        """Raise RequestRefused if a new line exceeds the limits, given all earlier lines."""
        limits, sent = self.limits, sum(each["bytes"] for each in lines)
        contents = {each["content"] for each in lines if each["answer"] == line["answer"]}
        if limits.epsilon and not all(each["hidden"] for each in (*lines, line)):
            raise RequestRefused(
                f"{self.folder} limits epsilon, and this answer or an earlier one has no noise to "
                "hide its examples: remove the limit, or name another dataset"
            ).with_code("unhidden")
        if limits.rounds and line["content"] not in contents and len(contents) >= limits.rounds:
            raise RequestRefused(
                f"{self.folder} has {len(contents)} answers of this kind, and the limit is "
                f"{limits.rounds}"
            ).with_code("limit-rounds")
        if limits.bytes and sent + line["bytes"] > limits.bytes:
            raise RequestRefused(
                f"{sent} bytes were sent from {self.folder}, and {line['bytes']} more exceed the "
                f"limit of {limits.bytes}"
            ).with_code("limit-bytes")


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """Return the answers of an account as dicts, without an incomplete last line.

    Raises FedplanError if the file cannot be read.
    """
    try:
        content = (folder / ANSWERS).read_bytes() if (folder / ANSWERS).exists() else b""
        return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    except (OSError, ValueError) as error:
        raise FedplanError(
            f"{folder / ANSWERS} cannot be read: {error}; restore a copy of it"
        ).with_code("disk") from error


def make_private_folder(folder: Path) -> None:
    """Create a folder and its missing parents with mode 0700, and sync them to disk.

    Raises StoreError if a folder cannot be created.
    """
    with wrap_disk_errors(f"{folder} cannot be created", "name a folder that you may write to"):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir(mode=0o700, exist_ok=True)
            sync_folder(path.parent)


def _read_repaired(folder: Path) -> list[dict[str, Any]]:
    """Create the file if missing, cut off an incomplete last line, and return all answers."""
    file = folder / ANSWERS
    with wrap_disk_errors(
        f"{file} cannot be written", "nothing is answered; repair the disk, then continue"
    ):
        file.touch(mode=0o600)
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    return read_answers(folder)


def _append(file: Path, line: dict[str, Any]) -> None:
    """Append a line to the file and sync it to disk; raise StoreError if that fails."""
    with (
        wrap_disk_errors(
            f"{file} cannot be written", "nothing is answered; repair the disk, then continue"
        ),
        file.open("ab", buffering=0) as out,
    ):
        content = json.dumps(line, sort_keys=True).encode() + b"\n"
        while content:
            content = content[out.write(content) or 0 :]
        os.fsync(out.fileno())
        sync_folder(file.parent)
