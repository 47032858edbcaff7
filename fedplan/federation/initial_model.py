# SPDX-License-Identifier: Apache-2.0
"""Initial model of a run: digests of all params, and the check that frozen params do not change.

Frozen params are in memory once, in the model itself, without a copy to compare with. Digests from
before the first round show whether they changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import nn

from fedplan.models.params import Param, Params
from fedplan.models.values import param_value
from fedplan.tensors.devices import CPU, model_device, read_ints
from fedplan.tensors.named import Tensors, checksum, full_digest


@dataclass(frozen=True)
class InitialModel:
    """Digests of the model that a run starts from, to prove that frozen params do not change.

    Create with `digest_initial_model`; `changed_params` compares a model. `digests`: full digest by
    param key. `checksums`: checksum by key of the frozen params, for a model on an accelerator,
    where copying all frozen params to the CPU each round would be slow; else empty.
    """

    digests: dict[str, str] = field(default_factory=dict[str, str])
    checksums: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def short_digests(self) -> dict[str, str]:
        """The 16-digit digest of each param, as in the ledger."""
        return {key: digest[:16] for key, digest in self.digests.items()}

    def with_checksums(self, model: nn.Module, frozen: Params) -> InitialModel:
        """Return a copy with checksums of the frozen params; `self` if the model is on the CPU.

        Call before the first round, after the model was moved to its device.
        """
        if model_device(model) == CPU:
            return self
        return replace(self, checksums=_checksums(model, frozen))

    def changed_params(self, model: nn.Module, frozen: Params) -> Iterator[Param]:
        """Yield each frozen param with another value in the model than the initial value.

        Compares checksums if there are any, else digests.
        """
        if not self.checksums:
            digests = _digests(model, frozen)
            return (p for p, digest in digests if digest != self.digests[p.key])
        checksums = _checksums(model, frozen)
        return (p for p in frozen if checksums[p.key] != self.checksums[p.key])


def digest_initial_model(model: nn.Module, params: Params, start: Tensors) -> InitialModel:
    """Return the digests of all params before the first round; call before training.

    `start`: values of the params that may change; all other params are read from the model.
    """
    frozen = dict(_digests(model, [p for p in params if p.key not in start]))
    return InitialModel(
        {p.key: frozen[p] if p in frozen else full_digest(start[p.key]) for p in params}
    )


def _digests(model: nn.Module, params: Iterable[Param]) -> Iterator[tuple[Param, str]]:
    tensors = dict(model.named_parameters())
    # Lazily: the value of a quantized weight, or of one on an accelerator, is a copy.
    return ((p, full_digest(param_value(model, p, tensors[p.name]).to(CPU))) for p in params)


def _checksums(model: nn.Module, params: Params) -> dict[str, int]:
    """Return the checksum of each param, computed on the model's device."""
    tensors = dict(model.named_parameters())
    checksums = read_ints(checksum(param_value(model, p, tensors[p.name])) for p in params)
    return {p.key: number for p, number in zip(params, checksums, strict=True)}
