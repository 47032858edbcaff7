# SPDX-License-Identifier: Apache-2.0
"""Finds the frozen modules of a model that need not run, and replaces their outputs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, cast

import torch
from torch import Tensor, nn

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
    `module<x` are inputs of a module, by position or by name. Any other output of a skipped module
    is replaced by nan, which shows in the loss if the output is used.
    `params`: names of the frozen params that a cached tensor may depend on.
    """

    skipped: tuple[str, ...]
    slots: tuple[str, ...]
    params: tuple[str, ...]


@dataclass
class _CallStats:
    """Observations of one module during one forward pass; filled by `_trace_calls`.

    `calls`: number of calls. `draws_random`: a call changed the random state. `grad_in`,
    `grad_out`: an input, or an output, requires a gradient. `float_outputs`: there are outputs,
    and all are floating-point. `inputs`: floating-point inputs, by position or name, that are
    no tensor of the batch itself. `output_count`: number of output tensors.
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
    """Replaces the outputs of a model's skipped modules by cached tensors.

    Enter `install()` once; before each forward pass set `tensors`, `shapes`, `count` and `on`.
    `shapes`: by skipped module, the outputs for one example, on the meta device. `tensors`: the
    cached tensors of the present batch by slot; `count`: its number of examples. `fixed`: slots
    with a shape that does not depend on the batch size, as position embeddings.
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
        """Context manager that patches the modules of the cut; on exit the model is restored."""
        with ExitStack() as undo:
            for name in self.cut.skipped:
                module = self.model.get_submodule(name)
                attributes, own_forward = vars(module), vars(module).get("forward")
                attributes["forward"] = self._skip(name, module.forward)
                if own_forward is None:
                    undo.callback(attributes.pop, "forward")
                else:
                    undo.callback(attributes.__setitem__, "forward", own_forward)
            for name in dict.fromkeys(_module_of_slot(s) for s in self.cut.slots if "<" in s):
                module, hook = self.model.get_submodule(name), self._replace_inputs(name)
                undo.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def _skip(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward for module `name`: cached or nan outputs while `on`, else `original`."""

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
        """Return a forward pre-hook for module `name` that replaces inputs by cached tensors."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self.on:
                return None
            inputs = (self.tensors.get(f"{name}<{i}", each) for i, each in enumerate(args))
            return tuple(inputs), {k: self.tensors.get(f"{name}<{k}", v) for k, v in kwargs.items()}

        return hook


def map_tensors(output: Any, change: Callable[[int, Tensor], Any]) -> Any:
    """Return a copy of a module's output with each tensor replaced by `change(position, tensor)`.

    Tensors are counted from 0, depth first. Mappings keep their class, lists become tuples, and all
    other values None.
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
    """Return all tensors in a value of nested mappings, lists and tuples, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    items = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    return [tensor for item in items for tensor in list_tensors(item)]


def _float_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the floating-point tensors among `args` and `kwargs`, by position ("0") or name."""
    inputs = {**{str(i): each for i, each in enumerate(args)}, **kwargs}
    tensors = {place: each for place, each in inputs.items() if isinstance(each, Tensor)}
    return {place: each for place, each in tensors.items() if each.is_floating_point()}


@contextmanager
def _observe(
    model: nn.Module, names: Iterable[str], before: Callable[..., None], after: Callable[..., None]
) -> Generator[None]:
    """Context manager that registers callbacks on the named modules of a model.

    A forward pass calls `before(name, args, kwargs)` and `after(name, output)` around each module.
    """
    modules = dict(model.named_modules())
    with ExitStack() as undo:
        for name in names:
            first = modules[name].register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, args, kwargs), with_kwargs=True
            )
            undo.callback(first.remove)
            last = modules[name].register_forward_hook(lambda _, __, o, name=name: after(name, o))
            undo.callback(last.remove)
        yield


def record_activations(
    model: nn.Module, names: Sequence[str], slots: Sequence[str], batch: Batch, loss_fn: LossFn
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Run `loss_fn(batch)` without gradients and record outputs of the model's modules.

    Returns (outputs of the modules `names`, on the meta device, by name; tensors by slot, not
    copied). The pass ends early once all are recorded. The random state is restored.
    """
    shapes, tensors = dict[str, Any](), dict[str, Tensor]()
    missing = {(name, ">") for name in names}
    missing |= {(_module_of_slot(slot), "<" if "<" in slot else ">") for slot in slots}

    def record(name: str, side: str, values: Mapping[Any, Tensor]) -> None:
        by_slot = {f"{name}{side}{place}": each.detach() for place, each in values.items()}
        tensors.update({slot: each for slot, each in by_slot.items() if slot in slots})
        missing.discard((name, side))
        if not missing:
            raise _AllRecorded

    def before(name: str, args: Any, kwargs: Any) -> None:
        if (name, "<") in missing:
            record(name, "<", _float_inputs(args, kwargs))

    def after(name: str, output: Any) -> None:
        if (name, ">") in missing:
            shapes[name] = map_tensors(output, lambda _, each: each.detach().to("meta"))
            record(name, ">", dict(enumerate(list_tensors(output))))

    observing = _observe(model, {name for name, _ in missing}, before, after)
    with fork_rng_state(model_device(model)), torch.no_grad(), observing, suppress(_AllRecorded):
        loss_fn(batch)
    return shapes, tensors


def _trace_calls(model: nn.Module, batch: Batch, loss_fn: LossFn) -> dict[str, _CallStats]:
    """Run `loss_fn(batch)` and return the observations of every module of the model by name."""
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

    with _observe(model, calls, before, after):
        loss_fn(batch)
    return calls


def find_cut(model: nn.Module, batch: Batch, loss_fn: LossFn) -> tuple[ActivationCut | None, str]:
    """Return (cut, "") for the frozen part of a model, or (None, reason).

    requires_grad must be set for exactly the trained params; `batch` has one example. The cut skips
    the modules that run once before all trained ones, without changing a bit of the loss and the
    gradients. Runs many passes of `loss_fn(batch)`, and leaves the model unchanged.
    """
    config = cast("object", vars(model).get("config"))
    settings = vars(config) if config is not None else dict[str, object]()
    if any(value for name, value in settings.items() if name.endswith("layerdrop")):
        return None, "it leaves out blocks at random"
    calls = _trace_calls(model, batch, loss_fn)
    frozen = [
        name
        for name, call in calls.items()
        if name and call.calls == 1 and call.float_outputs and not (call.grad_in or call.grad_out)
        if any(True for _ in model.get_submodule(name).parameters())
    ]
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
    # A cached tensor may depend on all modules but those that ran once after a trained one.
    downstream = {name for name, call in calls.items() if call.calls == 1 and call.grad_in}
    params = tuple(
        name
        for name, tensor in model.named_parameters()
        if not tensor.requires_grad and name.rpartition(".")[0] not in downstream
    )
    largest = ActivationCut(tuple(outermost), (*outputs, *entries), params)
    cut = _smallest_cut(model, batch, loss_fn, largest)
    if cut is None:
        return None, "no part of it can be skipped"
    blocks = set(block_modules(model).values())
    skipped = [module for name in cut.skipped for module in model.get_submodule(name).modules()]
    if blocks and blocks.isdisjoint(skipped):
        return None, "no whole block before the trained ones is frozen, and less is not worth it"
    return cut, ""


def _smallest_cut(
    model: nn.Module, batch: Batch, loss_fn: LossFn, largest: ActivationCut
) -> ActivationCut | None:
    """Return `largest` without the slots that the loss and the gradients do not need.

    Removes one slot after another, as long as loss and gradients of the batch stay the same bit by
    bit. Returns None if `largest` itself changes a bit.
    """
    leaves = [tensor for tensor in model.parameters() if tensor.requires_grad]

    def loss_and_gradients() -> list[Tensor | None]:
        with fork_rng_state(leaves[0].device, 0):
            loss = loss_fn(batch)
            return [loss, *torch.autograd.grad(loss, leaves, allow_unused=True)]

    expected = loss_and_gradients()
    shapes, tensors = record_activations(model, largest.skipped, largest.slots, batch, loss_fn)

    def is_exact(cut: ActivationCut) -> bool:
        forward = CachedForward(
            model, cut, shapes, {slot: tensors[slot] for slot in cut.slots}, on=True
        )
        with forward.install(), suppress(RuntimeError, TypeError, AttributeError, IndexError):
            results = loss_and_gradients()
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
    # A module with a cached input needs no slots inside: all its submodules may run.
    for inside in [f"{_module_of_slot(slot)}." for slot in cut.slots if "<" in slot]:
        skipped = tuple(each for each in cut.skipped if not each.startswith(inside))
        slots = tuple(slot for slot in cut.slots if not slot.startswith(inside))
        smaller = replace(cut, skipped=skipped, slots=slots)
        cut = smaller if smaller != cut and is_exact(smaller) else cut
    return cut


def _module_of_slot(slot: str) -> str:
    return slot.replace("<", ">").split(">")[0]
