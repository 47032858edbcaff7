# SPDX-License-Identifier: Apache-2.0
"""Finds the frozen modules of a model that need not run, and replaces their outputs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedplan.models.description import block_modules
from fedplan.tensors.devices import fork_rng_state, model_device, rng_state
from fedplan.tensors.named import Batch

LossFn = Callable[[Batch], Tensor]
"""Returns the loss of a batch, under the settings of a training step such as autocast."""


@dataclass(frozen=True)
class ActivationCut:
    """A cut through a model: modules that are skipped, and the tensors that replace their outputs.

    `skipped`: names of the modules that do not run.
    `slots`: the tensors that are cached. `module>0` is the first output of a module; `module<0` and
    `module<x` are an input of a module, by position or by name. Any other output of a skipped
    module is nan, so that a use of it shows in the loss.
    `params`: frozen params that a cached tensor may depend on.
    """

    skipped: tuple[str, ...]
    slots: tuple[str, ...]
    params: tuple[str, ...]

    @property
    def text(self) -> str:
        """Skipped modules and slots as one line, for digests."""
        return f"{' '.join(self.skipped)} | {' '.join(self.slots)}"


@dataclass
class _CallStats:
    """Observations of one module during one pass.

    `calls`: number of calls. `draws_random`: a call changed the random state.
    `grad_in`, `grad_out`: an input, or an output, requires a gradient.
    `float_outputs`: there are outputs, and all are floating-point.
    `inputs`: floating-point inputs, by position or name, that are no tensor of the batch itself.
    `output_count`: number of output tensors.
    """

    calls: int = 0
    draws_random: bool = False
    grad_in: bool = False
    grad_out: bool = False
    float_outputs: bool = True
    inputs: tuple[str, ...] = ()
    output_count: int = 0


class _AllRecorded(Exception):
    """Ends a pass early: every requested tensor has been recorded."""


@dataclass
class CachedForward:
    """Replaces the outputs of a model's skipped modules, within `install()` and while `on`.

    `shapes`: outputs of each skipped module for one example, on the meta device.
    `tensors`: the cached tensors of the present batch by slot; `count` is its number of examples.
    `fixed`: slots whose shape does not depend on the batch size, such as position embeddings.
    """

    model: nn.Module
    cut: ActivationCut
    shapes: dict[str, Any] = field(default_factory=dict[str, Any])
    tensors: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    count: int = 1
    on: bool = False
    fixed: frozenset[str] = frozenset()

    @contextmanager
    def install(self) -> Generator[None]:
        """Patch the model's skipped modules and input hooks; restore the model at the end."""
        entries = dict.fromkeys(_module_of_slot(slot) for slot in self.cut.slots if "<" in slot)
        modules = {name: self.model.get_submodule(name) for name in (*self.cut.skipped, *entries)}
        hooks = list[RemovableHandle]()
        originals = {name: vars(modules[name]).get("forward") for name in self.cut.skipped}
        try:
            for name in self.cut.skipped:
                vars(modules[name])["forward"] = self._skip(name, modules[name].forward)
            for name in entries:
                hook = self._replace_inputs(name)
                hooks.append(modules[name].register_forward_pre_hook(hook, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, forward in originals.items():
                del vars(modules[name])["forward"]
                if forward is not None:
                    vars(modules[name])["forward"] = forward

    def _skip(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward that gives cached or nan outputs while on, else calls the original."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return original(*args, **kwargs)
            return map_tensors(self.shapes[name], output)

        def output(position: int, like: Tensor) -> Tensor:
            slot = f"{name}>{position}"
            if (cached := self.tensors.get(slot)) is not None:
                return cached
            shape = list(like.shape)
            if shape[:1] == [1] and slot not in self.fixed:
                shape[0] = self.count
            # An expanded scalar takes no memory.
            device = next(self.model.parameters()).device
            return torch.full((), nan, dtype=like.dtype, device=device).expand(shape)

        return forward

    def _replace_inputs(self, name: str) -> Callable[..., Any]:
        """Return a forward pre-hook that replaces the inputs which have a cached tensor."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.on:
                return None
            inputs = (self.tensors.get(f"{name}<{i}", each) for i, each in enumerate(args))
            return tuple(inputs), {k: self.tensors.get(f"{name}<{k}", v) for k, v in kwargs.items()}

        return hook


def map_tensors(output: Any, change: Callable[[int, Tensor], Any]) -> Any:
    """Return a module's output with each tensor replaced by `change(position, tensor)`.

    Positions count tensors from 0. Mappings keep their class, lists become tuples, others None.
    """
    position = iter(range(2**31))

    def walk(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(next(position), value)
        if isinstance(value, Mapping):  # a ModelOutput of transformers, which omits None
            named = cast("Mapping[str, Any]", value)
            return cast("Any", type(named))(**{k: walk(v) for k, v in named.items()})
        if isinstance(value, list | tuple):
            return tuple(map(walk, cast("Sequence[Any]", value)))
        return None

    return walk(output)


def list_tensors(value: Any) -> list[Tensor]:
    """Return all tensors in nested mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    items = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in list_tensors(item)]


def batch_independent_slots(
    one_shapes: Mapping[str, Any], two_shapes: Mapping[str, Any]
) -> frozenset[str]:
    """Return the output slots whose shape is the same in two results of `record_activations`."""
    return frozenset(
        f"{name}>{i}"
        for name, output in one_shapes.items()
        for i, pair in enumerate(
            zip(list_tensors(output), list_tensors(two_shapes[name]), strict=True)
        )
        if pair[0].shape == pair[1].shape
    )


def _float_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point tensors among a module's inputs, by position or name."""
    inputs = {**{str(i): each for i, each in enumerate(args)}, **kwargs}
    return {
        place: each
        for place, each in inputs.items()
        if isinstance(each, Tensor) and each.is_floating_point()
    }


@contextmanager
def _observe(
    model: nn.Module, names: Sequence[str], before: Callable[..., None], after: Callable[..., None]
) -> Generator[None]:
    """Call `before(name, args, kwargs)` and `after(name, output)` around each named module."""
    hooks, modules = list[RemovableHandle](), dict(model.named_modules())

    def register(name: str) -> None:
        first = modules[name].register_forward_pre_hook(
            lambda _, args, kwargs: before(name, args, kwargs), with_kwargs=True
        )
        hooks.extend((first, modules[name].register_forward_hook(lambda _, __, o: after(name, o))))

    try:
        for name in names:
            register(name)
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record_activations(
    model: nn.Module, names: Sequence[str], slots: Sequence[str], batch: Batch, loss_fn: LossFn
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run a batch without gradients and record module outputs.

    Returns the outputs of the modules `names`, on the meta device, and the tensors of `slots`. The
    pass ends as soon as all are recorded, and the random state is restored.
    """
    shapes, tensors = dict[str, Any](), dict[str, Tensor]()
    entering = {_module_of_slot(slot) for slot in slots if "<" in slot}
    leaving = {*names, *(_module_of_slot(slot) for slot in slots if ">" in slot)}
    missing = {(name, "<") for name in entering} | {(name, ">") for name in leaving}

    def finish(name: str, side: str) -> None:
        missing.discard((name, side))
        if not missing:
            raise _AllRecorded

    def before(name: str, args: Any, kwargs: Any) -> None:
        if name in entering:
            inputs = _float_inputs(args, kwargs)
            by_slot = {f"{name}<{place}": each.detach() for place, each in inputs.items()}
            tensors.update({slot: each for slot, each in by_slot.items() if slot in slots})
            finish(name, "<")

    def after(name: str, output: Any) -> None:
        if name in leaving:
            by_slot = {f"{name}>{i}": each.detach() for i, each in enumerate(list_tensors(output))}
            tensors.update({slot: each for slot, each in by_slot.items() if slot in slots})
            shapes[name] = map_tensors(output, lambda _, each: each.detach().to("meta"))
            finish(name, ">")

    observing = _observe(model, list(entering | leaving), before, after)
    with fork_rng_state(model_device(model)), torch.no_grad(), observing, suppress(_AllRecorded):
        loss_fn(batch)
    return shapes, tensors


def _trace_calls(model: nn.Module, batch: Batch, loss_fn: LossFn) -> dict[str, _CallStats]:
    """Run a batch and return the observations of every module by name."""
    calls: dict[str, _CallStats] = {name: _CallStats() for name in dict(model.named_modules())}
    raw = {each.data_ptr() for each in batch.values()}
    random_states, device = dict[str, bytes](), model_device(model)

    def before(name: str, args: Any, kwargs: Any) -> None:
        call = calls[name]
        call.calls += 1
        call.grad_in |= any(t.requires_grad for t in list_tensors((args, tuple(kwargs.values()))))
        inputs = _float_inputs(args, kwargs)
        call.inputs = tuple(k for k, each in inputs.items() if each.data_ptr() not in raw)
        random_states[name] = rng_state(device)

    def after(name: str, output: Any) -> None:
        call, outputs = calls[name], list_tensors(output)
        call.grad_out |= any(each.requires_grad for each in outputs)
        call.float_outputs &= bool(outputs) and all(each.is_floating_point() for each in outputs)
        call.output_count = len(outputs)
        call.draws_random |= random_states[name] != rng_state(device)

    with _observe(model, list(calls), before, after):
        loss_fn(batch)
    return calls


def find_cut(model: nn.Module, batch: Batch, loss_fn: LossFn) -> tuple[ActivationCut | None, str]:
    """Return the cut below which no param of a model is trained, or None and the reason.

    `batch` has one example; params have their requires_grad set. A module whose inputs and outputs
    require no gradient is frozen. The cut skips all frozen modules that can be skipped without a
    change of any bit of the loss and of the gradients.
    """
    config = cast("object", vars(model).get("config"))
    settings = vars(config) if config is not None else dict[str, object]()
    if any(value for name, value in settings.items() if name.endswith("layerdrop")):
        return None, "it leaves out blocks at random"
    calls = _trace_calls(model, batch, loss_fn)
    frozen = [name for name, call in calls.items() if _is_frozen(model, name, call)]
    outermost = [
        name for name in frozen if not name.startswith(tuple(f"{other}." for other in frozen))
    ]
    if any(calls[name].draws_random for name in outermost):
        return None, "its frozen part draws random numbers, as dropout does"
    entries = [
        f"{name}<{place}"
        for name, call in calls.items()
        if name and call.calls == 1 and call.grad_out and not call.grad_in
        for place in call.inputs
    ]
    outputs = [f"{name}>{i}" for name in outermost for i in range(calls[name].output_count)]
    if not outermost:
        return None, "no module before the trained ones is frozen"
    params = tuple(_upstream_params(model, calls))
    largest = ActivationCut(tuple(outermost), (*outputs, *entries), params)
    cut = _smallest_cut(model, batch, loss_fn, largest)
    if cut is None:
        return None, "no part of it can be skipped"
    blocks = set(block_modules(model).values())
    skipped = [module for name in cut.skipped for module in model.get_submodule(name).modules()]
    if blocks and blocks.isdisjoint(skipped):
        return None, "no whole block before the trained ones is frozen, and less is not worth it"
    return cut, ""


def _is_frozen(model: nn.Module, name: str, call: _CallStats) -> bool:
    """Whether a module has params, ran once, and has no input or output with a gradient."""
    module = model.get_submodule(name)
    constant = call.calls == 1 and call.float_outputs and not call.grad_in and not call.grad_out
    return bool(name) and constant and any(True for _ in module.parameters())


def _upstream_params(model: nn.Module, calls: Mapping[str, _CallStats]) -> list[str]:
    """Return the frozen params of modules that a cached tensor may depend on.

    All modules count but those that ran once with an input that requires a gradient.
    """
    downstream = {name for name, call in calls.items() if call.calls == 1 and call.grad_in}
    return [
        name
        for name, tensor in model.named_parameters()
        if not tensor.requires_grad and name.rpartition(".")[0] not in downstream
    ]


def _smallest_cut(
    model: nn.Module, batch: Batch, loss_fn: LossFn, largest: ActivationCut
) -> ActivationCut | None:
    """Remove slots from a cut as long as loss and gradients stay equal bit by bit.

    Returns None if the largest cut itself changes them.
    """
    leaves = [tensor for tensor in model.parameters() if tensor.requires_grad]
    expected = _loss_and_gradients(loss_fn, batch, leaves)
    shapes, tensors = record_activations(model, largest.skipped, largest.slots, batch, loss_fn)

    def is_exact(cut: ActivationCut) -> bool:
        forward = CachedForward(
            model, cut, shapes, {slot: tensors[slot] for slot in cut.slots}, on=True
        )
        with forward.install(), suppress(RuntimeError, TypeError, AttributeError, IndexError):
            results = _loss_and_gradients(loss_fn, batch, leaves)
            return all(
                torch.equal(one, other) if one is not None and other is not None else one is other
                for one, other in zip(expected, results, strict=True)
            )
        return False

    if not is_exact(largest):
        return None
    inputs_only = replace(largest, slots=tuple(slot for slot in largest.slots if "<" in slot))
    cut = inputs_only if is_exact(inputs_only) else largest
    for slot in cut.slots:
        smaller = replace(cut, slots=tuple(each for each in cut.slots if each != slot))
        cut = smaller if is_exact(smaller) else cut
    for name in [_module_of_slot(slot) for slot in cut.slots if "<" in slot]:
        cut = _unskip_inside(cut, name, is_exact)
    return cut


def _module_of_slot(slot: str) -> str:
    return slot.replace("<", ">").split(">")[0]


def _unskip_inside(
    cut: ActivationCut, name: str, is_exact: Callable[[ActivationCut], bool]
) -> ActivationCut:
    """Return the cut with every submodule of a module running, if exact; else the same cut.

    A module whose own input is cached needs no slots inside it.
    """
    skipped = tuple(each for each in cut.skipped if not each.startswith(f"{name}."))
    slots = tuple(slot for slot in cut.slots if not slot.startswith(f"{name}."))
    smaller = replace(cut, skipped=skipped, slots=slots)
    return smaller if smaller != cut and is_exact(smaller) else cut


def _loss_and_gradients(
    loss_fn: LossFn, batch: Batch, leaves: Sequence[nn.Parameter]
) -> list[Tensor | None]:
    """Return a batch's loss, then its gradient in each leaf, at random seed 0."""
    with fork_rng_state(leaves[0].device, 0):
        loss = loss_fn(batch)
        return [loss, *torch.autograd.grad(loss, leaves, allow_unused=True)]
