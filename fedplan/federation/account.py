# SPDX-License-Identifier: Apache-2.0
"""Accounts: all that a site has answered from one of its datasets, and the limits it sets itself.

There is one for all studies, runs and seeds. Which dataset it is of is the site's own word, and
never the server's. An answer is counted by what it is made of, whatever its request is called.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.messages import Refused
from fedplan.privacy.guard import SECRET
from fedplan.privacy.mechanisms.secret import derived, secret_of
from fedplan.storage.encryption import Encryption
from fedplan.storage.errors import explained
from fedplan.storage.locks import alone, synced

ANSWERS = "answers.jsonl"
DELTA = 1e-5
"""The delta that a site's epsilon is of, if it says no other."""


@dataclass(frozen=True)
class Limits:
    """Where a site stops by itself: after so many rounds, before so many bytes or so much epsilon.

    0 is no limit. `rounds` are turns, and as many polls. `delta` is what its epsilon is of.
    """

    rounds: int = 0
    bytes: int = 0
    epsilon: float = 0.0
    delta: float = DELTA


@dataclass(frozen=True)
class Answer:
    """One answer: of what kind, to which request, made of what, and how many bytes of values.

    `hidden` says that noise hides every row in it, or that it looks at none.
    """

    kind: str
    request: str
    content: str
    nbytes: int
    hidden: bool = False


class Account:
    """A folder with a secret, the charges of all that is hidden, and a line for every answer."""

    def __init__(
        self, folder: Path, limits: Limits | None = None, *, seal: Encryption | None = None
    ) -> None:
        self.folder, self.limits, self.seal = folder, limits or Limits(), seal
        private_folder(folder)
        self._secret = secret_of(folder / SECRET, seal)

    def admit(self, answer: Answer) -> None:
        """Count an answer before any work is done for it, or refuse it.

        The same content again counts its bytes alone.
        """
        with alone(self.folder, strictly=True, wait=60.0):
            lines = _settled(self.folder)
            line = self._line(answer, lines)
            self._require(line, lines)
            _append(self.folder / ANSWERS, line)

    def _line(self, answer: Answer, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """An answer as a line. One from a journal is made of what it was made of the first time."""
        known = [line for line in lines if line["request"] == answer.request]
        known = [line["content"] for line in known if line["answer"] == answer.kind]
        made_of = answer.content or answer.request
        content = derived(self._secret, "content", answer.kind, made_of).hex()[:32]
        return {
            "answer": answer.kind,
            "request": answer.request,
            "content": known[-1] if known and not answer.content else content,
            "bytes": answer.nbytes,
            "hidden": answer.hidden,
        }

    def _require(self, line: dict[str, Any], lines: list[dict[str, Any]]) -> None:
        limits, sent = self.limits, sum(each["bytes"] for each in lines)
        made = {each["content"] for each in lines if each["answer"] == line["answer"]}
        if limits.epsilon and not all(each["hidden"] for each in (*lines, line)):
            raise Refused(
                f"{self.folder} has a limit of epsilon, and no noise hides the rows in this answer "
                "or in one before: take the limit away, or name another dataset"
            ).coded("unhidden")
        if limits.rounds and line["content"] not in made and len(made) >= limits.rounds:
            raise Refused(
                f"{self.folder} has {len(made)} answers of this kind, the limit is {limits.rounds}"
            ).coded("limit-rounds")
        if limits.bytes and sent + line["bytes"] > limits.bytes:
            raise Refused(
                f"{self.folder} has let {sent} bytes out, {line['bytes']} more would pass the "
                f"limit, {limits.bytes}"
            ).coded("limit-bytes")


def read_answers(folder: Path) -> list[dict[str, Any]]:
    """The lines of an account; one that a kill cut off is not among them."""
    try:
        content = (folder / ANSWERS).read_bytes() if (folder / ANSWERS).exists() else b""
        return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    except (OSError, ValueError) as error:
        raise FedplanError(
            f"{folder / ANSWERS} cannot be read: {error}; put a copy of it back"
        ).coded("disk") from error


def private_folder(folder: Path) -> None:
    """Make a folder, and those that it lies in, that only their owner may enter."""
    with explained(f"{folder} cannot be made", "name a folder that you may write to"):
        for each in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
            each.mkdir(mode=0o700, exist_ok=True)
            synced(each.parent)


def _settled(folder: Path) -> list[dict[str, Any]]:
    """All lines, with the file cut after the last of them: what was cut off was never counted."""
    file = folder / ANSWERS
    with explained(f"{file} cannot be written", "nothing is answered; mend the disk, then go on"):
        file.touch(mode=0o600)
        content = file.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(file, content.rfind(b"\n") + 1)
    return read_answers(folder)


def _append(file: Path, line: dict[str, Any]) -> None:
    with (
        explained(f"{file} cannot be written", "nothing is answered; mend the disk, then go on"),
        file.open("ab", buffering=0) as out,
    ):
        content = json.dumps(line, sort_keys=True).encode() + b"\n"
        while content:
            content = content[out.write(content) or 0 :]
        os.fsync(out.fileno())
        synced(file.parent)
