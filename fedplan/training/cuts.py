# SPDX-License-Identifier: Apache-2.0
"""Cuts: which modules of a model need not run again, and what must be kept in their place."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedplan.models.description import blocks_of
from fedplan.tensors.devices import chance, device_of, forked
from fedplan.tensors.named import Batch

Run = Callable[[Batch], Tensor]
"""The loss of a batch, with whatever stands around a pass."""


@dataclass(frozen=True)
class Cut:
    """The modules that are not run, and the tensors that are kept instead.

    A slot is `module>0` for the first tensor that comes out of a module, `module<0` or `module<x`
    for what goes into it by place or by name. What else comes out of a module that is not run is
    not a number: if anybody used it, the loss would not be one either. `values` are the params
    that a kept tensor may follow from.
    """

    still: tuple[str, ...]
    kept: tuple[str, ...]
    values: tuple[str, ...]

    @property
    def text(self) -> str:
        """All that tells two cuts of a model apart."""
        return f"{' '.join(self.still)} | {' '.join(self.kept)}"


@dataclass
class _Call:
    """What was seen of a module in one pass."""

    calls: int = 0
    moved: bool = False
    learned_in: bool = False
    learned_out: bool = False
    smooth: bool = True
    places: tuple[str, ...] = ()
    outputs: int = 0


class _Enough(Exception):
    """All that was asked for has been heard."""


@dataclass
class Scene:
    """A model in which some modules stand still while a context lasts, as long as it is `on`.

    `shapes` are what still modules hand out for one row, on the meta device; `now` are the kept
    tensors of the rows that run, and `count` is how many these are. `fixed` are the slots of what
    does not grow with them, such as the places of words.
    """

    model: nn.Module
    cut: Cut
    shapes: dict[str, Any] = field(default_factory=dict[str, Any])
    now: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    count: int = 1
    on: bool = False
    fixed: frozenset[str] = frozenset()

    @contextmanager
    def set(self) -> Generator[None]:
        """The model with its still modules, then as it was."""
        entries = dict.fromkeys(_owner(slot) for slot in self.cut.kept if "<" in slot)
        modules = {name: self.model.get_submodule(name) for name in (*self.cut.still, *entries)}
        hooks = list[RemovableHandle]()
        own = {name: vars(modules[name]).get("forward") for name in self.cut.still}
        try:
            for name in self.cut.still:
                vars(modules[name])["forward"] = self._still(name, modules[name].forward)
            for name in entries:
                enter = self._entering(name)
                hooks.append(modules[name].register_forward_pre_hook(enter, with_kwargs=True))
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for name, forward in own.items():
                del vars(modules[name])["forward"]
                if forward is not None:
                    vars(modules[name])["forward"] = forward

    def _still(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            if not self.on:
                return own(*args, **named)
            return mapped(self.shapes[name], lambda i, like: self._out(f"{name}>{i}", like))

        return forward

    def _out(self, slot: str, like: Tensor) -> Tensor:
        if (found := self.now.get(slot)) is not None:
            return found
        count = 1 if slot in self.fixed else self.count
        return nothing(like, count, next(self.model.parameters()))

    def _entering(self, name: str) -> Callable[..., Any]:
        def enter(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
            if not self.on:
                return None
            given = (self.now.get(f"{name}<{i}", each) for i, each in enumerate(args))
            return tuple(given), {k: self.now.get(f"{name}<{k}", v) for k, v in named.items()}

        return enter


def nothing(like: Tensor, count: int, there: Tensor) -> Tensor:
    """So many rows that hold no number, and take no memory."""
    shape = (count, *like.shape[1:]) if like.shape[:1] == (1,) else like.shape
    return torch.full((), nan, dtype=like.dtype, device=there.device).expand(shape)


def mapped(value: Any, change: Callable[[int, Tensor], Any]) -> Any:
    """What a module hands out, with each tensor changed; what is no tensor is left out."""
    place = iter(range(2**31))

    def walk(each: Any) -> Any:
        if isinstance(each, Tensor):
            return change(next(place), each)
        if isinstance(each, Mapping):  # an output of transformers, which leaves out what is None
            named = cast("Mapping[str, Any]", each)
            return cast("Any", type(named))(**{k: walk(v) for k, v in named.items()})
        if isinstance(each, list | tuple):
            return tuple(map(walk, cast("Sequence[Any]", each)))
        return None

    return walk(value)


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors that a module takes or hands out."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[str, Any]", value).values())
    within = cast("Sequence[Any]", value) if isinstance(value, list | tuple) else ()
    return [tensor for each in within for tensor in tensors_in(each)]


def fixed_in(one: Mapping[str, Any], two: Mapping[str, Any]) -> frozenset[str]:
    """The slots of what modules hand out for two rows as for one."""
    return frozenset(
        f"{name}>{i}"
        for name, out in one.items()
        for i, pair in enumerate(zip(tensors_in(out), tensors_in(two[name]), strict=True))
        if pair[0].shape == pair[1].shape
    )


def _inputs(args: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The numbers that a module is given, by place and by name."""
    given = {**{str(i): each for i, each in enumerate(args)}, **named}
    return {
        place: each
        for place, each in given.items()
        if isinstance(each, Tensor) and each.is_floating_point()
    }


@contextmanager
def _heard(
    model: nn.Module, names: Sequence[str], before: Callable[..., None], after: Callable[..., None]
) -> Generator[None]:
    """Modules that are listened to, by their names."""
    hooks, modules = list[RemovableHandle](), dict(model.named_modules())

    def listen(name: str) -> None:
        def first(module: nn.Module, args: Any, named: Any) -> None:
            before(name, args, named)

        def last(module: nn.Module, args: Any, named: Any, out: Any) -> None:
            after(name, out)

        hooks.append(modules[name].register_forward_pre_hook(first, with_kwargs=True))
        hooks.append(modules[name].register_forward_hook(last, with_kwargs=True))

    try:
        for name in names:
            listen(name)
        yield
    finally:
        for hook in hooks:
            hook.remove()


def record(
    model: nn.Module, names: Sequence[str], slots: Sequence[str], batch: Batch, run: Run
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What modules hand out, as shapes, and the tensors of slots, for a batch.

    The pass ends as soon as all has been heard, and leaves the random numbers as they were.
    """
    shapes, kept = dict[str, Any](), dict[str, Tensor]()
    entering = {_owner(slot) for slot in slots if "<" in slot}
    leaving = {*names, *(_owner(slot) for slot in slots if ">" in slot)}
    left = {(each, "<") for each in entering} | {(each, ">") for each in leaving}

    def done(name: str, side: str) -> None:
        left.discard((name, side))
        if not left:
            raise _Enough

    def before(name: str, args: Any, named: Any) -> None:
        if name in entering:
            found = _inputs(args, named)
            given = {f"{name}<{place}": each.detach() for place, each in found.items()}
            kept.update({slot: each for slot, each in given.items() if slot in slots})
            done(name, "<")

    def after(name: str, out: Any) -> None:
        if name in leaving:
            given = {f"{name}>{i}": each.detach() for i, each in enumerate(tensors_in(out))}
            kept.update({slot: each for slot, each in given.items() if slot in slots})
            shapes[name] = mapped(out, lambda _, each: each.detach().to("meta"))
            done(name, ">")

    listening = _heard(model, list(entering | leaving), before, after)
    with forked(device_of(model)), torch.no_grad(), listening, suppress(_Enough):
        run(batch)
    return shapes, kept


def _watched(model: nn.Module, batch: Batch, run: Run) -> dict[str, _Call]:
    """How each module was called in one pass."""
    calls: dict[str, _Call] = {name: _Call() for name in dict(model.named_modules())}
    raw = {each.data_ptr() for each in batch.values()}
    dice, device = dict[str, bytes](), device_of(model)

    def before(name: str, args: Any, named: Any) -> None:
        call = calls[name]
        call.calls += 1
        call.learned_in |= any(t.requires_grad for t in tensors_in((args, tuple(named.values()))))
        found = _inputs(args, named)
        call.places = tuple(k for k, each in found.items() if each.data_ptr() not in raw)
        dice[name] = chance(device)

    def after(name: str, out: Any) -> None:
        call, found = calls[name], tensors_in(out)
        call.learned_out |= any(each.requires_grad for each in found)
        call.smooth &= bool(found) and all(each.is_floating_point() for each in found)
        call.outputs = len(found)
        call.moved |= dice[name] != chance(device)

    with _heard(model, list(calls), before, after):
        run(batch)
    return calls


def find_cut(model: nn.Module, batch: Batch, run: Run) -> tuple[Cut | None, str]:
    """The cut below which nothing of a marked model is trained, or why there is none.

    The batch is one row. Where no gradient is asked for, nothing trained stands before: so torch
    itself says what is frozen. Then all that can be left out is left out, bit for bit.
    """
    config = cast("object", vars(model).get("config"))
    said = vars(config) if config is not None else dict[str, object]()
    if any(value for name, value in said.items() if name.endswith("layerdrop")):
        return None, "it leaves out blocks at random"
    calls = _watched(model, batch, run)
    frozen = [name for name, call in calls.items() if _is_frozen(model, name, call)]
    highest = [name for name in frozen if not any(_inside(name, other) for other in frozen)]
    if any(calls[name].moved for name in highest):
        return None, "its frozen part draws random numbers, as dropout does"
    entries = [
        f"{name}<{place}"
        for name, call in calls.items()
        if name and call.calls == 1 and call.learned_out and not call.learned_in
        for place in call.places
    ]
    outputs = [f"{name}>{i}" for name in highest for i in range(calls[name].outputs)]
    if not highest:
        return None, "nothing of it is frozen before what is trained"
    values = tuple(_upstream(model, calls))
    whole = Cut(tuple(highest), (*outputs, *entries), values)
    found = _smallest(model, batch, run, whole)
    if found is None:
        return None, "no part of it can be left out"
    blocks = set(blocks_of(model).values())
    still = [module for name in found.still for module in model.get_submodule(name).modules()]
    if blocks and blocks.isdisjoint(still):
        return None, "no block of it is frozen before what is trained, and less is not worth it"
    return found, ""


def _is_frozen(model: nn.Module, name: str, call: _Call) -> bool:
    """Whether a module follows from rows and frozen values alone; one without params is cheap."""
    module = model.get_submodule(name)
    seen = call.calls == 1 and call.smooth and not call.learned_in and not call.learned_out
    return bool(name) and seen and any(True for _ in module.parameters())


def _inside(name: str, other: str) -> bool:
    return name.startswith(f"{other}.")


def _upstream(model: nn.Module, calls: Mapping[str, _Call]) -> list[str]:
    """Frozen params that may stand before a cut: not all that their module was given is trained."""
    beyond = {name for name, call in calls.items() if call.calls == 1 and call.learned_in}
    return [
        name
        for name, tensor in model.named_parameters()
        if not tensor.requires_grad and name.rpartition(".")[0] not in beyond
    ]


def _smallest(model: nn.Module, batch: Batch, run: Run, whole: Cut) -> Cut | None:
    """A cut that keeps no more than it must: what changes no bit of loss and gradients may go."""
    leaves = [tensor for tensor in model.parameters() if tensor.requires_grad]
    truth = _slopes(run, batch, leaves)
    shapes, kept = record(model, whole.still, whole.kept, batch, run)

    def right(cut: Cut) -> bool:
        scene = Scene(model, cut, shapes, {slot: kept[slot] for slot in cut.kept}, on=True)
        with scene.set(), suppress(RuntimeError, TypeError, AttributeError, IndexError):
            found = _slopes(run, batch, leaves)
            return all(_same(one, other) for one, other in zip(truth, found, strict=True))
        return False

    if not right(whole):
        return None
    bare = replace(whole, kept=tuple(slot for slot in whole.kept if "<" in slot))
    cut = bare if right(bare) else whole
    for slot in cut.kept:
        less = replace(cut, kept=tuple(each for each in cut.kept if each != slot))
        cut = less if right(less) else cut
    for name in [_owner(slot) for slot in cut.kept if "<" in slot]:
        cut = _livelier(cut, name, right)
    return cut


def _owner(slot: str) -> str:
    return slot.replace("<", ">").split(">")[0]


def _livelier(cut: Cut, name: str, right: Callable[[Cut], bool]) -> Cut:
    """The cut with all inside a module running, if what enters it is enough: that keeps less."""
    still = tuple(each for each in cut.still if not _inside(each, name))
    kept = tuple(slot for slot in cut.kept if not _inside(_owner(slot), name))
    less = replace(cut, still=still, kept=kept)
    return less if less != cut and right(less) else cut


def _slopes(run: Run, batch: Batch, leaves: Sequence[nn.Parameter]) -> list[Tensor | None]:
    with forked(leaves[0].device, 0):
        loss = run(batch)
        return [loss, *torch.autograd.grad(loss, leaves, allow_unused=True)]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
