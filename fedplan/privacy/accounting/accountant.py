# SPDX-License-Identifier: Apache-2.0
"""Accountant: the epsilon of a list of events, and the noise for a wanted epsilon.

Every epsilon is an upper bound. Gaussian sums without sampling are one Gaussian, whose epsilon is
known in closed form; whatever else there is goes through Google's dp-accounting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version as installed
from math import expm1, fsum, isfinite, log, log1p, sqrt
from typing import Any

import numpy as np
import torch

from fedplan.privacy.accounting.events import NOISES, Event, Release, Steps
from fedplan.privacy.errors import PrivacyError, needed

ACCOUNTANTS = ("pld", "rdp")
PRECISION = 1e-4
"""About how far the epsilon of a PLD may lie above the true one; the finer, the slower."""
_MOST_POINTS = 2**18
_SMALLEST = 1e-9
_WIDEST = 2000.0
"""Losses so wide, of an epsilon of hundreds, take too long by PLD: their bound is that of RDP."""
_PURPOSE = "to account for sampling"


@dataclass(frozen=True)
class _Parts:
    """Events as what composes: plain Gaussians by noise, sampled ones by noise and rate."""

    plain: Counter[float] = field(default_factory=Counter[float])
    sampled: Counter[tuple[float, float]] = field(default_factory=Counter[tuple[float, float]])

    @staticmethod
    def of(events: Iterable[Event]) -> _Parts:
        parts = _Parts()
        for event in events:
            match event:
                case Release(noise, None):
                    parts.plain[noise] += 1
                case Release(noise, rate) | Steps(noise, rate):
                    count = event.count if isinstance(event, Steps) else 1
                    parts._sample(noise, rate or 1.0, count)
        return parts

    def _sample(self, noise: float, rate: float, count: int) -> None:
        if rate == 1:
            self.plain[noise] += count
        else:
            self.sampled[noise, rate] += count

    @property
    def gaussian(self) -> float | None:
        """The noise of all plain Gaussians as one; None if there is none."""
        precision = fsum(count / noise**2 for noise, count in self.plain.items())
        return 1 / sqrt(precision) if precision else None


def epsilon(events: Iterable[Event], delta: float, accountant: str = "pld") -> float:
    """The epsilon of all events together, at a delta: an upper bound.

    It depends on what is charged and how often, not on the order, and not on which coordinates a
    release held: a plan that trains another part each round costs what a full one does.
    """
    if accountant not in ACCOUNTANTS:
        raise PrivacyError(f"there is no accountant {accountant!r}: pld and rdp there are")
    if type(delta) is not float or not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta!r}: give a number between 0 and 1, such as 1e-5")
    parts = _Parts.of(events)
    if accountant == "rdp":
        return _by_rdp(parts, delta)
    if parts.sampled:
        plain, sampled = (tuple(sorted(each.items())) for each in (parts.plain, parts.sampled))
        return _by_pld(plain, sampled, delta)
    return _by_gaussian(parts.gaussian, delta) if parts.gaussian else 0.0


def calibrate(
    target: float,
    delta: float,
    make_events: Callable[[float], Iterable[Event]],
    *,
    accountant: str = "pld",
) -> float:
    """The smallest noise, to one in ten thousand, whose events cost at most the target."""
    if not target > 0 or not isfinite(target):
        raise PrivacyError(f"the target epsilon is {target!r}: give a number above 0")

    def fits(noise: float) -> bool:
        return epsilon(make_events(noise), delta, accountant) <= target

    low, high = NOISES[0], 1.0
    while not fits(high):
        low, high = high, 4 * high
        if high > NOISES[1]:
            raise PrivacyError(
                f"no noise up to {NOISES[1]:g} gives epsilon {target}: something else costs more"
            )
    while high > low * 1.0001:
        middle = sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def version(accountant: str = "pld") -> str:
    """The accountant and its version, for a statement."""
    needed("dp_accounting", _PURPOSE)
    return f"{accountant.upper()} of dp-accounting {installed('dp-accounting')}"


def _by_gaussian(noise: float, delta: float) -> float:
    """Solve delta = Phi(1/2s - es) - exp(e) Phi(-1/2s - es) for e (Balle and Wang 2018, eq. 6)."""
    low, high = 0.0, 1.0
    if _log_delta(noise, low) <= log(delta):
        return 0.0
    while _log_delta(noise, high) > log(delta):
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _log_delta(noise, middle) > log(delta) else (low, middle)
    return high


def _log_delta(noise: float, epsilon: float) -> float:
    upper = _log_ndtr(1 / (2 * noise) - epsilon * noise)
    share = epsilon + _log_ndtr(-1 / (2 * noise) - epsilon * noise) - upper
    return upper + log(-expm1(share)) if share < 0 else -float("inf")


def _log_ndtr(x: float) -> float:
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))


def _by_rdp(parts: _Parts, delta: float) -> float:
    events = needed("dp_accounting.dp_event", _PURPOSE)
    found = needed("dp_accounting.rdp", _PURPOSE).RdpAccountant()
    if parts.gaussian:
        found.compose(events.GaussianDpEvent(parts.gaussian))
    for (noise, rate), count in sorted(parts.sampled.items()):
        found.compose(events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise)), count)
    return float(found.get_epsilon(delta)) if parts.gaussian or parts.sampled else 0.0


@lru_cache(256)
def _by_pld(
    plain: tuple[tuple[float, int], ...],
    sampled: tuple[tuple[tuple[float, float], int], ...],
    delta: float,
) -> float:
    """Kept, because all sites of a federation ask for the same at every turn."""
    parts = _Parts(Counter(dict(plain)), Counter(dict(sampled)))
    distributions = needed("dp_accounting.pld.privacy_loss_distribution", _PURPOSE)
    width = _width(parts)
    if width > _WIDEST:
        return _by_rdp(parts, delta)
    interval = max(_finest(parts), width / _MOST_POINTS, _SMALLEST)
    found = distributions.identity(interval)
    for piece, count in _pieces(parts, distributions, interval):
        found = found.compose(piece.self_compose(count) if count > 1 else piece)
    with np.errstate(over="ignore"):  # what overflows becomes infinite, and RDP has its bound
        spent = float(found.get_epsilon_for_delta(delta))
    return spent if isfinite(spent) else _by_rdp(parts, delta)


def _pieces(parts: _Parts, distributions: Any, interval: float) -> Iterable[tuple[Any, int]]:
    if parts.gaussian:
        yield (
            distributions.from_gaussian_mechanism(
                parts.gaussian, value_discretization_interval=interval
            ),
            1,
        )
    for (noise, rate), count in sorted(parts.sampled.items()):
        yield (
            distributions.from_gaussian_mechanism(
                noise, value_discretization_interval=interval, sampling_prob=rate
            ),
            count,
        )


def _gaussians(parts: _Parts) -> list[tuple[float, float, int]]:
    """Noise, rate and count of all Gaussians, the plain ones as one."""
    sampled = [(noise, rate, count) for (noise, rate), count in parts.sampled.items()]
    return [*sampled, (parts.gaussian, 1.0, 1)] if parts.gaussian else sampled


def _finest(parts: _Parts) -> float:
    """The step that a PLD needs: its error grows as the count of events times its square.

    It stays below the spread of each event's loss.
    """
    gaussians = _gaussians(parts)
    steps = [sqrt(_divergence(noise, rate)) / 4 for noise, rate, _ in gaussians]
    return min(sqrt(PRECISION / sum(count for *_, count in gaussians)), *steps)


def _width(parts: _Parts) -> float:
    """How far the losses of all events together reach, roughly."""
    width = 0.0
    for noise, rate, count in _gaussians(parts):
        loss = count * _divergence(noise, rate)
        width += loss + 12 * sqrt(2 * loss) + _largest_loss(noise, rate)
    return width


def _divergence(noise: float, rate: float) -> float:
    """The Renyi divergence of order 2 of a sampled Gaussian: about the square of its loss."""
    plain = noise**-2
    return log1p(rate**2 * expm1(plain)) if plain < 700 else plain


def _largest_loss(noise: float, rate: float) -> float:
    """The loss of one draw at eight standard deviations."""
    plain = (1 + 16 * noise) / (2 * noise**2)
    return log1p(rate * expm1(plain)) if plain < 700 else plain
