# SPDX-License-Identifier: Apache-2.0
"""Privacy events: releases that cost privacy, and the charges for them, with their JSON form.

Neighbouring data sets differ by one unit that is present or absent: one client, or one example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import sqrt
from typing import Any, cast

from fedplan.privacy.errors import PrivacyError

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
    """Event: `steps` steps of DP-SGD, each on a new Poisson sample of a client's examples.

    sampling_rate: of each step. Raises a PrivacyError for values out of range.
    """

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
    """An entry of the privacy budget: an event, the name of the release it pays for, and a digest.

    digest: keyed digest of the release's content, or "".
    """

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

    Releases charged under one name, also with different digests, are over one cohort: they become
    one release, with the noise multiplier of `combined_noise`. Raises a PrivacyError if this noise
    multiplier is out of NOISE_MULTIPLIERS.
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
