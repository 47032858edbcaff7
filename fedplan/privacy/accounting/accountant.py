# SPDX-License-Identifier: Apache-2.0
"""Accountant: epsilon of a list of privacy events, and noise calibrated to a target epsilon.

Every epsilon is an upper bound. Gaussian releases without sampling compose to one Gaussian, whose
epsilon is computed here; sampled ones go through Google's dp-accounting.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from importlib.metadata import version as installed_version
from math import expm1, fsum, isfinite, log, log1p, sqrt
from typing import Any

import numpy as np
import torch

from fedplan.privacy.accounting.events import NOISE_MULTIPLIERS, DPSGDSteps, Event, Release
from fedplan.privacy.errors import PrivacyError, import_extra

ACCOUNTANTS = ("pld", "rdp")
PRECISION = 1e-4
"""Approximate excess of a PLD epsilon over the exact one. Smaller is slower."""
_MOST_POINTS = 2**18
_SMALLEST = 1e-9
"""Limits of a PLD's grid: its number of points, and their distance."""
_WIDEST = 2000.0
"""Privacy losses wider than this (epsilon in the hundreds) are too slow by PLD: RDP is used."""
_PURPOSE = "accounting for sampling"


@dataclass(frozen=True)
class _Composition:
    """Counts of events: `plain` Gaussians by noise, `sampled` ones by (noise, sampling rate)."""

    plain: Counter[float] = field(default_factory=Counter[float])
    sampled: Counter[tuple[float, float]] = field(default_factory=Counter[tuple[float, float]])

    @staticmethod
    def of(events: Iterable[Event]) -> _Composition:
        """Count events; a sampling rate of 1 is plain."""
        composition = _Composition()
        for event in events:
            match event:
                case Release(noise, None):
                    composition.plain[noise] += 1
                case Release(noise, rate) | DPSGDSteps(noise, rate):
                    count = event.count if isinstance(event, DPSGDSteps) else 1
                    composition._add_sampled(noise, rate or 1.0, count)
        return composition

    def _add_sampled(self, noise: float, rate: float, count: int) -> None:
        if rate == 1:
            self.plain[noise] += count
        else:
            self.sampled[noise, rate] += count

    @property
    def gaussian(self) -> float | None:
        """Noise multiplier of one Gaussian that costs as much as all plain ones; None without."""
        precision = fsum(count / noise**2 for noise, count in self.plain.items())
        return 1 / sqrt(precision) if precision else None


def epsilon(events: Iterable[Event], delta: float, accountant: str = "pld") -> float:
    """Upper bound of epsilon of all events together, at `delta`; 0.0 without events.

    The order of events does not matter. Raises a PrivacyError for a delta outside of (0, 1) and for
    an accountant other than "pld" and "rdp".
    """
    if accountant not in ACCOUNTANTS:
        raise PrivacyError(f"there is no accountant {accountant!r}: pld and rdp there are")
    if type(delta) is not float or not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta!r}: give a number between 0 and 1, such as 1e-5")
    composition = _Composition.of(events)
    if accountant == "rdp":
        return _epsilon_by_rdp(composition, delta)
    if composition.sampled:
        plain, sampled = (
            tuple(sorted(each.items())) for each in (composition.plain, composition.sampled)
        )
        return _epsilon_by_pld(plain, sampled, delta)
    return _gaussian_epsilon(composition.gaussian, delta) if composition.gaussian else 0.0


def calibrate(
    target: float,
    delta: float,
    make_events: Callable[[float], Iterable[Event]],
    *,
    accountant: str = "pld",
) -> float:
    """Smallest noise multiplier, to 0.01 %, for which `make_events(noise)` has epsilon <= target.

    Raises a PrivacyError if no noise multiplier in the supported range is enough.
    """
    if not target > 0 or not isfinite(target):
        raise PrivacyError(f"the target epsilon is {target!r}: give a number above 0")

    def fits(noise: float) -> bool:
        return epsilon(make_events(noise), delta, accountant) <= target

    low, high = NOISE_MULTIPLIERS[0], 1.0
    while not fits(high):
        low, high = high, 4 * high
        if high > NOISE_MULTIPLIERS[1]:
            raise PrivacyError(
                f"no noise multiplier up to {NOISE_MULTIPLIERS[1]:g} gives epsilon {target}: "
                "another event costs more"
            )
    while high > low * 1.0001:
        middle = sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def accountant_version(accountant: str = "pld") -> str:
    """Name of the accountant with the version of dp-accounting, which must be installed."""
    import_extra("dp_accounting", _PURPOSE)
    return f"{accountant.upper()} of dp-accounting {installed_version('dp-accounting')}"


def _gaussian_epsilon(noise: float, delta: float) -> float:
    """Epsilon of one Gaussian release with noise multiplier s, by bisection.

    Solves delta = Phi(1/2s - es) - exp(e) Phi(-1/2s - es) for e (Balle and Wang 2018, eq. 6).
    """
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
    """Logarithm of delta of a Gaussian release at an epsilon, by the equation above."""
    upper = _log_ndtr(1 / (2 * noise) - epsilon * noise)
    share = epsilon + _log_ndtr(-1 / (2 * noise) - epsilon * noise) - upper
    return upper + log(-expm1(share)) if share < 0 else -float("inf")


def _log_ndtr(x: float) -> float:
    return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))


def _epsilon_by_rdp(composition: _Composition, delta: float) -> float:
    """Epsilon by the RDP accountant of dp-accounting."""
    events = import_extra("dp_accounting.dp_event", _PURPOSE)
    accountant = import_extra("dp_accounting.rdp", _PURPOSE).RdpAccountant()
    if composition.gaussian:
        accountant.compose(events.GaussianDpEvent(composition.gaussian))
    for (noise, rate), count in sorted(composition.sampled.items()):
        sampled = events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise))
        accountant.compose(sampled, count)
    return (
        float(accountant.get_epsilon(delta)) if composition.gaussian or composition.sampled else 0.0
    )


@lru_cache(256)
def _epsilon_by_pld(
    plain: tuple[tuple[float, int], ...],
    sampled: tuple[tuple[tuple[float, float], int], ...],
    delta: float,
) -> float:
    """Epsilon by privacy loss distributions; by RDP where losses are too wide or overflow.

    Takes the counts of a `_Composition` as sorted tuples, so that calls are cached: all clients of
    a simulation account for the same events at every turn.
    """
    composition = _Composition(Counter(dict(plain)), Counter(dict(sampled)))
    distributions = import_extra("dp_accounting.pld.privacy_loss_distribution", _PURPOSE)
    width = _width(composition)
    if width > _WIDEST:
        return _epsilon_by_rdp(composition, delta)
    interval = max(_discretization_step(composition), width / _MOST_POINTS, _SMALLEST)
    total = distributions.identity(interval)
    for loss, count in _loss_distributions(composition, distributions, interval):
        total = total.compose(loss.self_compose(count) if count > 1 else loss)
    with np.errstate(over="ignore"):  # an overflow becomes infinite, and RDP is used
        bound = float(total.get_epsilon_for_delta(delta))
    return bound if isfinite(bound) else _epsilon_by_rdp(composition, delta)


def _loss_distributions(
    composition: _Composition, distributions: Any, interval: float
) -> Iterable[tuple[Any, int]]:
    """The privacy loss distribution of each kind of event, and its count, on one grid."""
    from_gaussian = partial(
        distributions.from_gaussian_mechanism, value_discretization_interval=interval
    )
    if composition.gaussian:
        yield from_gaussian(composition.gaussian), 1
    for (noise, rate), count in sorted(composition.sampled.items()):
        yield from_gaussian(noise, sampling_prob=rate), count


def _gaussians(composition: _Composition) -> list[tuple[float, float, int]]:
    """(noise, sampling rate, count) of all Gaussians; the plain ones are combined to one."""
    sampled = [(noise, rate, count) for (noise, rate), count in composition.sampled.items()]
    return [*sampled, (composition.gaussian, 1.0, 1)] if composition.gaussian else sampled


def _discretization_step(composition: _Composition) -> float:
    """Grid step of a PLD for an error of about PRECISION, at most a quarter of each loss's stddev.

    The error grows as the number of events times the square of the step.
    """
    gaussians = _gaussians(composition)
    steps = [sqrt(_divergence(noise, rate)) / 4 for noise, rate, _ in gaussians]
    return min(sqrt(PRECISION / sum(count for *_, count in gaussians)), *steps)


def _width(composition: _Composition) -> float:
    """Approximate range of the composed privacy loss."""
    width = 0.0
    for noise, rate, count in _gaussians(composition):
        loss = count * _divergence(noise, rate)
        width += loss + 12 * sqrt(2 * loss) + _largest_loss(noise, rate)
    return width


def _divergence(noise: float, rate: float) -> float:
    """Renyi divergence of order 2 of a sampled Gaussian: about the variance of its loss."""
    plain = noise**-2
    return log1p(rate**2 * expm1(plain)) if plain < 700 else plain


def _largest_loss(noise: float, rate: float) -> float:
    """Privacy loss of one event at an outcome of eight standard deviations."""
    plain = (1 + 16 * noise) / (2 * noise**2)
    return log1p(rate * expm1(plain)) if plain < 700 else plain
