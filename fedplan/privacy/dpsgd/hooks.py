# SPDX-License-Identifier: Apache-2.0
"""Forward hooks that record layer calls, and the per-example gradients that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

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
    """One call of a layer on a batch of `count` examples.

    tensors: the layer's trained tensors, by attribute name ("weight", "bias").
    """

    module: nn.Module
    tensors: Mapping[str, TrainedTensor]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor
    count: int

    def factors(self, backprop: Tensor, objective: Objective) -> Iterator[tuple[str, Factor]]:
        """Name and gradient factor of each trained tensor.

        backprop: gradient of the loss in the output. Raises a GhostClippingError if a layer is not
        supported.
        """
        factors = _factor_rule(self.module)(self, backprop, objective)
        for attribute, trained in self.tensors.items():
            yield trained.name, _drop_frozen_rows(trained, factors[attribute])


@contextmanager
def record_layer_calls(objective: Objective, count: int) -> Generator[list[LayerCall]]:
    """Record the calls of all layers with trained tensors, in order, while the context is open.

    The batch must have `count` examples. Raises a GhostClippingError for a layer without an output
    for each example.
    """
    calls = list[LayerCall]()

    def record(
        tensors: dict[str, TrainedTensor],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Tensor:
        output = _expand_output(module, output, count)
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
    """Layers that hold trained tensors directly, with these by attribute name.

    A tensor that a child holds too is the child's. Raises a GhostClippingError for a trained tensor
    of a module that contains a list of blocks.
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


def _expand_output(module: nn.Module, output: Any, count: int) -> Tensor:
    """An output with a multiple of `count` rows; a single row is expanded to all examples.

    Raises a GhostClippingError for any other output.
    """
    if isinstance(output, Tensor) and output.dim() and len(output) in (1, count):
        return output.expand(count, *output.shape[1:])
    if isinstance(output, Tensor) and output.dim() and len(output) % count == 0:
        return output
    raise GhostClippingError(f"{type(module).__name__} returns no row for each example")


def _drop_frozen_rows(trained: TrainedTensor, factor: Factor) -> Factor:
    """Restrict a factor to the trained rows of its tensor.

    Raises a GhostClippingError if these are not whole outputs of the layer.
    """
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


FactorRule = Callable[[LayerCall, Tensor, Objective], Mapping[str, Factor]]
"""Computes the gradient factors of a call by attribute name, from the gradient in its output."""


def _factor_rule(module: nn.Module) -> FactorRule:
    """The rule for a type of layer; the general one runs the layer again for each example."""
    if type(module) is nn.Linear or type(module).__name__ in _DENSE:
        return partial(_dense_factors, _DENSE.get(type(module).__name__, 0))
    if type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq):
        return _embedding_factors
    if type(module) is nn.LayerNorm:
        return _layer_norm_factors
    return _rerun_factors


def _dense_factors(dim: int, call: LayerCall, backprop: Tensor, _: Objective) -> dict[str, Factor]:
    """Factors of weight and bias of a dense layer; `dim` counts its outputs."""
    inputs, outputs = _tokens(call.args[0], call.count), _tokens(backprop, call.count)
    return {"weight": DenseFactor(inputs, outputs, dim), "bias": FullGradients(outputs.sum(1))}


def _embedding_factors(call: LayerCall, backprop: Tensor, _: Objective) -> dict[str, Factor]:
    """Factor of an embedding table; padding tokens have no gradient."""
    ids = _tokens(call.args[0][..., None], call.count)[..., 0]
    outputs = _tokens(backprop, call.count)
    padding = cast("nn.Embedding", call.module).padding_idx
    if padding is not None:
        outputs = outputs.masked_fill((ids == padding)[..., None], 0.0)
    return {"weight": EmbeddingFactor(ids, outputs)}


def _layer_norm_factors(call: LayerCall, backprop: Tensor, _: Objective) -> dict[str, Factor]:
    """Gradients of weight and bias of a layer norm over the last dimension."""
    module = cast("nn.LayerNorm", call.module)
    if len(module.normalized_shape) != 1:
        return _rerun_factors(call, backprop, _)
    inputs, outputs = _tokens(call.args[0], call.count), _tokens(backprop, call.count)
    normed = layer_norm(inputs, module.normalized_shape, eps=module.eps)
    return {
        "weight": FullGradients((outputs * normed).sum(1)),
        "bias": FullGradients(outputs.sum(1)),
    }


def _rerun_factors(call: LayerCall, backprop: Tensor, objective: Objective) -> dict[str, Factor]:
    """Gradients of any small layer, by running it again on each example.

    Raises a GhostClippingError if the layer is large, or if its output is not the same again.
    """
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
    """A tensor as [examples, tokens, width]; a single row is expanded to all examples.

    Raises a GhostClippingError if its rows are no multiple of `count`.
    """
    tensor = _at_least_float32(tensor) if tensor.is_floating_point() else tensor
    if len(tensor) == 1:
        tensor = tensor.expand(count, *tensor.shape[1:])
    if len(tensor) % count:
        raise GhostClippingError(f"a layer takes {len(tensor)} rows for {count} examples")
    return tensor.reshape(count, -1, tensor.shape[-1])


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _argument_of(value: Any, i: int, count: int) -> Any:
    """An argument for example `i`: its row of a tensor of `count` rows; other values as is."""
    if not isinstance(value, Tensor):
        return value
    return (value[i : i + 1] if value.dim() and len(value) == count else value).detach()


def example_row(value: Any, i: int, count: int) -> Any:
    """Row `i` of a tensor of `count` rows; a tensor of one row, or no tensor, as it is.

    Raises a GhostClippingError for a tensor with another number of rows.
    """
    if not isinstance(value, Tensor) or (value.dim() and len(value) == 1):
        return value
    if not value.dim() or len(value) != count:
        raise GhostClippingError(
            f"a tensor of shape {tuple(value.shape)} has no row for each example"
        )
    return value[i : i + 1]
