# SPDX-License-Identifier: Apache-2.0
"""Events: what costs privacy, as values that can be written down and read back.

Neighbours differ by one unit that is there or not: one client, or one example.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from math import sqrt
from typing import Any, cast

from fedplan.privacy.errors import PrivacyError

NOISES = (1e-3, 1e6)
RATES = (1e-6, 1.0)
LARGEST_COUNT = 10**7


@dataclass(frozen=True)
class Release:
    """One sum of clipped units with Gaussian noise, as a multiple of the clip.

    `rate` is the chance of each unit to be in the sum, drawn apart for each (Poisson); None claims
    nothing of how they were drawn.
    """

    noise: float
    rate: float | None = None

    def __post_init__(self) -> None:
        _require(self, "noise", self.noise, NOISES)
        if self.rate is not None:
            _require(self, "rate", self.rate, RATES)


@dataclass(frozen=True)
class Steps:
    """Steps of DP-SGD, each over a fresh Poisson batch of a client's examples."""

    noise: float
    rate: float
    count: int

    def __post_init__(self) -> None:
        _require(self, "noise", self.noise, NOISES)
        _require(self, "rate", self.rate, RATES)
        if type(self.count) is not int or not 1 <= self.count <= LARGEST_COUNT:
            raise _wrong(self, "count", self.count, f"a whole number from 1 to {LARGEST_COUNT}")


Event = Release | Steps
_KINDS: dict[str, type[Event]] = {"release": Release, "steps": Steps}


@dataclass(frozen=True)
class Spent:
    """One charge: the event, the name of what was released, and a keyed digest of it if known."""

    event: Event
    about: str
    digest: str = ""


def together(*noises: float) -> float:
    """The noise of several Gaussian sums over the same units, as that of one.

    Sums over one and the same sampled cohort are one event: charged as several, each with the rate,
    they would claim that the cohort was drawn anew for each.
    """
    return 1 / sqrt(sum(noise**-2 for noise in noises))


def events_of(charges: Iterable[Spent]) -> list[Event]:
    """What is to be accounted for: sums of one name are over one cohort, whatever they held."""
    found, sums = list[Event](), dict[tuple[str, float | None], list[float]]()
    for charge in charges:
        if isinstance(charge.event, Release):
            sums.setdefault((charge.about, charge.event.rate), []).append(charge.event.noise)
        else:
            found.append(charge.event)
    return found + [Release(together(*noises), rate) for (_, rate), noises in sums.items()]


def written(event: Event) -> dict[str, Any]:
    """An event as JSON."""
    kind = next(kind for kind, made in _KINDS.items() if made is type(event))
    return {"kind": kind, **asdict(event)}


def read(data: object) -> Event:
    """The event that `written` wrote, or a PrivacyError."""
    held = _object(data, "an event")
    kind = held.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise PrivacyError(f"an event of kind {kind!r} is not known: {', '.join(_KINDS)} are")
    made = _KINDS[kind]
    _require_keys(held, {field.name for field in fields(made)}, f"a {kind}")
    return made(**{key: _number(key, value) for key, value in held.items()})


def written_spent(spent: Spent) -> dict[str, Any]:
    """A charge as JSON."""
    return {"about": spent.about, "digest": spent.digest, "event": written(spent.event)}


def read_spent(data: object) -> Spent:
    """The charge that `written_spent` wrote, or a PrivacyError."""
    held = _object(data, "a charge")
    _require_keys(held, {"about", "digest", "event"}, "a charge")
    about, digest = held["about"], held["digest"]
    if not isinstance(about, str) or not isinstance(digest, str):
        raise PrivacyError(f"a charge is about {about!r} with digest {digest!r}, not two texts")
    return Spent(read(held["event"]), about, digest)


def _object(data: object, what: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise PrivacyError(f"{what} is {data!r}, not an object")
    return dict(cast("Mapping[str, Any]", data))


def _require_keys(held: Mapping[str, Any], wanted: set[str], what: str) -> None:
    if set(held) != wanted:
        has = ", ".join(map(str, held)) or "nothing"
        raise PrivacyError(f"{what} has {', '.join(sorted(wanted))}, not {has}")


def _number(key: str, value: object) -> Any:
    """JSON writes 1.0 and 1 alike; a count stays whole."""
    if type(value) is int and key != "count":
        return float(value) if abs(value) < 2**1000 else value
    return value


def _require(event: Event, field: str, value: object, range: tuple[float, float]) -> None:
    lowest, highest = range
    if type(value) not in (int, float) or not lowest <= cast(float, value) <= highest:
        raise _wrong(event, field, value, f"a number from {lowest:g} to {highest:g}")


def _wrong(event: Event, field: str, value: object, wanted: str) -> PrivacyError:
    return PrivacyError(f"{field} of a {type(event).__name__} is {value!r}: give {wanted}")
