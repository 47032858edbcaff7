# SPDX-License-Identifier: Apache-2.0
"""Ghost clipping: clipped sums of gradients without a gradient per example."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.privacy.dpsgd.factors import (
    Factor,
    GhostClippingError,
    merge_factors,
    squared_norm_bounds,
)
from fedplan.privacy.dpsgd.hooks import example_row, record_layer_calls
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


def per_example_losses(objective: Objective, batch: Mapping[str, Tensor], count: int) -> Tensor:
    """Loss of each of the `count` examples of a batch, by one run of the objective's model.

    Calls the loss on the batch and then on each example. Returns a tensor [count] that is attached
    to the autograd graph. Raises a GhostClippingError if a tensor of the batch has no row per
    example, if the loss of the batch calls the model not exactly once, or that of an example with
    other tensors than the example's rows, or if the model returns neither tensor, mapping nor
    tuple.
    """
    if not all(_has_rows(tensor, count) for tensor in batch.values()):
        raise GhostClippingError("a batch holds tensors without a row for each example")
    calls = list[_ForwardCall]()
    forward = objective.model.forward

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(_ForwardCall(args, kwargs, forward(*args, **kwargs), count))
        return calls[-1].output

    with _forward_replaced(objective.model, record), objective.autocast():
        objective.loss(objective.model, batch)
    if len(calls) != 1:
        raise GhostClippingError(f"the loss calls the model {len(calls)} times")
    losses = list[Tensor]()
    for i in range(count):
        with _forward_replaced(objective.model, calls[0].replay(i)), objective.autocast():
            example = {name: tensor[i : i + 1] for name, tensor in batch.items()}
            losses.append(objective.loss(objective.model, example).reshape(()))
    return torch.stack(losses)


@dataclass(frozen=True)
class _ForwardCall:
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    count: int

    def replay(self, i: int) -> Callable[..., Any]:
        """Make a forward function that returns the rows of example `i` of the recorded output.

        It raises a GhostClippingError for other arguments than the recorded ones of example `i`;
        nan equals nan, and arguments that are no tensors are not compared.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
                raise GhostClippingError(
                    "the loss calls the model with other arguments for one example"
                )
            pairs = [*zip(self.args, args, strict=True)]
            pairs += [(self.kwargs[name], value) for name, value in kwargs.items()]
            for batched, now in pairs:
                if isinstance(batched, Tensor):
                    row = example_row(batched, i, self.count)
                    is_same = isinstance(now, Tensor) and row.shape == now.shape
                    if not is_same or not ((row == now) | (row != row) & (now != now)).all():
                        raise GhostClippingError(
                            "the loss gives the model other inputs for one example"
                        )
            return self._example_output(i)

        return forward

    def _example_output(self, i: int) -> Any:
        """Rows of example `i` of the output; a value without such rows is left out, or None."""
        if isinstance(self.output, Tensor):
            return example_row(self.output, i, self.count)
        if isinstance(self.output, Mapping):
            fields = cast("Mapping[str, Any]", self.output)
            rows = {k: v[i : i + 1] for k, v in fields.items() if _has_rows(v, self.count)}
            return cast("Any", type(self.output))(**rows)
        if type(self.output) is tuple:
            values = cast("tuple[Any, ...]", self.output)
            return tuple(v[i : i + 1] if _has_rows(v, self.count) else None for v in values)
        raise GhostClippingError(f"the model returns a {type(self.output).__name__}")


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


@contextmanager
def _forward_replaced(model: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    attributes = vars(model)
    own = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own


_TRIAL_NORM = 1e-6
"""max_grad_norm of the comparison with one-by-one gradients."""
_TOLERANCE = 1e-4
"""Relative difference allowed in that comparison."""


def add_ghost_clipped(objective: Objective, indices: Tensor, into: ClippedSum) -> None:
    """Add the clipped gradients of the examples at `indices` to a sum, by one backward pass.

    Each added gradient has a norm of at most `into.max_grad_norm` in exact arithmetic, for any
    model, dtype and autocast; a gradient that is not finite adds nothing. Raises a
    GhostClippingError, with the sum unchanged, if model or loss does not support ghost clipping.
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

    Tensors without a gradient are left out. Raises a GhostClippingError if the model or loss does
    not support ghost clipping.
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
    dropout, and one example's loss in two batches. An exception of ghost clipping is a reason.
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
    """Whether the first of three examples has one loss in batches that differ in others."""
    losses = list[Tensor]()
    for order in ([0, 1, 2, 2], [0, 1, 2, 1]):
        with fork_rng_state(model_device(objective.model), seed=0), torch.no_grad():
            batch = objective.batch(indices[order])
            losses.append(per_example_losses(objective, batch, len(order))[0])
    return torch.allclose(losses[0], losses[1], rtol=1e-5, atol=1e-7, equal_nan=True)


def _first_difference(
    tensors: tuple[TrainedTensor, ...], one: ClippedSum, other: ClippedSum
) -> str:
    """Name of the first tensor whose sums differ, "an example" if norms do, "" if none does."""
    if not torch.allclose(one.norms, other.norms, rtol=_TOLERANCE, atol=0, equal_nan=True):
        return "an example"
    for trained in tensors:
        others = trained.views(other.totals[trained.name])
        for key, values in trained.views(one.totals[trained.name]).items():
            distance = squared_norm(values - others[key]).sqrt()
            norm = squared_norm(values).sqrt()
            if not distance <= _TOLERANCE * norm + 1e-5 * one.max_grad_norm / one.step:
                return trained.name
    return ""


@contextmanager
def _gradients_visible(tensors: tuple[TrainedTensor, ...]) -> Generator[None]:
    """Fill tensors of zeros, and disable torch's fast attention: both would hide gradients."""
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
