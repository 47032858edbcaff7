# SPDX-License-Identifier: Apache-2.0
"""Origins: the model that a run starts from, by digests, and whether what rests stands still.

What no turn trains is in memory once, in the model itself. So there is no copy to compare it with:
digests that were taken before the first turn tell whether it moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from fedplan.models.params import Param, Params
from fedplan.models.quantised import value_in
from fedplan.tensors.devices import HOST, device_of, integers
from fedplan.tensors.named import Tensors, checksum, whole_digest


@dataclass(frozen=True)
class Base:
    """What a model starts with: the whole digest of each param.

    On a device there are `sums` beside them, of what rests: to fetch it in every turn would be to
    move a whole frozen model for the sake of an adapter.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    sums: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def marks(self) -> dict[str, str]:
        """The digest of each param, as a ledger tells it."""
        return {key: whole[:16] for key, whole in self.digests.items()}

    def placed(self, model: nn.Module, resting: Params) -> Base:
        """The base where a model now computes, before any turn."""
        return self if device_of(model) == HOST else replace(self, sums=_sums(model, resting))

    def moved(self, model: nn.Module, resting: Params) -> Iterator[Param]:
        """Of params that rest, those that are not what they were."""
        if not self.sums:
            found = _digests(model, resting)
            return (p for p, whole in found if whole != self.digests[p.key])
        sums = _sums(model, resting)
        return (p for p in resting if sums[p.key] != self.sums[p.key])


def base_of(model: nn.Module, params: Params, start: Tensors) -> Base:
    """The base that a model is, before any turn; `start` are the values of what may change."""
    resting = dict(_digests(model, [p for p in params if p.key not in start]))
    return Base({p.key: resting[p] if p in resting else whole_digest(start[p.key]) for p in params})


def _digests(model: nn.Module, params: Iterable[Param]) -> Iterator[tuple[Param, str]]:
    tensors = dict(model.named_parameters())
    # One after the other: of a packed weight, or one on a device, the value is a copy.
    return ((p, whole_digest(value_in(model, p, tensors[p.name]).to(HOST))) for p in params)


def _sums(model: nn.Module, params: Params) -> dict[str, int]:
    """The checksum of each param, worked out where it lies: nothing is fetched but the sums."""
    tensors = dict(model.named_parameters())
    sums = integers(checksum(value_in(model, p, tensors[p.name])) for p in params)
    return {p.key: each for p, each in zip(params, sums, strict=True)}
