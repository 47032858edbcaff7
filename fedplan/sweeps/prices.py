# SPDX-License-Identifier: Apache-2.0
"""Prices: what a method would cost a study, by a forecast and by a short run of it."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from fedplan.errors import FedplanError

BIT = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LINE = "100Mbit"
"""The speed of a site's line, if none is said."""

_SPEED = re.compile(r"(\d+(?:\.\d+)?) ?([kMG]bit)(?:/s)?", re.IGNORECASE)


def bits_of(line: str) -> float:
    """Bits a second of a line.

    >>> bits_of("100Mbit"), bits_of("2.5 Gbit/s")
    (100000000.0, 2500000000.0)
    """
    found = _SPEED.fullmatch(line.strip())
    if found is None or not float(found[1]):
        raise FedplanError(f"--line is {line!r}: say it as 10Mbit, 100Mbit or 1Gbit, a second")
    return float(found[1]) * BIT[found[2].lower()]


@dataclass(frozen=True)
class Forecasted:
    """What follows from shapes and from the study alone, for a client that takes part in it all.

    Bytes are at most so many; `stages` are how often the plan says something else.
    """

    plan: str
    rounds: int
    up: int
    down: int
    epsilon: float | None
    memory: int | None
    stages: int


@dataclass(frozen=True)
class Measured:
    """What a short run on this machine gave.

    `step` is the time of a step with all that goes with it, but for scoring; `longest` are the
    steps of the longest turn. Where steps are not `told`, a turn counts as one.
    """

    played: int
    score: float | None
    step: float
    longest: int
    told: bool


@dataclass(frozen=True)
class Price:
    """One method of a price list; `error` is why it has none."""

    method: str
    forecast: Forecasted | None = None
    measured: Measured | None = None
    error: str = ""

    @property
    def compute(self) -> float:
        """Seconds that the slowest site computes in all rounds, if it is as this machine is."""
        if self.forecast is None or self.measured is None:
            return 0.0
        return self.forecast.rounds * self.measured.longest * self.measured.step

    def travel(self, bits: float) -> float:
        """Seconds that its bytes are on their way in all rounds, at so many bits a second."""
        if self.forecast is None:
            return 0.0
        return 8 * (self.forecast.up + self.forecast.down) / bits

    def seconds(self, bits: float) -> float:
        """Seconds of all rounds, as sites compute and send at the same time."""
        return self.compute + self.travel(bits)

    def json(self, bits: float) -> dict[str, Any]:
        """It as plain values."""
        said = asdict(self)
        return said | {"seconds_compute": self.compute, "seconds_travel": self.travel(bits)}
