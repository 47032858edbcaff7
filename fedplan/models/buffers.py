# SPDX-License-Identifier: Apache-2.0
"""Buffers: what a model holds beside its params. They have no role, so they must stand still."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from fedplan.errors import FedplanError
from fedplan.tensors.named import same_bits


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of a model's buffers, those too that it does not save."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def require_rest(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise if a buffer is not what it was: it would be in no message, home or checkpoint."""
    after = dict(model.named_buffers())
    names = [*before, *(name for name in after if name not in before)]
    for name in names:
        was, now = before.get(name), after.get(name)
        if was is None or now is None or not same_bits(was, now):
            raise FedplanError(
                f"{name} is no param, and training changes it: a plan says nothing of it, so "
                "nobody shares or keeps it. Say model.still = true (fedplan.models.stilled) to "
                "have batch norms use the statistics that they have, or take GroupNorm instead"
            )


def stilled(model: nn.Module) -> nn.Module:
    """The model with norms that use the statistics that they have, and gather none.

    They do so in training too, as is usual where a pretrained network is fine-tuned. Their weights
    and biases are params as before.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and not isinstance(module, _Still):
            kind = type(module)
            # The name stays, because the anatomy tells norms by it.
            module.__class__ = type(kind.__name__, (_Still, kind), {"__module__": kind.__module__})
            module.train(False)
    return model


class _Still(nn.Module):
    """A module that is never in training mode."""

    def train(self, mode: bool = True) -> _Still:
        """Stay as it is."""
        return super().train(False)
