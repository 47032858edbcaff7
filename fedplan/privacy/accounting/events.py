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
LARGEST_COUNT = 10**7
"""Largest number of DP-SGD steps in one event."""


@dataclass(frozen=True)
class Release:
    """One sum of clipped units with Gaussian noise.

    noise: the noise multiplier, stddev divided by the clipping norm.
    rate: the Poisson sampling rate of units; None: no amplification by sampling is claimed.
    """

    # The field names are the keys of the JSON form.
    noise: float
    rate: float | None = None

    def __post_init__(self) -> None:
        _require(self, "noise", self.noise, NOISE_MULTIPLIERS)
        if self.rate is not None:
            _require(self, "rate", self.rate, SAMPLING_RATES)


@dataclass(frozen=True)
class DPSGDSteps:
    """`count` steps of DP-SGD, each on a new Poisson sample of a client's examples.

    noise: the noise multiplier; rate: the sampling rate of each step.
    """

    noise: float
    rate: float
    count: int

    def __post_init__(self) -> None:
        _require(self, "noise", self.noise, NOISE_MULTIPLIERS)
        _require(self, "rate", self.rate, SAMPLING_RATES)
        if type(self.count) is not int or not 1 <= self.count <= LARGEST_COUNT:
            raise _wrong(self, "count", self.count, f"a whole number from 1 to {LARGEST_COUNT}")


Event = Release | DPSGDSteps
_KINDS: dict[str, type[Event]] = {"release": Release, "steps": DPSGDSteps}


@dataclass(frozen=True)
class Charge:
    """One charge: the event, the name of the release, and a keyed digest of its content, or ""."""

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
    """Events to account for: all DP-SGD steps, then one release per name and sampling rate.

    Releases of one name, whatever their digest, are over one cohort: they become one release with
    their combined noise.
    """
    steps, noises = list[Event](), dict[tuple[str, float | None], list[float]]()
    for charge in charges:
        if isinstance(charge.event, Release):
            noises.setdefault((charge.name, charge.event.rate), []).append(charge.event.noise)
        else:
            steps.append(charge.event)
    releases = [Release(combined_noise(*noise), rate) for (_, rate), noise in noises.items()]
    return steps + releases


def event_to_json(event: Event) -> dict[str, Any]:
    """The event's fields, with its "kind"."""
    kind = next(kind for kind, event_type in _KINDS.items() if event_type is type(event))
    return {"kind": kind, **asdict(event)}


def event_from_json(data: object) -> Event:
    """The event that `event_to_json` wrote. Raises a PrivacyError for any other value."""
    values = _object(data, "an event")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PrivacyError(f"an event of kind {kind!r} is not known: {', '.join(_KINDS)} are")
    event_type = _KINDS[kind]
    _require_keys(values, {field.name for field in fields(event_type)}, f"a {kind}")
    return event_type(**{key: _number(key, value) for key, value in values.items()})


def charge_to_json(charge: Charge) -> dict[str, Any]:
    """The charge as JSON, as a line of the budget's file has it."""
    return {"about": charge.name, "digest": charge.digest, "event": event_to_json(charge.event)}


def charge_from_json(data: object) -> Charge:
    """The charge that `charge_to_json` wrote. Raises a PrivacyError for any other value."""
    values = _object(data, "a charge")
    _require_keys(values, {"about", "digest", "event"}, "a charge")
    name, digest = values["about"], values["digest"]
    if not isinstance(name, str) or not isinstance(digest, str):
        raise PrivacyError(f"a charge is about {name!r} with digest {digest!r}, not two texts")
    return Charge(event_from_json(values["event"]), name, digest)


def _object(data: object, what: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise PrivacyError(f"{what} is {data!r}, not an object")
    return dict(cast("Mapping[str, Any]", data))


def _require_keys(values: Mapping[str, Any], expected: set[str], what: str) -> None:
    if set(values) != expected:
        has = ", ".join(map(str, values)) or "nothing"
        raise PrivacyError(f"{what} has {', '.join(sorted(expected))}, not {has}")


def _number(key: str, value: object) -> Any:
    """A JSON number as the event's field has it: a float, except `count`."""
    if type(value) is int and key != "count":
        return float(value) if abs(value) < 2**1000 else value
    return value


def _require(event: Event, field: str, value: object, range: tuple[float, float]) -> None:
    lowest, highest = range
    if type(value) not in (int, float) or not lowest <= cast(float, value) <= highest:
        raise _wrong(event, field, value, f"a number from {lowest:g} to {highest:g}")


def _wrong(event: Event, field: str, value: object, expected: str) -> PrivacyError:
    return PrivacyError(f"{field} of a {type(event).__name__} is {value!r}: give {expected}")
