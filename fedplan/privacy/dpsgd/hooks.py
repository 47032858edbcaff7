# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that record layer calls, and the per-example gradients that follow from them."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from fedplan.privacy.dpsgd.factors import (
    DenseFactor,
    EmbeddingFactor,
    Factor,
    FullGradients,
    GhostClippingError,
)
from fedplan.privacy.dpsgd.per_example import Objective, TrainedTensor, gradients_or_none

_DENSE = {"FalconLinear": 0, "Conv1D": 1}
"""Dense layers of other libraries, and the dimension of their weight that counts outputs."""
_MAX_RERUN_SIZE = 2**22
"""Most trained numbers of a layer that is run again for each example."""
_TOLERANCE = 1e-2
"""Relative difference allowed between the outputs of a layer's two runs."""


@dataclass(frozen=True)
class LayerCall:
    """One recorded call of a layer on a batch of `count` examples, with its trained tensors.

    `output` has a row, or rows, per example. Once the loss's gradient in it is known, `factors`
    gives the per-example gradients.
    """

    module: nn.Module
    tensors: Mapping[str, TrainedTensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor
    count: int

    def factors(self, backprop: Tensor, objective: Objective) -> Iterator[tuple[str, Factor]]:
        """Yield (name in the model, per-example gradients) of each trained tensor of the layer.

        backprop: gradient of the loss in the output. Raises a GhostClippingError for a layer that
        is not supported.
        """
        factors = _layer_factors(self, backprop, objective)
        for attribute, trained in self.tensors.items():
            yield trained.name, _drop_frozen_rows(trained, factors[attribute])


@contextmanager
def record_layer_calls(objective: Objective, count: int) -> Generator[list[LayerCall]]:
    """Record all calls of the objective's layers with trained tensors while the context is open.

    Yields a list that is filled in the order of calls; an output of one row is expanded to a row
    per example. Raises a GhostClippingError on entering if a module with an nn.ModuleList inside
    holds a trained tensor of its own, and in the model's forward if a layer's output has no row per
    example.
    """
    calls = list[LayerCall]()

    def record(
        tensors: dict[str, TrainedTensor],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Tensor:
        if not (isinstance(output, Tensor) and output.dim()) or (
            len(output) != 1 and len(output) % count
        ):
            raise GhostClippingError(f"{type(module).__name__} returns no row for each example")
        if len(output) in (1, count):
            output = output.expand(count, *output.shape[1:])
        calls.append(LayerCall(module, tensors, args, kwargs, output, count))
        return output

    hooks = list[Any]()
    try:
        for module, tensors in _layers_with_trained_tensors(objective):
            hook = partial(record, tensors)
            hooks.append(module.register_forward_hook(hook, with_kwargs=True))
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _layers_with_trained_tensors(
    objective: Objective,
) -> Iterator[tuple[nn.Module, dict[str, TrainedTensor]]]:
    """Yield each layer with its own trained tensors, by attribute name.

    A tensor that a child module holds too is the child's. Raises a GhostClippingError for a trained
    tensor of a module with an nn.ModuleList inside.
    """
    trained = {tensor.tensor: tensor for tensor in objective.tensors}
    for module in objective.model.modules():
        params = dict(module.named_parameters(recurse=False))
        tensors = {name: trained[param] for name, param in params.items() if param in trained}
        if tensors:
            inside = {param for child in module.children() for param in child.parameters()}
            tensors = {name: t for name, t in tensors.items() if t.tensor not in inside}
        if tensors and any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            raise GhostClippingError(
                f"{type(module).__name__} holds a trained tensor beside its blocks"
            )
        if tensors:
            yield module, tensors


def _drop_frozen_rows(trained: TrainedTensor, factor: Factor) -> Factor:
    """Restrict a factor to the trained rows; GhostClippingError if these are no outputs."""
    if not trained.row_params:
        return factor
    mask = torch.zeros_like(trained.tensor)
    for view in trained.views(mask).values():
        view.fill_(1)
    if isinstance(factor, FullGradients):
        return FullGradients(factor.gradients * mask)
    if isinstance(factor, DenseFactor):
        any_trained = mask.amax(1 - factor.output_dim)
        if torch.equal(any_trained, mask.amin(1 - factor.output_dim)):
            outputs = any_trained.nonzero().flatten()
            return DenseFactor(
                factor.activations, factor.backprops[..., outputs], factor.output_dim, outputs
            )
    raise GhostClippingError(f"{trained.name} is trained in rows that are not outputs of its layer")


def _layer_factors(call: LayerCall, backprop: Tensor, objective: Objective) -> Mapping[str, Factor]:
    """Per-example gradients of a layer call, by attribute name; other layers run again."""
    module, count = call.module, call.count
    if type(module) is nn.Linear or type(module).__name__ in _DENSE:
        output_dim = _DENSE.get(type(module).__name__, 0)
        inputs, outputs = _tokens(call.args[0], count), _tokens(backprop, count)
        weight = DenseFactor(inputs, outputs, output_dim)
        return {"weight": weight, "bias": FullGradients(outputs.sum(1))}
    if type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq):
        ids = _tokens(call.args[0][..., None], count)[..., 0]
        outputs = _tokens(backprop, count)
        if module.padding_idx is not None:  # padding tokens have no gradient
            outputs = outputs.masked_fill((ids == module.padding_idx)[..., None], 0.0)
        return {"weight": EmbeddingFactor(ids, outputs)}
    if type(module) is nn.LayerNorm and len(module.normalized_shape) == 1:
        inputs, outputs = _tokens(call.args[0], count), _tokens(backprop, count)
        normed = layer_norm(inputs, module.normalized_shape, eps=module.eps)
        weight = FullGradients((outputs * normed).sum(1))
        return {"weight": weight, "bias": FullGradients(outputs.sum(1))}
    return _rerun_factors(call, backprop, objective)


def _rerun_factors(call: LayerCall, backprop: Tensor, objective: Objective) -> dict[str, Factor]:
    """Per-example gradients of a small layer, by running it again on each example."""
    leaves = [trained.tensor for trained in call.tensors.values()]
    if sum(leaf.numel() for leaf in leaves) > _MAX_RERUN_SIZE:
        raise GhostClippingError(
            f"{type(call.module).__name__} is too large to run again for each example"
        )
    totals = [backprop.new_zeros((call.count, *leaf.shape), dtype=leaf.dtype) for leaf in leaves]
    for i in range(call.count):
        args = [_argument_of(value, i, call.count) for value in call.args]
        kwargs = {name: _argument_of(value, i, call.count) for name, value in call.kwargs.items()}
        with objective.autocast():
            output = call.module(*args, **kwargs)
        before = example_row(call.output, i, call.count).detach()
        if output.shape != before.shape or (output - before).norm() > _TOLERANCE * before.norm():
            raise GhostClippingError(
                f"{type(call.module).__name__} gives another output when it runs again"
            )
        gradients = gradients_or_none(output, leaves, example_row(backprop, i, call.count))
        for total, gradient in zip(totals, gradients, strict=True):
            if gradient is not None:
                total[i] = gradient
    return {
        name: FullGradients(_at_least_float32(total))
        for name, total in zip(call.tensors, totals, strict=True)
    }


def _tokens(tensor: Tensor, count: int) -> Tensor:
    """Detach a tensor as [examples, tokens, width], floats at least float32; one row serves all."""
    tensor = _at_least_float32(tensor) if tensor.is_floating_point() else tensor
    if len(tensor) == 1:
        tensor = tensor.expand(count, *tensor.shape[1:])
    if len(tensor) % count:
        raise GhostClippingError(f"a layer takes {len(tensor)} rows for {count} examples")
    return tensor.reshape(count, -1, tensor.shape[-1])


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _argument_of(value: Any, i: int, count: int) -> Any:
    """An argument for example `i`: of a tensor of `count` rows, row i; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    return (value[i : i + 1] if value.dim() and len(value) == count else value).detach()


def example_row(value: Any, i: int, count: int) -> Any:
    """Row `i` of a tensor of `count` rows, as a tensor of one row.

    A tensor of one row, or a value that is no tensor, is returned unchanged. Raises a
    GhostClippingError for another number of rows.
    """
    if not isinstance(value, Tensor) or (value.dim() and len(value) == 1):
        return value
    if not value.dim() or len(value) != count:
        raise GhostClippingError(
            f"a tensor of shape {tuple(value.shape)} has no row for each example"
        )
    return value[i : i + 1]
