# SPDX-License-Identifier: Apache-2.0
"""Ghost clipping: clipped per-example gradients by one forward and one backward pass.

The model runs on the whole batch, with hooks on each layer with trained tensors: its inputs and the
gradients of its outputs are the factors of every example's gradient. This is correct where no
example changes the outputs of another; `why_not_ghost_clipping` tests that.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fedplan.privacy.dpsgd.example_losses import per_example_losses
from fedplan.privacy.dpsgd.factors import (
    Factor,
    GhostClippingError,
    merge_factors,
    squared_norm_bounds,
)
from fedplan.privacy.dpsgd.hooks import record_layer_calls
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    TrainedTensor,
    add_clipped_one_by_one,
    gradients_or_none,
    probe_examples,
    squared_norm,
)
from fedplan.tensors.devices import eval_mode, fork_rng_state, model_device

_TRIAL_NORM = 1e-6
"""max_grad_norm of the comparison with one-by-one gradients."""
_TOLERANCE = 1e-4
"""Relative difference allowed in that comparison."""


def add_ghost_clipped(objective: Objective, indices: Tensor, into: ClippedSum) -> None:
    """Add the clipped gradients of the examples at `indices` to a sum, by one backward pass.

    into: the sum, changed in place. Each added gradient has a norm of at most `into.max_grad_norm`
    in exact arithmetic, for any model, dtype and autocast; a gradient that is not finite adds
    nothing. Raises a GhostClippingError, with the sum unchanged, if the objective's model or loss
    does not support ghost clipping.
    """
    factors = gradient_factors(objective, indices)
    squares = torch.zeros(len(indices), dtype=torch.float64)
    for tensor_factors in factors.values():
        squares += squared_norm_bounds(tensor_factors)
    weights = into.clip_factors(squares)
    finite = squares.isfinite()
    for name, tensor_factors in factors.items():
        total = into.totals[name]
        for factor in tensor_factors:
            # A non-finite gradient must be left out: times zero it is still not finite.
            selected = factor if finite.all() else factor.select(finite.to(total.device))
            selected.add_weighted_sum(total, weights[finite].to(total))


def gradient_factors(objective: Objective, indices: Tensor) -> dict[str, tuple[Factor, ...]]:
    """Factors of the per-example gradients of the examples at `indices`, by tensor name.

    Runs one forward and backward pass of the objective's model. Tensors without a gradient are left
    out. Raises a GhostClippingError if the model or loss does not support ghost clipping.
    """
    count = len(indices)
    with record_layer_calls(objective, count) as calls:
        loss = per_example_losses(objective, objective.batch(indices), count).sum()
    recorded = {trained.name for call in calls for trained in call.tensors.values()}
    unrecorded = [trained for trained in objective.tensors if trained.name not in recorded]
    outputs = [call.output for call in calls]
    gradients = gradients_or_none(loss, outputs + [trained.tensor for trained in unrecorded])
    for trained, gradient in zip(unrecorded, gradients[len(calls) :], strict=True):
        if gradient is not None:
            raise GhostClippingError(f"{trained.name} is used outside of its own layer")
    factors: dict[str, list[Factor]] = {}
    for call, backprop in zip(calls, gradients, strict=False):
        for name, factor in call.factors(backprop, objective) if backprop is not None else ():
            factors.setdefault(name, []).append(factor)
    return {name: merge_factors(tensor_factors) for name, tensor_factors in factors.items()}


def why_not_ghost_clipping(objective: Objective) -> str:
    """Reason why an objective must not use ghost clipping; "" if ghost clipping works.

    Refuses an objective without examples, gradient checkpointing and layer drop. Then compares
    ghost clipping with one-by-one gradients on two and on three examples, without autocast and
    dropout, and one example's loss in two batches. The model is unchanged afterwards. An exception
    of ghost clipping becomes the reason.
    """
    # Tensors of zeros, such as new adapters, would hide the gradients of others from the
    # comparison, and are filled meanwhile.
    if not len(objective.examples):
        return "there are no examples to test it on"
    if any(
        getattr(module, "gradient_checkpointing", False) for module in objective.model.modules()
    ):
        return "gradient checkpointing runs layers twice"
    if any(getattr(module, "layerdrop", 0) for module in objective.model.modules()):
        return "whole layers are dropped at random, for all examples of a batch at once"
    indices, objective = probe_examples(objective.examples), replace(objective, dtype=None)
    three = indices[torch.arange(3) % len(indices)]
    with eval_mode(objective.model), _gradients_visible(objective.tensors):
        expected = ClippedSum(objective.tensors, _TRIAL_NORM)
        add_clipped_one_by_one(objective, three[:1], expected)
        for count in (2, 3):
            add_clipped_one_by_one(objective, three[count - 1 : count], expected)
            actual = ClippedSum(objective.tensors, _TRIAL_NORM)
            try:
                add_ghost_clipped(objective, three[:count], actual)
            except Exception as error:
                return str(error) or type(error).__name__
            if wrong := _first_difference(objective.tensors, expected, actual):
                return f"the gradient of {wrong} differs when examples run together"
    if (expected.norms.isfinite() & (expected.norms > 0)).sum() < 2:
        return "too few examples have a gradient to test it on"
    if not _is_loss_independent(objective, three):
        return "an example's loss depends on the others in its batch"
    return ""


def _is_loss_independent(objective: Objective, indices: Tensor) -> bool:
    """Whether an example's loss is the same in two batches that differ in another example.

    indices: of three examples; the first one's loss is compared. Runs in the model's current mode,
    with equal dropout masks.
    """
    losses = list[Tensor]()
    for order in ([0, 1, 2, 2], [0, 1, 2, 1]):
        with fork_rng_state(model_device(objective.model), seed=0), torch.no_grad():
            batch = objective.batch(indices[order])
            losses.append(per_example_losses(objective, batch, len(order))[0])
    return torch.allclose(losses[0], losses[1], rtol=1e-5, atol=1e-7, equal_nan=True)


def _first_difference(
    tensors: tuple[TrainedTensor, ...], one: ClippedSum, other: ClippedSum
) -> str:
    """Compare two sums of clipped gradients up to _TOLERANCE.

    Returns "an example" if the norms before clipping differ, else the name of the first tensor
    whose sums differ, else "".
    """
    if not torch.allclose(one.norms, other.norms, rtol=_TOLERANCE, atol=0, equal_nan=True):
        return "an example"
    for trained in tensors:
        others = trained.views(other.totals[trained.name])
        for key, values in trained.views(one.totals[trained.name]).items():
            distance = squared_norm(values - others[key]).sqrt()
            norm = squared_norm(values).sqrt()
            if not distance <= _TOLERANCE * norm + 1e-5 * one.max_grad_norm:
                return trained.name
    return ""


@contextmanager
def _gradients_visible(tensors: tuple[TrainedTensor, ...]) -> Generator[None]:
    """Let every tensor have a gradient while the context is open.

    Fills tensors that are all zeros with small numbers, and makes them zeros again at the end.
    Disables the fast path of torch's attention, which has no gradients in eval mode.
    """
    fastpath = torch.backends.mha.get_fastpath_enabled()
    zeros = [trained.tensor for trained in tensors if not trained.tensor.any()]
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.no_grad():
            for tensor in zeros:
                places = torch.arange(1, tensor.numel() + 1, device=tensor.device)
                tensor.copy_((places.sin() * 0.01).view(tensor.shape))
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)
        with torch.no_grad():
            for tensor in zeros:
                tensor.zero_()
