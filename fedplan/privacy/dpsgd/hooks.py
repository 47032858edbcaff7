# SPDX-License-Identifier: Apache-2.0
"""Hooks: what goes into a layer and comes out of it, and the gradients that follow from both."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from fedplan.privacy.dpsgd.factors import Factor, Lookup, Outer, Unfactored, Whole
from fedplan.privacy.dpsgd.per_example import Subject, Trained, slopes

_DENSE = {"FalconLinear": 0, "Conv1D": 1}
"""Dense layers of other people, and which dimension of their weight counts outputs."""
_SMALL = 2**22
_ALIKE = 1e-2


@dataclass(frozen=True)
class LayerCall:
    """One call of a layer for `count` examples; `own` are its trained tensors, by their roles."""

    module: nn.Module
    own: Mapping[str, Trained]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Tensor
    count: int

    def factors(self, slope: Tensor, subject: Subject) -> Iterator[tuple[str, Factor]]:
        """The gradients of its tensors, given the slope of the loss in its output."""
        found = _explainer(self.module)(self, slope, subject)
        for role, each in self.own.items():
            yield each.name, _awake(each, found[role])


@contextmanager
def heard(subject: Subject, count: int) -> Generator[list[LayerCall]]:
    """The calls of each layer that has trained tensors, as they happen."""
    calls = list[LayerCall]()

    def hear(
        own: dict[str, Trained],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Tensor:
        output = _for_each(module, output, count)
        calls.append(LayerCall(module, own, args, kwargs, output, count))
        return output

    hooks = list[Any]()
    try:
        for module, own in _owners(subject):
            listen = partial(hear, own)
            hooks.append(module.register_forward_hook(listen, with_kwargs=True))
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def _owners(subject: Subject) -> Iterator[tuple[nn.Module, dict[str, Trained]]]:
    """The layers with trained tensors; one that a layer inside also has is the inner one's."""
    trained = {each.tensor: each for each in subject.tensors}
    for module in subject.model.modules():
        held = dict(module.named_parameters(recurse=False))
        own = {role: trained[tensor] for role, tensor in held.items() if tensor in trained}
        if own:
            inside = {tensor for child in module.children() for tensor in child.parameters()}
            own = {role: each for role, each in own.items() if each.tensor not in inside}
        if own and any(isinstance(inner, nn.ModuleList) for inner in module.modules()):
            raise Unfactored(f"{type(module).__name__} holds a trained tensor beside its blocks")
        if own:
            yield module, own


def _for_each(module: nn.Module, output: Any, count: int) -> Tensor:
    """An output with rows for each example, also where one row is meant for all."""
    if isinstance(output, Tensor) and output.dim() and len(output) in (1, count):
        return output.expand(count, *output.shape[1:])
    if isinstance(output, Tensor) and output.dim() and len(output) % count == 0:
        return output
    raise Unfactored(f"{type(module).__name__} gives no row for each example")


def _awake(each: Trained, factor: Factor) -> Factor:
    """A factor without the rows of its tensor that are not trained."""
    if not each.rows:
        return factor
    marks = torch.zeros_like(each.tensor)
    for view in each.views(marks).values():
        view.fill_(1)
    if isinstance(factor, Whole):
        return Whole(factor.each * marks)
    if isinstance(factor, Outer):
        some = marks.amax(1 - factor.dim)
        if torch.equal(some, marks.amin(1 - factor.dim)):
            outputs = some.nonzero().flatten()
            return Outer(factor.inputs, factor.slopes[..., outputs], factor.dim, outputs)
    raise Unfactored(f"{each.name} is trained in rows that are not outputs of its layer")


Explain = Callable[[LayerCall, Tensor, Subject], Mapping[str, Factor]]


def _explainer(module: nn.Module) -> Explain:
    """How the gradients of a layer come about."""
    if type(module) is nn.Linear or type(module).__name__ in _DENSE:
        return partial(_dense, _DENSE.get(type(module).__name__, 0))
    if type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq):
        return _lookup
    if type(module) is nn.LayerNorm:
        return _normed
    return _again


def _dense(dim: int, call: LayerCall, slope: Tensor, _: Subject) -> dict[str, Factor]:
    inputs, outputs = _tokens(call.args[0], call.count), _tokens(slope, call.count)
    return {"weight": Outer(inputs, outputs, dim), "bias": Whole(outputs.sum(1))}


def _lookup(call: LayerCall, slope: Tensor, _: Subject) -> dict[str, Factor]:
    ids = _tokens(call.args[0][..., None], call.count)[..., 0]
    outputs = _tokens(slope, call.count)
    padding = cast("nn.Embedding", call.module).padding_idx
    if padding is not None:
        outputs = outputs.masked_fill((ids == padding)[..., None], 0.0)
    return {"weight": Lookup(ids, outputs)}


def _normed(call: LayerCall, slope: Tensor, _: Subject) -> dict[str, Factor]:
    module = cast("nn.LayerNorm", call.module)
    if len(module.normalized_shape) != 1:
        return _again(call, slope, _)
    inputs, outputs = _tokens(call.args[0], call.count), _tokens(slope, call.count)
    normed = layer_norm(inputs, module.normalized_shape, eps=module.eps)
    return {"weight": Whole((outputs * normed).sum(1)), "bias": Whole(outputs.sum(1))}


def _again(call: LayerCall, slope: Tensor, subject: Subject) -> dict[str, Factor]:
    """Any small layer: it runs again for each example, and must come to the same."""
    leaves = [each.tensor for each in call.own.values()]
    if sum(leaf.numel() for leaf in leaves) > _SMALL:
        raise Unfactored(f"{type(call.module).__name__} is too large to run again for each example")
    found = [slope.new_zeros((call.count, *leaf.shape), dtype=leaf.dtype) for leaf in leaves]
    for i in range(call.count):
        args = [_one(each, i, call.count) for each in call.args]
        kwargs = {name: _one(each, i, call.count) for name, each in call.kwargs.items()}
        with subject.autocast():
            output = call.module(*args, **kwargs)
        was = row(call.output, i, call.count).detach()
        if output.shape != was.shape or (output - was).norm() > _ALIKE * was.norm():
            raise Unfactored(f"{type(call.module).__name__} does not come to the same twice")
        slope_of_it = row(slope, i, call.count)
        gradients = slopes(output, leaves, slope_of_it)
        for room, gradient in zip(found, gradients, strict=True):
            if gradient is not None:
                room[i] = gradient
    return {role: Whole(_floats(room)) for role, room in zip(call.own, found, strict=True)}


def _tokens(tensor: Tensor, count: int) -> Tensor:
    """A tensor as [examples, tokens, width]; one row that is meant for all is given to each."""
    tensor = _floats(tensor) if tensor.is_floating_point() else tensor
    if len(tensor) == 1:
        tensor = tensor.expand(count, *tensor.shape[1:])
    if len(tensor) % count:
        raise Unfactored(f"a layer takes {len(tensor)} rows for {count} examples")
    return tensor.reshape(count, -1, tensor.shape[-1])


def _floats(tensor: Tensor) -> Tensor:
    return tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))


def _one(each: Any, i: int, count: int) -> Any:
    """An argument for one example: what has no rows for them is taken to be for all."""
    if not isinstance(each, Tensor):
        return each
    return (each[i : i + 1] if each.dim() and len(each) == count else each).detach()


def row(each: Any, i: int, count: int) -> Any:
    """What belongs to one of `count` examples; what is the same for all stays as it is."""
    if not isinstance(each, Tensor) or (each.dim() and len(each) == 1):
        return each
    if not each.dim() or len(each) != count:
        raise Unfactored(f"a tensor of shape {tuple(each.shape)} has no row for each example")
    return each[i : i + 1]
