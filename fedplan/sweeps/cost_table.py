# SPDX-License-Identifier: Apache-2.0
"""Cost of a method for a study: forecast of bytes, epsilon and memory, and measured time."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

from fedplan.errors import FedplanError

BITS_PER_UNIT = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
DEFAULT_LINE = "100Mbit"
"""Default speed of a site's network line, per second."""

_SPEED = re.compile(r"(\d+(?:\.\d+)?) ?([kMG]bit)(?:/s)?", re.IGNORECASE)


def parse_line_speed(line: str) -> float:
    """Return the bits per second of a line speed; raise FedplanError if `line` is invalid or 0.

    >>> parse_line_speed("100Mbit"), parse_line_speed("2.5 Gbit/s")
    (100000000.0, 2500000000.0)
    """
    match = _SPEED.fullmatch(line.strip())
    if match is None or not float(match[1]):
        raise FedplanError(f"--line is {line!r}: give a speed per second as 10Mbit or 1Gbit")
    return float(match[1]) * BITS_PER_UNIT[match[2].lower()]


@dataclass(frozen=True)
class CostForecast:
    """The cost of a whole run for a client that takes part in every round, without training.

    `plan`: the plan's text. `rounds`: number of rounds. `upload_bytes`, `download_bytes`: upper
    bounds of the sum over all rounds. `epsilon`: None without DP. `memory_bytes`: of a training
    step, None if not known. `stages`: number of the plan's stages (rounds with the same roles).
    """

    plan: str
    rounds: int
    upload_bytes: int
    download_bytes: int
    epsilon: float | None
    memory_bytes: int | None
    stages: int


@dataclass(frozen=True)
class MeasuredCost:
    """Measurements of a short run on this machine.

    `score`: the metric after the last of `rounds_run` rounds. `step_seconds`: mean time of a
    training step, with all work of a round except evaluation. `max_steps`: steps of the longest
    turn (one client in one round). `steps_reported`: false if DP hides the steps; then each turn
    counts as one step.
    """

    rounds_run: int
    score: float | None
    step_seconds: float
    max_steps: int
    steps_reported: bool


@dataclass(frozen=True)
class MethodCost:
    """The cost of one method: `forecast` and `measured`, or the `error` of a method that failed.

    `method`: the name, with settings. Times are for sites that compute as fast as this machine.
    """

    method: str
    forecast: CostForecast | None = None
    measured: MeasuredCost | None = None
    error: str = ""

    @property
    def compute_seconds(self) -> float:
        """Seconds of computation of the slowest client in all rounds, on a machine like this.

        Returns 0 if the method failed.
        """
        if self.forecast is None or self.measured is None:
            return 0.0
        return self.forecast.rounds * self.measured.max_steps * self.measured.step_seconds

    def transfer_seconds(self, bits: float) -> float:
        """Return the seconds to transfer the bytes of all rounds at `bits` per second."""
        if self.forecast is None:
            return 0.0
        return 8 * (self.forecast.upload_bytes + self.forecast.download_bytes) / bits

    def total_seconds(self, bits: float) -> float:
        """Return the seconds of all rounds, if all sites compute and transfer at the same time."""
        return self.compute_seconds + self.transfer_seconds(bits)

    def json(self, bits: float) -> dict[str, Any]:
        """Return the cost as plain values, with times for a line of `bits` per second."""
        return {
            "method": self.method,
            "forecast": asdict(self.forecast) if self.forecast else None,
            "measured": asdict(self.measured) if self.measured else None,
            "error": self.error,
            "compute_seconds": self.compute_seconds,
            "transfer_seconds": self.transfer_seconds(bits),
        }
