# SPDX-License-Identifier: Apache-2.0
"""Bases: the model that a run starts from, by digests, and whether what nobody trains stands still.

What no turn trains is in memory once, in the model itself. So there is no copy to compare it with:
a checksum that was taken before the first turn tells whether it moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn

from fedplan.models.params import Param, Params
from fedplan.models.quantised import value_in
from fedplan.tensors.devices import HOST, integers
from fedplan.tensors.named import Tensors, checksum, whole_digest


@dataclass(frozen=True)
class Base:
    """What a model starts with: the whole digest of each param, a checksum of each that rests."""

    digests: dict[str, str] = field(default_factory=dict[str, str])
    sums: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def marks(self) -> dict[str, str]:
        """The digest of each param, as a ledger tells it."""
        return {key: whole[:16] for key, whole in self.digests.items()}

    def moved(self, model: nn.Module, resting: Iterable[Param]) -> Iterator[Param]:
        """Of params that rest, those that are not what they were."""
        asked = [*resting]
        found = sums_of(model, asked)
        return (p for p in asked if found[p.key] != self.sums[p.key])


def base_of(
    model: nn.Module,
    params: Params,
    start: Tensors,
    known: Mapping[str, tuple[int, str]] | None = None,
) -> Base:
    """The base that a model is, before any turn; `start` are the values of what may change.

    What is `known` is the digest of a param by the checksum that it then had.
    """
    tensors, digests = dict(model.named_parameters()), dict[str, str]()
    sums = sums_of(model, [p for p in params if p.key not in start])
    for p in params:
        total, whole = (known or {}).get(p.key, (0, ""))
        if whole and p.key in sums and sums[p.key] == total:
            digests[p.key] = whole
            continue
        # One after the other: of a packed weight, or one on a device, the value is a copy.
        value = start[p.key] if p.key in start else value_in(model, p, tensors[p.name]).to(HOST)
        digests[p.key] = whole_digest(value)
    return Base(digests, sums)


def sums_of(model: nn.Module, params: Iterable[Param]) -> dict[str, int]:
    """The checksum of each param, worked out where it lies: nothing is fetched but the sums."""
    asked, tensors = [*params], dict(model.named_parameters())
    sums = integers(checksum(value_in(model, p, tensors[p.name])) for p in asked)
    return {p.key: each for p, each in zip(asked, sums, strict=True)}
