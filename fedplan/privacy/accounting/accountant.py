# SPDX-License-Identifier: Apache-2.0
"""Privacy accounting: releases and DP-SGD steps as events, and the epsilon that they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache, partial
from importlib.metadata import version as installed_version
from math import expm1, fsum, isfinite, log, log1p, sqrt
from typing import Any, cast

import numpy as np
import torch

from fedplan.errors import PrivacyError, import_extra

NOISE_MULTIPLIERS = (1e-3, 1e6)
"""Smallest and largest noise multiplier that can be accounted for."""
SAMPLING_RATES = (1e-6, 1.0)
"""Smallest and largest sampling rate that can be accounted for."""
MAX_STEPS = 10**7
"""Largest number of DP-SGD steps in one event."""


@dataclass(frozen=True)
class Release:
    """Event: one sum of clipped units (clients or examples) with Gaussian noise.

    noise_multiplier: stddev of the noise divided by the clipping norm.
    sampling_rate: Poisson sampling rate of units; None: no amplification by sampling is claimed.
    Raises a PrivacyError for values out of NOISE_MULTIPLIERS or SAMPLING_RATES.
    """

    # The field names are the keys of the JSON form.
    noise_multiplier: float
    sampling_rate: float | None = None

    def __post_init__(self) -> None:
        _require(self, "noise_multiplier", self.noise_multiplier, NOISE_MULTIPLIERS)
        if self.sampling_rate is not None:
            _require(self, "sampling_rate", self.sampling_rate, SAMPLING_RATES)


@dataclass(frozen=True)
class DPSGDSteps:
    """Event: `steps` steps of DP-SGD, each on a new Poisson sample of a client's examples."""

    noise_multiplier: float
    sampling_rate: float
    steps: int

    def __post_init__(self) -> None:
        _require(self, "noise_multiplier", self.noise_multiplier, NOISE_MULTIPLIERS)
        _require(self, "sampling_rate", self.sampling_rate, SAMPLING_RATES)
        if type(self.steps) is not int or not 1 <= self.steps <= MAX_STEPS:
            raise _wrong(self, "steps", self.steps, f"a whole number from 1 to {MAX_STEPS}")


Event = Release | DPSGDSteps
_KINDS: dict[str, type[Event]] = {"gaussian": Release, "dp_sgd": DPSGDSteps}


@dataclass(frozen=True)
class Charge:
    """An entry of the budget: an event, its release's name, and a keyed digest of this or ""."""

    event: Event
    name: str
    digest: str = ""


def combined_noise(*noise_multipliers: float) -> float:
    """Noise multiplier of one Gaussian sum that costs as much as several over the same sample.

    Sums over one sampled cohort are one event. Charged as several events, each with the sampling
    rate, they would claim a new sample for each.
    """
    return 1 / sqrt(sum(noise**-2 for noise in noise_multipliers))


def composed_events(charges: Iterable[Charge]) -> list[Event]:
    """Events of all charges: the DP-SGD steps, then one release per name and sampling rate.

    Releases under one name, also with different digests, are over one cohort: they become one
    release by `combined_noise`. Raises a PrivacyError if that cannot be accounted for.
    """
    steps, noises = list[Event](), dict[tuple[str, float | None], list[float]]()
    for charge in charges:
        if isinstance(charge.event, Release):
            sample = charge.name, charge.event.sampling_rate
            noises.setdefault(sample, []).append(charge.event.noise_multiplier)
        else:
            steps.append(charge.event)
    releases = [Release(combined_noise(*noise), rate) for (_, rate), noise in noises.items()]
    return steps + releases


def event_to_json(event: Event) -> dict[str, Any]:
    """The event's fields, with its "kind"."""
    kind = next(kind for kind, event_type in _KINDS.items() if event_type is type(event))
    return {"kind": kind, **asdict(event)}


def event_from_json(data: object) -> Event:
    """Inverse of `event_to_json`. Raises a PrivacyError for any other `data`."""
    values = _object(data, "an event")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PrivacyError(f"an event of kind {kind!r} is not known: {', '.join(_KINDS)} are")
    event_type = _KINDS[kind]
    _require_keys(values, {field.name for field in fields(event_type)}, f"an event of kind {kind}")
    for key, value in values.items():
        if type(value) is int and key != "steps" and abs(value) < 2**1000:
            values[key] = float(value)
    return event_type(**values)


def charge_to_json(charge: Charge) -> dict[str, Any]:
    """The charge as JSON, as a line of the budget's file has it."""
    return {"request": charge.name, "digest": charge.digest, "event": event_to_json(charge.event)}


def charge_from_json(data: object) -> Charge:
    """Inverse of `charge_to_json`. Raises a PrivacyError for any other `data`."""
    values = _object(data, "a charge")
    _require_keys(values, {"request", "digest", "event"}, "a charge")
    name, digest = values["request"], values["digest"]
    if not isinstance(name, str) or not isinstance(digest, str):
        raise PrivacyError(f"a charge has request {name!r} and digest {digest!r}, not two texts")
    return Charge(event_from_json(values["event"]), name, digest)


def _object(data: object, what: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise PrivacyError(f"{what} is {data!r}, not an object")
    return dict(cast("Mapping[str, Any]", data))


def _require_keys(values: Mapping[str, Any], expected: set[str], what: str) -> None:
    if set(values) != expected:
        has = ", ".join(map(str, values)) or "nothing"
        raise PrivacyError(f"{what} has {', '.join(sorted(expected))}, not {has}")


def _require(event: Event, field: str, value: object, range: tuple[float, float]) -> None:
    lowest, highest = range
    if type(value) not in (int, float) or not lowest <= cast(float, value) <= highest:
        raise _wrong(event, field, value, f"a number from {lowest:g} to {highest:g}")


def _wrong(event: Event, field: str, value: object, expected: str) -> PrivacyError:
    return PrivacyError(f"{field} of a {type(event).__name__} is {value!r}: give {expected}")


ACCOUNTANTS = ("pld", "rdp")
PRECISION = 1e-4
"""Approximate excess of a PLD epsilon over the exact one. Smaller is slower."""
_MOST_POINTS = 2**18
_SMALLEST = 1e-9
"""Limits of a PLD's grid: its number of points, and their distance."""
_ROUNDING = 1e-13
"""Taken from delta: PLDs are composed by Fourier transforms, whose rounding was up to 1e-14."""
_WIDEST = 2000.0
"""Privacy losses wider than this (epsilon in the hundreds) are too slow by PLD: RDP is used."""
_PURPOSE = "accounting for sampling"


@dataclass(frozen=True)
class _Composition:
    """The Gaussian sums that events add up to.

    gaussian: noise multiplier of one sum that costs as much as all that are not sampled, 0.0
    without any; sampled: (noise multiplier, sampling rate, count) of the others, sorted.
    """

    gaussian: float
    sampled: tuple[tuple[float, float, int], ...]

    @staticmethod
    def of(events: Iterable[Event]) -> _Composition:
        """Count the sums of events, of which a DP-SGD event has many; plain without sampling."""
        plain, sampled = Counter[float](), Counter[tuple[float, float]]()
        for event in events:
            count = event.steps if isinstance(event, DPSGDSteps) else 1
            if event.sampling_rate is None or event.sampling_rate == 1:
                plain[event.noise_multiplier] += count
            else:
                sampled[event.noise_multiplier, event.sampling_rate] += count
        precision = fsum(count / noise**2 for noise, count in plain.items())
        counts = tuple((*setting, count) for setting, count in sorted(sampled.items()))
        return _Composition(1 / sqrt(precision) if precision else 0.0, counts)


def epsilon(events: Iterable[Event], delta: float, accountant: str = "pld") -> float:
    """Upper bound of epsilon of all events together, at `delta`; 0.0 without events.

    accountant: "pld" (tight; falls back to RDP for very large epsilons) or "rdp". Raises a
    PrivacyError for a delta that is no float in (0, 1), and without dp-accounting if it is needed.
    """
    if accountant not in ACCOUNTANTS:
        raise PrivacyError(f"there is no accountant {accountant!r}: pld and rdp there are")
    if type(delta) is not float or not 0 < delta < 1:
        raise PrivacyError(f"delta is {delta!r}: give a number between 0 and 1, such as 1e-5")
    composition = _Composition.of(events)
    if accountant == "rdp":
        return _epsilon_by_rdp(composition, delta)
    if composition.sampled:
        return _epsilon_by_pld(composition, delta)
    return _gaussian_epsilon(composition.gaussian, delta) if composition.gaussian else 0.0


def calibrate(
    target: float,
    delta: float,
    make_events: Callable[[float], Iterable[Event]],
    *,
    accountant: str = "pld",
) -> float:
    """Smallest noise multiplier, to 0.01 %, for which events have an epsilon of at most `target`.

    make_events: maps a noise multiplier to the events, whose epsilon must not grow with the noise.
    Raises a PrivacyError if none up to NOISE_MULTIPLIERS[1] does, and as `epsilon`.
    """
    if not target > 0 or not isfinite(target):
        raise PrivacyError(f"the target epsilon is {target!r}: give a number above 0")

    def fits(noise: float) -> bool:
        return epsilon(make_events(noise), delta, accountant) <= target

    (low, highest), high = NOISE_MULTIPLIERS, 1.0
    while not fits(high):
        if high == highest:
            raise PrivacyError(
                f"no noise multiplier up to {highest:g} gives epsilon {target}: another event "
                "costs more"
            )
        low, high = high, min(4 * high, highest)
    while high > low * 1.0001:
        middle = sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def accountant_version() -> str:
    """Name of the accountant with the version of dp-accounting, which must be installed."""
    import_extra("dp_accounting", _PURPOSE)
    return f"PLD of dp-accounting {installed_version('dp-accounting')}"


@lru_cache(256)
def _gaussian_epsilon(noise: float, delta: float) -> float:

    def log_delta(epsilon: float) -> float:
        # delta = Phi(1/2s - es) - exp(e) Phi(-1/2s - es), s the noise (Balle and Wang 2018, eq. 6).
        upper = log_ndtr(1 / (2 * noise) - epsilon * noise)
        share = epsilon + log_ndtr(-1 / (2 * noise) - epsilon * noise) - upper
        return upper + log(-expm1(share)) if share < 0 else -float("inf")

    def log_ndtr(x: float) -> float:
        return float(torch.special.log_ndtr(torch.tensor(x, dtype=torch.float64)))

    low, high = 0.0, 1.0
    if log_delta(low) <= log(delta):
        return 0.0
    while log_delta(high) > log(delta):
        low, high = high, 2 * high
    while high - low > 1e-13 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if log_delta(middle) > log(delta) else (low, middle)
    return high


def _epsilon_by_rdp(composition: _Composition, delta: float) -> float:
    """Epsilon at `delta` of a composition by dp-accounting's RDP accountant; 0.0 if it is empty."""
    events = import_extra("dp_accounting.dp_event", _PURPOSE)
    accountant = import_extra("dp_accounting.rdp", _PURPOSE).RdpAccountant()
    if composition.gaussian:
        accountant.compose(events.GaussianDpEvent(composition.gaussian))
    for noise, rate, count in composition.sampled:
        sampled = events.PoissonSampledDpEvent(rate, events.GaussianDpEvent(noise))
        accountant.compose(sampled, count)
    is_empty = not (composition.gaussian or composition.sampled)
    return 0.0 if is_empty else float(accountant.get_epsilon(delta))


@lru_cache(256)
def _epsilon_by_pld(composition: _Composition, delta: float) -> float:
    """Epsilon by privacy loss distributions; by RDP if losses are wide or overflow."""
    # Cached: all clients of a simulation account for the same events at every turn.
    distributions = import_extra("dp_accounting.pld.privacy_loss_distribution", _PURPOSE)
    gaussians = list(composition.sampled)
    if composition.gaussian:
        gaussians.append((composition.gaussian, 1.0, 1))
    # Grid step for an error of about PRECISION, which grows as the number of events times the
    # square of the step; at most an eighth of each loss's stddev.
    width, interval = 0.0, sqrt(PRECISION / sum(count for *_, count in gaussians))
    for noise, rate, count in gaussians:
        # Renyi divergence of order 2: about the variance of the loss.
        divergence = _amplified(noise**-2, rate**2)
        interval = min(interval, sqrt(divergence) / 8)
        # The loss of one event at an outcome of eight standard deviations.
        largest = _amplified((1 + 16 * noise) / (2 * noise**2), rate)
        loss = count * divergence
        width += loss + 12 * sqrt(2 * loss) + largest
    if width > _WIDEST:
        return _epsilon_by_rdp(composition, delta)
    interval = max(interval, width / _MOST_POINTS, _SMALLEST)
    make_loss = partial(
        distributions.from_gaussian_mechanism, value_discretization_interval=interval
    )
    total = distributions.identity(interval)
    if composition.gaussian:
        total = total.compose(make_loss(composition.gaussian))
    for noise, rate, count in composition.sampled:
        distribution = make_loss(noise, sampling_prob=rate)
        total = total.compose(distribution.self_compose(count) if count > 1 else distribution)
    with np.errstate(over="ignore"):  # an overflow becomes infinite, and RDP is used
        bound = float(total.get_epsilon_for_delta(max(delta - _ROUNDING, delta / 2)))
    return bound if isfinite(bound) else _epsilon_by_rdp(composition, delta)


def _amplified(loss: float, rate: float) -> float:
    """A privacy loss after sampling at a rate; without amplification where exp would overflow."""
    return log1p(rate * expm1(loss)) if loss < 700 else loss
