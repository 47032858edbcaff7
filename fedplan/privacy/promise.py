# SPDX-License-Identifier: Apache-2.0
"""Promises: whose presence a run hides, by how much noise, and what that will cost."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedplan.method import Method
from fedplan.phases import Planned
from fedplan.plan import Best
from fedplan.privacy.accountant import calibrate, epsilon
from fedplan.privacy.budget import Unit
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.events import Event, Release, Steps
from fedplan.probe import is_public


@dataclass(frozen=True)
class Promise:
    """What a run promises. All of it is public, and both ends agree on it.

    The unit is a client, whose whole change is clipped and hidden by the server's noise; or an
    example, hidden by the noise that its own site adds to every step. `noise` is a multiple of
    `clip`. `rate` is the chance of a client to be in a round, None if nobody draws; or that of an
    example to be in a step, of which a turn takes `steps`, each divided by `batch`.
    """

    unit: Unit
    epsilon: float
    delta: float
    clip: float
    noise: float
    rate: float | None = None
    steps: int = 0
    batch: int = 0

    @property
    def event(self) -> Event:
        """What one round costs, at most: an example is in one site, which is in every round."""
        if self.unit == "client":
            return Release(self.noise, self.rate)
        return Steps(self.noise, self.rate or 1.0, self.steps)

    def forecast(self, rounds: int) -> float:
        """The epsilon of so many rounds."""
        return epsilon([self.event] * rounds, self.delta)

    def calibrated(self, rounds: int) -> Promise:
        """The same with the least noise that keeps to epsilon over so many rounds."""

        def events(noise: float) -> list[Event]:
            return [replace(self, noise=noise).event] * rounds

        return replace(self, noise=calibrate(self.epsilon, self.delta, events))

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return repr(self)


def require_sound(promise: Promise, method: Method) -> None:
    """Refuse a method that does not hold together with a promise, and say what would."""
    refusals: list[tuple[bool, str]] = [
        (
            any(isinstance(each, Best) for each in method.plan.within())
            and not is_public(method.probe),
            "it chooses layers by scores of private rows, which is a release that nobody pays for: "
            "choose by chance, a fixed list or the last layers (probe random, last), or by a plan "
            "without best",
        ),
        (
            bool(method.riders),
            "what rides beside its params is not clipped: take a method without riders",
        ),
        (
            type(method.announce) is not Planned,
            "its phases follow what the clients did: plan them (method.phases)",
        ),
        (
            promise.unit == "example" and bool(method.wraps),
            "its local fit is its own, and only plain steps are known to be hidden: take a method "
            "without one, or hide clients (privacy.unit)",
        ),
    ]
    for wrong, why in refusals:
        if wrong:
            raise PrivacyError(f"this method does not hold together with privacy: {why}")
