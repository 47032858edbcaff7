# SPDX-License-Identifier: Apache-2.0
"""Budget: a hash-chained log of privacy charges, each on disk before its release leaves."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, get_args

from fedplan.errors import PrivacyError, StoreError
from fedplan.privacy.accounting.accountant import (
    Charge,
    Event,
    charge_from_json,
    charge_to_json,
    composed_events,
    epsilon,
)
from fedplan.storage.append_log import AppendLog, DamagedLog

Unit = Literal["client", "example"]
"""The unit of privacy: client-level or example-level DP."""
FORMAT = 1
"""Version of the file, written in its first line."""


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
    unit: unit of privacy; a file of the other unit is refused.
    cap: a further limit, on the charges whose name starts with `cap.name_prefix` (those of a run);
    a new charge counts towards the cap whatever its name.
    Several processes may use one file, whose folder must exist: each charge locks the file. Raises
    a PrivacyError for wrong settings, and for a file that was changed or cannot be read.
    """

    def __init__(
        self,
        file: Path,
        *,
        delta: float,
        limit: float | None = None,
        unit: Unit = "client",
        cap: EpsilonCap | None = None,
    ) -> None:
        if unit not in get_args(Unit):
            raise PrivacyError(f"the unit is {unit!r}: it is a client or an example")
        if limit is not None and not limit > 0:
            raise PrivacyError(f"the limit is {limit!r}: give an epsilon above 0, or None")
        self.file, self.delta, self.limit = file, delta, limit
        self.unit, self.cap = unit, cap
        epsilon([], delta)  # refuses a wrong delta
        self._log = AppendLog(file, chained=True)
        self._entries: list[dict[str, Any]] = []
        self._charges: list[Charge] = []
        self._epsilon: float | None = None
        self._refresh()

    @property
    def charges(self) -> tuple[Charge, ...]:
        """All charges, in order."""
        return tuple(self._refresh())

    def epsilon_spent(self, *more: Charge) -> float:
        """Epsilon of all charges, and of `more` as if they were charged too, at `delta`."""
        if more:
            return self._epsilon_with(*more)
        self._refresh()
        if self._epsilon is None:
            self._epsilon = self._epsilon_with()
        return self._epsilon

    def epsilon_spent_under(self, cap: EpsilonCap, *more: Charge) -> float:
        """Epsilon of the charges under a cap, and of `more`, at the cap's delta."""
        charges = [each for each in self._refresh() if each.name.startswith(cap.name_prefix)]
        return epsilon(composed_events([*charges, *more]), cap.delta)

    def charge(self, event: Event, name: str, *, digest: str = "") -> None:
        """Append a charge for a release to the file and sync. Release only after this returns.

        If the file has an equal charge (event, name and digest), nothing is appended: the same
        bytes are released again. Another digest under the same name is charged again. Raises a
        PrivacyError, with no charge added, if the limit or cap would be passed, the name has a
        charge of another event, or the file cannot be written, was changed or has lost charges.
        Raises StoreError if the folder is locked by another process for 60 s.
        """
        charge = Charge(event, name, digest)
        try:
            with self._log.locked():
                same_name = [earlier for earlier in self._refresh() if earlier.name == name]
                for earlier in same_name:
                    if earlier.event != event:
                        raise PrivacyError(
                            f"{name} was charged as {earlier.event}, not as {event}: "
                            "what is released again is released as it was"
                        )
                if charge in same_name:
                    return
                after = self.require_affordable(charge)
                if not self._entries:
                    self._log.append({"format": FORMAT, "unit": self.unit})
                self._log.append(charge_to_json(charge))
                self._refresh()
                self._epsilon = after
        except (StoreError, DamagedLog) as error:
            raise PrivacyError(f"{error}; nothing is released") from error

    def _epsilon_with(self, *more: Charge) -> float:
        return epsilon(composed_events([*self._refresh(), *more]), self.delta)

    def require_affordable(self, *due: Charge) -> float | None:
        """Raise a PrivacyError if charges that are still due would pass the cap or the limit.

        Writes nothing; due charges that are in the file already are ignored. Returns epsilon of all
        charges and the due ones, or None if it was not computed.
        """
        due = tuple(each for each in due if each not in self._refresh())
        if not due:
            return self._epsilon
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

    def _refresh(self) -> list[Charge]:
        """Read the log if it has changed; return all charges, a list that must not be changed.

        Raises a PrivacyError for a log that is damaged, of another unit or format, or lacks
        charges.
        """
        with self._log.thread_lock:
            try:
                entries = self._log.read()
            except (DamagedLog, OSError) as error:
                raise PrivacyError(f"{error}; without it nobody knows what was spent") from error
            parsed = self._charges if entries is self._entries else []
            if entries is self._entries and len(entries) == bool(entries) + len(parsed):
                return self._charges
            header = {"format": FORMAT, "unit": self.unit}
            first, *lines = [
                {name: value for name, value in entry.items() if name != "before"}
                for entry in [*(entries[:1] or [header]), *entries[1 + len(parsed) :]]
            ]
            if first != header:
                raise PrivacyError(
                    f"{self.file} begins with {first}, and this run counts by {self.unit}, format "
                    f"{FORMAT}: what was spent by one unit is not spent by the other"
                )
            charges = [*parsed, *map(charge_from_json, lines)]
            if charges[: len(self._charges)] != self._charges:
                raise PrivacyError(
                    f"{self.file} no longer holds all {len(self._charges)} charges: put it back"
                )
            self._entries, self._charges, self._epsilon = entries, charges, None
            return charges


def read_budget_unit(file: Path) -> Unit:
    """Unit in the first line of a budget's file; "example" if there is no file."""
    with file.open("rb") if file.exists() else BytesIO() as lines:
        return "client" if b'"client"' in lines.readline() else "example"
