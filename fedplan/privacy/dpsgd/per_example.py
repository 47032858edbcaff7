# SPDX-License-Identifier: Apache-2.0
"""Per-example gradients, clipped and summed, with one backward pass for each example.

An example's gradient is that of the loss on this example alone, over all trained params as one
vector. No other example is in the batch, so none can change it, whatever values the server sends.
This works for every model; `ghost_clipping` is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.errors import PrivacyError
from fedplan.language.plan import Roles
from fedplan.models.params import Param, Params
from fedplan.models.values import copy_buffers, mixes_examples, restore_buffers
from fedplan.privacy.mechanisms.noise import grid_step
from fedplan.tensors.devices import autocast, eval_mode, fork_rng_state, model_device, to_device

_CHUNK = 2**14
"""Numbers that are made float64 at a time, so that temporary tensors stay in the cache."""
_MARGIN = 1 - 2.0**-20
"""A clipped norm ends slightly inside the limit, so that rounding never puts it outside."""
_SLACK = 0.05
"""Relative tolerance when the loss of a batch is compared with those of its examples."""
_SMALLEST = 1e-300


@dataclass(frozen=True)
class TrainedTensor:
    """A parameter tensor of a model that is trained, wholly or in some rows.

    name: the tensor's name in the model; row_params: the params of the trained rows, () if the
    whole tensor is trained. `views` selects the trained parts of a tensor of the same shape.
    """

    name: str
    tensor: nn.Parameter
    row_params: Params = ()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """Views of the trained parts of a tensor of this shape, by the keys of `trainable`."""
        return {p.key: p.view(whole) for p in self.row_params} or {self.name: whole}


def trained_tensors(model: nn.Module, roles: Roles) -> tuple[TrainedTensor, ...]:
    """Tensors of a model with at least one trained param, in the order of `named_parameters`."""
    params: dict[str, list[Param]] = {}
    for param in roles:
        params.setdefault(param.name, []).append(param)
    tensors = list[TrainedTensor]()
    for name, tensor in model.named_parameters():
        trained = [param for param in params.get(name, []) if roles[param].is_trained]
        if trained:
            is_whole = len(trained) == len(params[name])
            tensors.append(TrainedTensor(name, tensor, () if is_whole else tuple(trained)))
    return tuple(tensors)


@dataclass(frozen=True)
class Objective:
    """Model, trained tensors, examples and loss of one fit; `dtype` of autocast, if any."""

    model: nn.Module
    tensors: tuple[TrainedTensor, ...]
    examples: Examples
    loss: Loss
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """Class name of the model, for messages."""
        return type(self.model).__name__

    def autocast(self) -> AbstractContextManager[Any]:
        """Context of forward passes: autocast to `dtype`, if set."""
        return autocast(model_device(self.model), self.dtype)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some examples as a batch on the model's device."""
        return to_device(self.examples.batch(indices), model_device(self.model))

    def batch_loss(self, indices: Tensor) -> Tensor:
        """The model's loss on a batch of some examples."""
        with self.autocast():
            return self.loss(self.model, self.batch(indices))


class ClippedSum:
    """A running sum of clipped per-example gradients, in steps of a grid.

    step: the grid step, a power of two; 0: 2**-27 of max_grad_norm or more. totals: the sum for
    each tensor in steps, float64, by name, zero at first; callers add clipped gradients in place.
    Whole steps add up exactly, to 2**53. norms: before clipping, appended by `clip_factors`; a
    non-finite gradient must add nothing. Frozen rows may hold anything: read a sum by
    `TrainedTensor.views`.
    """

    def __init__(
        self, tensors: Iterable[TrainedTensor], max_grad_norm: float, step: float = 0.0
    ) -> None:
        self.max_grad_norm = max_grad_norm
        self.step = step or grid_step(max_grad_norm)
        self.totals = {
            trained.name: torch.zeros_like(trained.tensor, dtype=torch.float64)
            for trained in tensors
        }
        self.norms = torch.empty(0, dtype=torch.float64)

    @property
    def sums(self) -> dict[str, Tensor]:
        """The sum for each tensor, a multiple of `step`."""
        return {name: total.round().mul_(self.step) for name, total in self.totals.items()}

    @property
    def non_finite(self) -> int:
        """Number of gradients that were not finite."""
        return int((~self.norms.isfinite()).sum())

    def clip_factors(self, squared_norms: Tensor) -> Tensor:
        """Factors that clip gradients of these norms, in steps; 0 for one that is not finite."""
        norms = squared_norms.double().cpu().sqrt()
        self.norms = torch.cat([self.norms, norms])
        clipping = self.max_grad_norm * _MARGIN / norms.clamp(min=_SMALLEST)
        factors = torch.where(norms <= self.max_grad_norm * _MARGIN, 1.0, clipping)
        return torch.where(norms.isfinite(), factors, 0.0) / self.step


def add_clipped_one_by_one(
    objective: Objective,
    indices: Tensor,
    into: ClippedSum,
    leave_out: Callable[[Exception], None] | None = None,
) -> None:
    """Add the clipped gradient of each example at `indices` to a sum, by one backward pass each.

    An example with a gradient that is not finite adds nothing. leave_out: called with an exception
    of an example, which then adds nothing; None raises it. Buffers are restored.
    """
    # One example must not decide whether others are added: a failure is that of one example alone.
    leaves = [trained.tensor for trained in objective.tensors]
    buffers = copy_buffers(objective.model)
    for i in range(len(indices)):
        try:
            all_gradients = gradients_or_none(objective.batch_loss(indices[i : i + 1]), leaves)
        except Exception as error:
            if leave_out is None:
                raise
            leave_out(error)
            continue
        finally:
            restore_buffers(objective.model, buffers)
        pairs = zip(objective.tensors, all_gradients, strict=True)
        gradients = {trained: gradient for trained, gradient in pairs if gradient is not None}
        views = [view for trained, g in gradients.items() for view in trained.views(g).values()]
        squares = [torch.zeros((), dtype=torch.float64), *map(squared_norm, views)]
        factor = float(into.clip_factors(torch.stack(squares).sum()[None]))
        for trained, gradient in gradients.items() if factor else ():
            # In whole steps, towards zero: the sum is exact, and no norm grows. The gradient itself
            # stays: two params that are added, as of embeddings, may share the memory of theirs.
            into.totals[trained.name].add_((gradient.double() * factor).trunc_())


def gradients_or_none(
    output: Tensor, inputs: Sequence[Tensor], output_grad: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """Gradients of an output in `inputs`; None for an input that the output ignores."""
    if not output.requires_grad:
        return (None,) * len(inputs)
    return torch.autograd.grad(output, inputs, output_grad, allow_unused=True)


def squared_norm(tensor: Tensor) -> Tensor:
    """Squared L2 norm of a tensor, in float64, on the CPU."""
    flat = tensor.detach().reshape(-1)
    chunks = (chunk.double() for chunk in cast("tuple[Tensor, ...]", flat.split(_CHUNK)))
    return torch.stack([torch.dot(chunk, chunk) for chunk in chunks]).sum().cpu()


def require_private_training(objective: Objective) -> None:
    """Raise a PrivacyError if DP-SGD cannot train an objective's model with its loss.

    Call this once, before any charge, with examples and values that are not private: its outcome is
    visible. Raises as `require_independent_examples` in training mode, whatever a gradient raises,
    and a PrivacyError if a gradient depends on earlier examples. Restores mode, buffers and random
    state.
    """
    modes = {module: module.training for module in objective.model.modules()}
    buffers = copy_buffers(objective.model)
    try:
        objective.model.train()
        _require_no_batch_statistics(objective)
        _require_repeatable_gradients(objective)  # first: the model has seen no long example yet
        require_independent_examples(objective)
    finally:
        restore_buffers(objective.model, buffers)
        for module, mode in modes.items():
            module.training = mode


def require_independent_examples(objective: Objective) -> None:
    """Raise a PrivacyError if the objective's model or loss mixes the examples of a batch.

    By batch norm in training mode, int8 layers, a buffer that a forward pass changes, or a loss of
    up to three examples that is neither a mean nor the sum of theirs, unless it is not finite.
    """
    # A mixed example would have no gradient of its own to clip. Examples of one length: padding
    # may change a loss by rounding.
    _require_no_batch_statistics(objective)
    lengths = _text_lengths(objective.examples)
    if not len(lengths):
        return
    indices = (lengths == lengths.mode().values).nonzero().flatten()[:3]
    _require_unchanged_buffers(objective, indices)
    with eval_mode(objective.model), torch.no_grad():
        singles = cast("tuple[Tensor, ...]", indices.split(1))
        alone = [objective.batch_loss(index).item() for index in singles]
        together = objective.batch_loss(indices).item()
        twice = objective.batch_loss(indices[[0, 0]]).item()
    if not all(map(isfinite, (*alone, together, twice))):
        return
    if not (_is_mean_or_sum(alone, together) and _is_mean_or_sum([alone[0]] * 2, twice)):
        raise PrivacyError(
            f"the loss of {objective.name} on several examples is neither a mean nor the sum of "
            "their own: each is compared with the others, as contrastive losses do, so no example "
            "has a gradient of its own to clip. Take a loss of single examples, such as image-text "
            "against the classes, or privacy at the level of clients"
        )


def _require_no_batch_statistics(objective: Objective) -> None:
    """Raise a PrivacyError if the model has int8 layers, or batch norm in training mode."""
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    modules: dict[str, nn.Module] = dict(objective.model.named_modules())
    for name, module in modules.items():
        if isinstance(module, batch_norms) and module.training:
            raise PrivacyError(
                f"{name} of {objective.name} is a {type(module).__name__}: it takes the mean of a "
                "batch, so that examples change each other's gradients. Put GroupNorm or LayerNorm "
                "in its place, or take privacy at the level of clients"
            )
        if mixes_examples(module):
            raise PrivacyError(
                f"{name} of {objective.name} is quantized to int8, which treats the columns apart "
                "in which any example of a batch has a large number, so that examples change each "
                "other's gradients. Quantize it to nf4, or take privacy at the level of clients"
            )


def _text_lengths(examples: Examples) -> Tensor:
    """Numbers of tokens of the first 1,000 examples; zeros without an attention mask."""
    first = torch.arange(min(1000, len(examples)))
    if not len(first) or "attention_mask" not in examples.batch(first[:1]):
        return torch.zeros_like(first)
    return examples.batch(first)["attention_mask"].flatten(1).sum(1)


def probe_examples(examples: Examples) -> Tensor:
    """Indices of up to three of the first 1,000 examples: shortest, longest and median text."""
    lengths = _text_lengths(examples)
    order = lengths.argsort(stable=True)
    has_texts = len(order) > 2 and bool(lengths.any())
    return order[[0, -1, len(order) // 2]] if has_texts else order[:3]


def _require_unchanged_buffers(objective: Objective, indices: Tensor) -> None:
    before = {name: buffer.clone() for name, buffer in objective.model.named_buffers()}
    with fork_rng_state(model_device(objective.model)), torch.no_grad():
        objective.batch_loss(indices)
    for name, buffer in objective.model.named_buffers():
        old = before.get(name)
        if old is None or old.shape != buffer.shape or not torch.equal(old, buffer):
            raise PrivacyError(
                f"{name} of {objective.name} changes while it trains: it remembers examples, so "
                "that they change the gradients of later ones. Use client-level privacy, or a "
                "model without such a buffer"
            )


def _require_repeatable_gradients(objective: Objective) -> None:
    """Raise a PrivacyError if the gradient of an example changes after those of others.

    Tries four examples from short to long, and then in reverse: a model may forget what it
    remembers when it sees a short one.
    """
    sizes = _text_lengths(objective.examples)
    if not len(sizes):
        return
    order = sizes.argsort(stable=True)
    below = max(int((sizes < sizes.max()).sum()) - 1, 0)
    probes = [order[place] for place in sorted({0, len(order) // 2, below, len(order) - 1})]
    leaves = [trained.tensor for trained in objective.tensors]
    buffers = copy_buffers(objective.model)

    def gradient_bits(index: Tensor) -> list[Tensor | None]:
        with fork_rng_state(model_device(objective.model), seed=0):
            gradients = gradients_or_none(objective.batch_loss(index[None]), leaves)
        restore_buffers(objective.model, buffers)
        return [g if g is None else g.reshape(-1).view(torch.uint8) for g in gradients]

    before = [gradient_bits(probe) for probe in probes]
    after = [gradient_bits(probe) for probe in reversed(probes)]
    for olds, news in zip(before, reversed(after), strict=True):
        for trained, old, new in zip(objective.tensors, olds, news, strict=True):
            same = old is new if old is None or new is None else torch.equal(old, new)
            if not same:
                raise PrivacyError(
                    f"the gradient of {trained.name} of {objective.name} for one and the same "
                    "example differs from one call to the next: the model remembers other "
                    "examples, or is not deterministic. Set deterministic = true, take another "
                    "model, or privacy at the level of clients"
                )


def _is_mean_or_sum(alone: list[float], together: float) -> bool:
    """Whether a batch's loss lies in the range of its examples' losses, or is about their sum."""
    slack = _SLACK * max(map(abs, alone)) + 1e-4
    mean = min(alone) - slack <= together <= max(alone) + slack
    return mean or abs(sum(alone) - together) <= slack * len(alone)
