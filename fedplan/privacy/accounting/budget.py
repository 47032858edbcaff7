# SPDX-License-Identifier: Apache-2.0
"""Budget: a file of privacy charges, each written and synced before its release leaves.

Each line is a charge and a seal, a digest of the line and of the seal before it: a line that is
changed, moved or lost from the middle is noticed.
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
from fedplan.privacy.accounting.events import (
    Charge,
    Event,
    charge_from_json,
    charge_to_json,
    composed_events,
)
from fedplan.privacy.errors import PrivacyError
from fedplan.storage.failpoints import failpoint
from fedplan.storage.locks import locked_folder, sync_folder

Unit = Literal["client", "example"]
"""The unit of privacy: client-level or example-level DP."""
FORMAT = 1
"""Version of the file, written in its first line."""

_LINE = re.compile(rb'\{"seal": "([0-9a-f]{32})", "line": (\{.*\})\}')


@dataclass
class _FileState:
    """The content of a budget's file, as last read or written.

    charges: all charges, in order.
    seal: digest chained over all whole lines; `last` and `length`: the byte at which the last whole
    line starts and ends.
    epsilon: epsilon of all charges, None until computed.
    settled: whether this process has synced the last line.
    """

    charges: list[Charge] = field(default_factory=list[Charge])
    seal: str = ""
    last: int = 0
    length: int = 0
    epsilon: float | None = None
    settled: bool = False


@dataclass(frozen=True)
class EpsilonCap:
    """A limit on charges whose name starts with `name_prefix`: at most `epsilon` at `delta`."""

    epsilon: float
    delta: float
    name_prefix: str = ""


class Budget:
    """A file of privacy charges (entries that pay for releases), with limits on the total epsilon.

    Call `charge` before each release. The constructor reads the file; the first charge creates it.
    limit: largest epsilon of all charges at `delta`; None: no limit.
    unit: unit of privacy; a file of the other unit is refused. accountant: "pld" or "rdp".
    cap: a further limit, on the charges whose name starts with `cap.name_prefix` (those of a run);
    a new charge counts towards the cap whatever its name.
    Several processes may use one file: each charge locks the folder, which must exist. Raises a
    PrivacyError for wrong settings, and for a file that was changed or cannot be read.
    """

    def __init__(
        self,
        file: Path,
        *,
        delta: float,
        limit: float | None = None,
        unit: Unit = "client",
        accountant: str = "pld",
        cap: EpsilonCap | None = None,
    ) -> None:
        if unit not in get_args(Unit):
            raise PrivacyError(f"the unit is {unit!r}: it is a client or an example")
        if limit is not None and not limit > 0:
            raise PrivacyError(f"the limit is {limit!r}: give an epsilon above 0, or None")
        self.file, self.delta, self.limit = file, delta, limit
        self.unit, self.accountant, self.cap = unit, accountant, cap
        epsilon([], delta, accountant)  # refuses a wrong delta or accountant
        self._last_state, self._stale = self._read(), False

    @property
    def charges(self) -> tuple[Charge, ...]:
        """All charges, in order."""
        return tuple(self._state.charges)

    def epsilon_spent(self, *more: Charge) -> float:
        """Epsilon of all charges, and of `more` as if they were charged too, at `delta`."""
        if more:
            return self._epsilon_with(*more)
        if self._state.epsilon is None:
            self._state.epsilon = self._epsilon_with()
        return self._state.epsilon

    def epsilon_spent_under(self, cap: EpsilonCap, *more: Charge) -> float:
        """Epsilon of the charges under a cap, and of `more`, at the cap's delta."""
        charges = [each for each in self._state.charges if each.name.startswith(cap.name_prefix)]
        return epsilon(composed_events([*charges, *more]), cap.delta, self.accountant)

    @property
    def epsilon_left(self) -> float | None:
        """The limit minus epsilon spent; None without a limit."""
        return None if self.limit is None else self.limit - self.epsilon_spent()

    def charge(self, event: Event, name: str, *, digest: str = "") -> None:
        """Append a charge for a release to the file and sync. Release only after this returns.

        name: of the release; digest: of the released content. If the file has an equal charge
        (event, name and digest), nothing is appended: the same bytes are released again. Another
        digest under the same name is charged again. Raises a PrivacyError, with no charge added, if
        the limit or cap would be passed or the name has a charge of another event; also if the file
        cannot be written, was changed or has lost charges. Raises StoreError if the folder is
        locked by another process for 60 s, or cannot be locked.
        """
        charge = Charge(event, name, digest)
        with self._open() as file:
            self._settle(file)
            same_name = [earlier for earlier in self._state.charges if earlier.name == name]
            for earlier in same_name:
                if earlier.event != event:
                    raise PrivacyError(
                        f"{name} was charged as {earlier.event}, not as {event}: "
                        "what is released again is released as it was"
                    )
            if charge in same_name:
                return
            after = self.require_affordable(charge)
            failpoint("budget.before")
            self._append(file, charge_to_json(charge))
            self._state.charges.append(charge)
            self._state.epsilon = after

    def _epsilon_with(self, *more: Charge) -> float:
        return epsilon(composed_events([*self._state.charges, *more]), self.delta, self.accountant)

    def require_affordable(self, *due: Charge) -> float | None:
        """Raise a PrivacyError if charges that are still due would pass the cap or the limit.

        Writes nothing; due charges that are in the file already are ignored. Returns epsilon of all
        charges and the due ones at `delta`. Returns None if this epsilon was not computed: without
        a limit, or if nothing is due and no epsilon has been computed before.
        """
        due = tuple(each for each in due if each not in self._state.charges)
        if not due:
            return self._state.epsilon
        if self.cap and (after := self.epsilon_spent_under(self.cap, *due)) > self.cap.epsilon:
            raise PrivacyError(
                f"{due[-1].name} would make epsilon {after:.4g}, and {self.cap.epsilon:g} was "
                "promised: the run ends here, with epsilon "
                f"{self.epsilon_spent_under(self.cap):.4g} spent"
            ).with_code("epsilon")
        if self.limit is None:
            return None
        after = self._epsilon_with(*due)
        if after > self.limit:
            raise PrivacyError(
                f"epsilon would be {after:.6g} and may be {self.limit:g}: nothing more is "
                "released; end the run, or raise the limit and say so"
            ).with_code("limit-epsilon")
        return after

    @property
    def _state(self) -> _FileState:
        """Content of the file as last read or written. Reads the file again after an error."""
        if self._stale:
            self._last_state, self._stale = self._read_on(self._last_state), False
        return self._last_state

    @contextmanager
    def _open(self) -> Generator[BinaryIO]:
        """Open the file for writing under a lock on the folder; create the file if missing.

        Waits up to 60 s for the lock (then StoreError), and reads charges that other processes have
        written. An OSError in the context becomes a PrivacyError; after any exception the file is
        read again before the next use.
        """
        try:
            with locked_folder(self.file.parent, require_locks=True, timeout=60.0):
                self.file.touch(0o600)
                if self._state.length == 0:
                    sync_folder(self.file.parent)
                with self.file.open("r+b", buffering=0) as file:
                    if file.seek(0, os.SEEK_END) != self._state.length:
                        self._last_state = self._read_on(self._state)
                    yield file
        except BaseException as error:
            # After any error, an interrupt too, the file on disk decides.
            self._stale = True
            if not isinstance(error, OSError):
                raise
            raise PrivacyError(
                f"{self.file} cannot be written: {error}; nothing is released; repair the disk "
                "and resume"
            ) from error

    def _settle(self, file: BinaryIO) -> None:
        """Make the file ready for the next line, unless the state is settled already.

        Writes the header line of a new file. Of an old file, cuts off a torn line, writes the last
        whole line again, and syncs.
        """
        # The last line is written once more: after a sync that failed, another one may succeed
        # though the line was never stored.
        if self._state.settled:
            return
        if self._state.length == 0:
            file.truncate(0)
            self._append(file, {"format": FORMAT, "unit": self.unit})
            return
        file.seek(self._state.last)
        line = file.read(self._state.length - self._state.last).rstrip(b"\n") + b"\n"
        _write(file, self._state.last, line)
        self._state.length = file.tell()
        file.truncate()
        os.fsync(file.fileno())
        self._state.settled = True

    def _append(self, file: BinaryIO, data: dict[str, object]) -> None:
        """Write and sync `data` as a sealed JSON line at the end of the file; update the state."""
        body = json.dumps(data, sort_keys=True, allow_nan=False).encode()
        seal = _seal(self._state.seal, body)
        _write(file, self._state.length, b'{"seal": "%s", "line": %s}\n' % (seal.encode(), body))
        failpoint("budget.written")
        os.fsync(file.fileno())
        self._state.seal, self._state.last = seal, self._state.length
        self._state.length, self._state.settled = file.tell(), True
        failpoint("budget.synced")

    def _read_on(self, before: _FileState) -> _FileState:
        """Read the file again; raise a PrivacyError if charges of the state `before` are lost."""
        after = self._read()
        if after.charges[: len(before.charges)] != before.charges:
            raise PrivacyError(
                f"{self.file} no longer holds all {len(before.charges)} charges: put it back"
            )
        return after

    def _read(self) -> _FileState:
        """Read the file; no file gives an empty state. A torn last line is ignored.

        Raises a PrivacyError if any other line is unreadable or has a wrong seal, and for another
        unit or format in the first line.
        """
        try:
            content = self.file.read_bytes() if self.file.exists() else b""
        except OSError as error:
            raise PrivacyError(f"{self.file} cannot be read: {error}") from error
        state = _FileState()
        *lines, tail = content.split(b"\n")
        for number, line in enumerate(lines, start=1):
            body = _verified_body(state.seal, _LINE.fullmatch(line))
            if body is None:
                raise PrivacyError(
                    f"line {number} of {self.file} was changed or is lost: put a copy of the file "
                    "back; without it nobody knows what was spent"
                )
            self._add_line(state, body, len(line) + 1)
        match = _LINE.match(tail)
        if match and (body := _verified_body(state.seal, match)) is not None:
            self._add_line(state, body, match.end())
        return state

    def _add_line(self, state: _FileState, body: bytes, size: int) -> None:
        """Add a verified line to the state: a charge, or the header if the line is the first.

        body: the line's JSON without the seal; size: bytes of the line. Raises a PrivacyError for
        invalid JSON or charges, and for a header of another unit or format.
        """
        try:
            data: object = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise PrivacyError(f"{self.file} holds what is not JSON: {error}") from error
        if state.length:
            state.charges.append(charge_from_json(data))
        elif data != {"format": FORMAT, "unit": self.unit}:
            raise PrivacyError(
                f"{self.file} begins with {data}, and this run counts by {self.unit}, format "
                f"{FORMAT}: what was spent by one unit is not spent by the other"
            )
        state.seal = _seal(state.seal, body)
        state.last, state.length = state.length, state.length + size


def read_budget_unit(file: Path) -> Unit:
    """Unit in the first line of a budget's file; "example" if there is no file."""
    with file.open("rb") if file.exists() else BytesIO() as lines:
        return "client" if b'"client"' in lines.readline() else "example"


def _seal(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:32]


def _verified_body(before: str, match: re.Match[bytes] | None) -> bytes | None:
    """Body of a line whose seal follows from the seal `before`; None for any other line."""
    if match is None or match[1].decode() != _seal(before, match[2]):
        return None
    return match[2]


def _write(file: BinaryIO, at: int, content: bytes) -> None:
    """Write all bytes at a position: one write of a raw file may take fewer."""
    file.seek(at)
    while content:
        content = content[file.write(content) or 0 :]
