# SPDX-License-Identifier: Apache-2.0
"""Buffers of a model: they have no role, so training must not change them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from fedplan.errors import FedplanError
from fedplan.tensors.named import same_bits


def copy_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all buffers of a model by name, non-persistent ones included."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def require_unchanged_buffers(model: nn.Module, before: dict[str, Tensor]) -> None:
    """Raise FedplanError if a buffer of the model differs from `before`, or is new or missing.

    `before` is an earlier result of `copy_buffers`; buffers are compared bit by bit.
    """
    # A changed buffer would be in no message, client state or checkpoint.
    after = dict(model.named_buffers())
    for name in [*before, *(name for name in after if name not in before)]:
        old, new = before.get(name), after.get(name)
        if old is None or new is None or not same_bits(old, new):
            raise FedplanError(
                f"{name} is no param, and training changes it: it would be lost between rounds. "
                "Set model.freeze_batch_norm = true (fedplan.models.freeze_batch_norms) to freeze "
                "the statistics of batch norms, or use GroupNorm instead"
            )


def freeze_batch_norms(model: nn.Module) -> nn.Module:
    """Freeze the running statistics of all batch and instance norms, in place; return the model.

    From now on the norms ignore `train()` and stay in eval mode, as is usual in fine-tuning. The
    weights and biases of the norms stay trainable.
    """
    for module in model.modules():
        if isinstance(module, _NormBase) and not isinstance(module, _EvalOnly):
            cls = type(module)
            # The class name stays, because `describe` recognizes norms by it.
            module.__class__ = type(cls.__name__, (_EvalOnly, cls), {"__module__": cls.__module__})
            module.train(False)
    return model


class _EvalOnly(nn.Module):
    """Mixin for modules that never enter training mode."""

    def train(self, mode: bool = True) -> _EvalOnly:
        """Stay in eval mode, whatever `mode` is."""
        return super().train(False)
