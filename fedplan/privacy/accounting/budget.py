# SPDX-License-Identifier: Apache-2.0
"""Budget: a file of charges that is written and synced before anything is released.

Each line is a charge and a seal, which is a digest of it and of the seal before: no line can be
changed, lost from the middle or moved without being noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Literal, get_args

from fedplan.privacy.accounting.accountant import epsilon
from fedplan.privacy.accounting.events import Event, Spent, events_of, read_spent, written_spent
from fedplan.privacy.errors import PrivacyError
from fedplan.storage.failpoints import reach
from fedplan.storage.locks import alone, synced

Unit = Literal["client", "example"]
FORMAT = 1

_LINE = re.compile(rb'\{"seal": "([0-9a-f]{32})", "line": (\{.*\})\}')


@dataclass
class _Held:
    """What a file holds: its charges, and the seal, the start and the end of the last good line."""

    charges: list[Spent] = field(default_factory=list[Spent])
    seal: str = ""
    last: int = 0
    length: int = 0
    epsilon: float | None = None
    settled: bool = False


@dataclass(frozen=True)
class Cap:
    """An epsilon that some charges of a file may not pass: those whose names begin with `of`."""

    epsilon: float
    delta: float
    of: str = ""


class Budget:
    """What was spent, on disk, and what may still be spent.

    `unit` says whose presence is hidden: a client's, or an example's. Without a limit all is
    charged and nothing refused. A `cap` holds for one run among those that a file is of. Whoever
    has a charge may release; whoever was killed before it was synced has not, and charges it again.
    """

    def __init__(
        self,
        file: Path,
        *,
        delta: float,
        limit: float | None = None,
        unit: Unit = "client",
        accountant: str = "pld",
        cap: Cap | None = None,
    ) -> None:
        if unit not in get_args(Unit):
            raise PrivacyError(f"the unit is {unit!r}: it is a client or an example")
        if limit is not None and not limit > 0:
            raise PrivacyError(f"the limit is {limit!r}: give an epsilon above 0, or None")
        self.file, self.delta, self.limit = file, delta, limit
        self.unit, self.accountant, self.cap = unit, accountant, cap
        epsilon([], delta, accountant)  # refuses a wrong delta or accountant
        self._found, self._doubtful = self._read(), False

    @property
    def charges(self) -> tuple[Spent, ...]:
        """All that was charged, in order."""
        return tuple(self._held.charges)

    def spent(self, *more: Spent) -> float:
        """The epsilon of all charges, and of some that might come."""
        if more:
            return self._with(*more)
        if self._held.epsilon is None:
            self._held.epsilon = self._with()
        return self._held.epsilon

    def spent_of(self, cap: Cap, *more: Spent) -> float:
        """The epsilon of the charges that a cap is for, at its delta, and of some that may come."""
        charges = [each for each in self._held.charges if each.about.startswith(cap.of)]
        return epsilon(events_of([*charges, *more]), cap.delta, self.accountant)

    @property
    def left(self) -> float | None:
        """How far the limit is from what was spent; None without one."""
        return None if self.limit is None else self.limit - self.spent()

    def charge(self, event: Event, about: str, *, digest: str = "") -> None:
        """Write a charge down for good, or refuse it: release only after this returns.

        To charge the same event about the same thing again is free: the same bytes are released
        again. With another `digest` it is another content, and is charged as such. Another event
        under the same name is an error.
        """
        spent = Spent(event, about, digest)
        with self._open() as file:
            self._settle(file)
            if self._known(spent):
                return
            after = self.require_room(spent)
            reach("budget.before")
            self._append(file, written_spent(spent))
            self._held.charges.append(spent)
            self._held.epsilon = after

    def _known(self, spent: Spent) -> bool:
        same = [charge for charge in self._held.charges if charge.about == spent.about]
        for charge in same:
            if charge.event != spent.event:
                raise PrivacyError(
                    f"{spent.about} was charged as {charge.event}, not as {spent.event}: "
                    "what is released again is released as it was"
                )
        return spent in same

    def _with(self, *more: Spent) -> float:
        return epsilon(events_of([*self._held.charges, *more]), self.delta, self.accountant)

    def require_room(self, *due: Spent) -> float | None:
        """Refuse what the limit or the cap does not pay for.

        What will have been spent; None if nobody needs to know.
        """
        due = tuple(each for each in due if each not in self._held.charges)
        if not due:
            return self._held.epsilon
        if self.cap and (after := self.spent_of(self.cap, *due)) > self.cap.epsilon:
            raise PrivacyError(
                f"{due[-1].about} would make epsilon {after:.4g}, and {self.cap.epsilon:g} was "
                f"promised: the run ends here, with epsilon {self.spent_of(self.cap):.4g} spent"
            ).coded("promise")
        if self.limit is None:
            return None
        after = self._with(*due)
        if after > self.limit:
            raise PrivacyError(
                f"epsilon would be {after:.6g} and may be {self.limit:g}: nothing more is "
                "released; end here, or raise the limit for all to see"
            ).coded("limit-epsilon")
        return after

    @property
    def _held(self) -> _Held:
        """What the file held when it was last read; after an error it is read anew."""
        if self._doubtful:
            self._found, self._doubtful = self._read_on(self._found), False
        return self._found

    @contextmanager
    def _open(self) -> Generator[BinaryIO]:
        """The file, with no other process at it."""
        try:
            with alone(self.file.parent, strictly=True, wait=60.0):
                self.file.touch(0o600)
                if self._held.length == 0:
                    synced(self.file.parent)
                with self.file.open("r+b", buffering=0) as file:
                    if file.seek(0, os.SEEK_END) != self._held.length:
                        self._found = self._read_on(self._held)
                    yield file
        except BaseException as error:
            # Whatever broke in, an interrupt too: what is on disk decides.
            self._doubtful = True
            if not isinstance(error, OSError):
                raise
            raise PrivacyError(
                f"{self.file} cannot be written: {error}; release nothing, mend the disk, go on"
            ) from error

    def _settle(self, file: BinaryIO) -> None:
        """Cut off a line that was never finished, and put on disk what a killed process left.

        The last line is written once more: after a sync that failed, another one may say that all
        is well though the line was never stored.
        """
        if self._held.settled:
            return
        if self._held.length == 0:
            file.truncate(0)
            self._append(file, {"format": FORMAT, "unit": self.unit})
            return
        file.seek(self._held.last)
        line = file.read(self._held.length - self._held.last).rstrip(b"\n") + b"\n"
        _write(file, self._held.last, line)
        self._held.length = file.tell()
        file.truncate()
        os.fsync(file.fileno())
        self._held.settled = True

    def _append(self, file: BinaryIO, data: dict[str, object]) -> None:
        body = json.dumps(data, sort_keys=True, allow_nan=False).encode()
        seal = _seal(self._held.seal, body)
        _write(file, self._held.length, b'{"seal": "%s", "line": %s}\n' % (seal.encode(), body))
        reach("budget.written")
        os.fsync(file.fileno())
        self._held.seal, self._held.last = seal, self._held.length
        self._held.length, self._held.settled = file.tell(), True
        reach("budget.synced")

    def _read_on(self, before: _Held) -> _Held:
        """What another process added; what was charged once stays."""
        after = self._read()
        if after.charges[: len(before.charges)] != before.charges:
            raise PrivacyError(
                f"{self.file} no longer holds all {len(before.charges)} charges: put it back"
            )
        return after

    def _read(self) -> _Held:
        """All charges of the file. Only a last line without its end may be unreadable."""
        try:
            content = self.file.read_bytes() if self.file.exists() else b""
        except OSError as error:
            raise PrivacyError(f"{self.file} cannot be read: {error}") from error
        held = _Held()
        *lines, tail = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            body = _opened(held.seal, _LINE.fullmatch(line))
            if body is None:
                raise PrivacyError(
                    f"line {number} of {self.file} was changed or is lost: put a copy of the file "
                    "back; without it nobody knows what was spent"
                )
            self._take(held, body, len(line) + 1)
        found = _LINE.match(tail)
        if found and (body := _opened(held.seal, found)) is not None:
            self._take(held, body, found.end())
        return held

    def _take(self, held: _Held, body: bytes, size: int) -> None:
        try:
            data: object = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise PrivacyError(f"{self.file} holds what is not JSON: {error}") from error
        if held.length:
            held.charges.append(read_spent(data))
        elif data != {"format": FORMAT, "unit": self.unit}:
            raise PrivacyError(
                f"{self.file} begins with {data}, and this run counts by {self.unit}, format "
                f"{FORMAT}: what was spent by one unit is not spent by the other"
            )
        held.seal = _seal(held.seal, body)
        held.last, held.length = held.length, held.length + size


def unit_in(file: Path) -> Unit:
    """By which unit a file counts, as its first line says; a budget of the other refuses it."""
    with file.open("rb") if file.exists() else BytesIO() as lines:
        return "client" if b'"client"' in lines.readline() else "example"


def _seal(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:32]


def _opened(before: str, found: re.Match[bytes] | None) -> bytes | None:
    """What a line says, if its seal follows from it and from the line before."""
    if found is None or found[1].decode() != _seal(before, found[2]):
        return None
    return found[2]


def _write(file: BinaryIO, at: int, content: bytes) -> None:
    """Write all of it: a raw file may take less at a time."""
    file.seek(at)
    while content:
        content = content[file.write(content) or 0 :]
