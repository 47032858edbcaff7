# SPDX-License-Identifier: Apache-2.0
"""Behaviour: whether params do what their kinds say, seen by changing them and listening.

In its own block a query or key moves who attends to whom; a value does not, and moves what is
passed on; all that is passed on goes through the out; an mlp moves neither, and the block's output.
A head moves no block, an embedding reaches one, a router acts through its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedplan.errors import UnknownArchitecture
from fedplan.models.attention import eager
from fedplan.models.behaviour.hearing import BlockCall, Hearing, Seen, heard, same, tensors_in
from fedplan.models.behaviour.stimulus import stimulus
from fedplan.models.description import blocks_of, describe
from fedplan.models.params import Block, Kind, Param, Params
from fedplan.tensors.devices import at_rest

Change = Callable[[Tensor, int], Tensor]
KERNEL = frozenset({Kind.QUERY, Kind.KEY, Kind.POSITION})
LATER = (Kind.MLP, Kind.EXPERT, Kind.ROUTER, Kind.SCALE)
UNJUDGED = (Kind.NORM, Kind.ADAPTER, Kind.PROMPT)
"""Norms are told by their type, adapters and prompts by the library that put them there."""
BEHAVES = {
    Kind.QUERY: "moves what its own token looks at",
    Kind.KEY: "moves what others look at",
    Kind.VALUE: "moves what attention passes on, and not who attends to whom",
    Kind.OUT: "all that attention passes on goes through it",
    Kind.POSITION: "moves who attends to whom",
    Kind.MLP: "moves its block's output, and no attention in it",
    Kind.ROUTER: "moves its block's output through the experts alone",
    Kind.EXPERT: "moves no attention in its block",
    Kind.NORM: "by its type; none acts on query or key alone without saying so",
    Kind.SCALE: "moves no attention in its block",
    Kind.EMBED: "reaches a block",
    Kind.HEAD: "moves no block",
    Kind.PROMPT: "not judged",
    Kind.ADAPTER: "not judged",
    Kind.UNKNOWN: "",
}
"""What was seen of each kind that is what it is said to be."""
ABSENT = "did not run on this input"


@dataclass(frozen=True)
class Verdict:
    """A param, and what it does that its kind should not, if anything."""

    param: Param
    fault: str = ""


def verdicts(model: nn.Module, batch: Mapping[str, Tensor] | None = None) -> tuple[Verdict, ...]:
    """Judge every param that does not stand in a block, and those of one block of each make.

    The model is left as it was. Without a batch it gets a small random one.
    """
    params, blocks = describe(model), blocks_of(model)
    with ExitStack() as rest, torch.no_grad():
        rest.enter_context(at_rest(model))
        rest.enter_context(eager(model))
        batch = stimulus(model) if batch is None else batch
        tensors = dict(model.named_parameters())
        found = list(_beside(model, batch, blocks, params))
        run = heard(model, batch, blocks)
        for block in _makes(params):
            here = tuple(p for p in params if p.at == block)
            if block not in run.calls:
                found += [Verdict(p, ABSENT) for p in here]
                continue
            with _filled(tensors, here):
                found += _Scene(run.calls[block], tensors, here).verdicts()
    return tuple(found)


def require_true(model: nn.Module, batch: Mapping[str, Tensor] | None = None, *, row: str) -> None:
    """Raise unless a model's params do what a row says of them."""
    faults = [v for v in verdicts(model, batch) if v.fault]
    if faults:
        said = [f"  {v.param.kind}: {v.param.key} {v.fault}" for v in faults]
        more = [f"  and {len(said) - 8} more"] if len(said) > 8 else []
        raise UnknownArchitecture(
            f"{row} does not fit {type(model).__name__}, by behaviour:\n"
            + "\n".join(said[:8] + more)
        )


def _makes(params: Params) -> Iterator[Block]:
    """One block of each make, and the last of each stack."""
    makes: dict[Block, list[object]] = {}
    for p in params:
        if p.at and p.kind is not Kind.PROMPT:
            makes.setdefault(p.at, []).append((p.kind, p.shape, p.tags, p.on))
    seen: list[object] = []
    depths = {p.stack: p.depth for p in params}
    for block, make in makes.items():
        if (block.stack, make) not in seen or block.number == depths[block.stack] - 1:
            seen.append((block.stack, make))
            yield block


def _beside(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    blocks: Mapping[Block, nn.Module],
    params: Params,
) -> Iterator[Verdict]:
    """Judge what stands in no block, by runs of the whole model."""
    tensors, before = dict(model.named_parameters()), heard(model, batch, blocks)
    for p in params:
        if p.at is None and p.kind not in UNJUDGED:
            with changed(tensors, (p,), stirred):
                after = heard(model, batch, blocks)
            yield Verdict(p, _fault_beside(p, before, after))


def _fault_beside(p: Param, before: Hearing, after: Hearing) -> str:
    answers = not same(before.outputs, after.outputs)
    reached = any(not same(before.inputs[b], after.inputs[b]) for b in before.inputs)
    moved = any(not same(before.given[b], after.given[b]) for b in before.given)
    if p.kind is Kind.UNKNOWN:
        return "is not told by any row"
    if p.kind in (Kind.HEAD, Kind.SCALE):
        return "moves a block, and stands behind all" if reached or moved else ""
    if p.kind is Kind.EMBED:
        return "reaches no block, and moves the answer" if answers and not reached else ""
    if p.kind is Kind.POSITION:
        quiet = same(before.maps, after.maps)
        return "moves the answer, and no attention" if answers and quiet else ""
    return "stands in no block"


class _Scene:
    """One block, played again and again with some of its params changed."""

    def __init__(self, call: BlockCall, tensors: Mapping[str, Tensor], params: Params) -> None:
        self.call, self.tensors, self.params = call, tensors, params
        self.base = call.again()
        self.crossed = any("cross" in p.tags for p in params)

    def verdicts(self) -> Iterator[Verdict]:
        return (Verdict(p, self._fault(p)) for p in self.params if p.kind is not Kind.PROMPT)

    def _fault(self, p: Param) -> str:
        if p.kind is Kind.UNKNOWN:
            return "is not told by any row"
        if p.kind in KERNEL or p.on & KERNEL:
            return self._kernel(p)
        if p.kind is Kind.NORM:
            return self._norm(p)
        if p.kind in (Kind.VALUE, Kind.OUT):
            return self._value(p) if p.kind is Kind.VALUE else self._out(p)
        return self._later(p) if p.kind in LATER else ""

    def _kernel(self, p: Param) -> str:
        if not self._own(p, self.base.maps):
            return ABSENT
        after = self._after((p,))
        if same(self._own(p, self.base.maps), self._own(p, after.maps)):
            # A key's bias adds the same to all that a token looks at, and changes nothing.
            idle = same(self.base.outputs, after.outputs) and not _matrix(p)
            return "" if idle else "does not move its block's attention"
        return self._side(p) if p.kind in (Kind.QUERY, Kind.KEY) and _matrix(p) else ""

    def _value(self, p: Param) -> str:
        if not self._own(p, self.base.maps):
            return ABSENT
        after = self._after((p,))
        if not same(self._own(p, self.base.maps), self._own(p, after.maps)):
            return "moves its block's attention"
        if same(self._own(p, self.base.contexts), self._own(p, after.contexts)):
            return "does not move what attention passes on"
        return ""

    def _out(self, p: Param) -> str:
        if not self._own(p, self.base.maps):
            return ABSENT
        after = self._after((p,))
        heard = (self._own(p, self.base.maps), self._own(p, self.base.contexts))
        if not all(map(same, heard, (self._own(p, after.maps), self._own(p, after.contexts)))):
            return "moves what attention looks at or passes on"
        if same(self.base.outputs, after.outputs):
            return "does not move its block's output"
        through = not _matrix(p) or self._silences(p, cross="cross" in p.tags)
        return "" if through else "is not all that values go through"

    def _later(self, p: Param) -> str:
        """What follows attention, or stands beside it."""
        after = self._after((p,))
        if not same(self.base.maps, after.maps) and not self.crossed:
            return "moves its block's attention"
        if not same(self.base.maps[:1], after.maps[:1]):
            return "moves its block's attention"
        if p.kind is Kind.SCALE and _matrix(p):
            return "is a matrix, and no scale"
        if p.kind is Kind.ROUTER and self._acts_without_experts(p):
            return "moves its block's output without any expert"
        if p.kind is Kind.MLP and self._hides_experts(p):
            return "is one of experts, or what chooses them, and does not say so"
        # An expert that no token was sent to is idle, and so is a scale that nothing passes.
        if p.kind is Kind.MLP and same(self.base.outputs, after.outputs):
            return "does not move its block's output"
        ran = [v for v in self.params if v.kind is Kind.VALUE and self._own(v, self.base.maps)]
        sides = {"cross" in v.tags for v in ran}
        if p.kind is Kind.MLP and _matrix(p) and any(self._silences(p, cross=c) for c in sides):
            return "is all that values go through"
        return ""

    def _norm(self, p: Param) -> str:
        """A norm that moves attention and no value acts on query or key, and must say so."""
        values = [v for v in self.params if v.kind is Kind.VALUE and "cross" not in v.tags]
        if not values or same(self.base.maps[:1], self._after((p,)).maps[:1]):
            return ""
        before = self._given(values)
        with changed(self.tensors, (p,), stirred):
            after = self._given(values)
        alone = before and same(before, after)
        return "acts on query or key alone, and does not say so" if alone else ""

    def _given(self, params: list[Param]) -> tuple[Tensor, ...]:
        """What the owners of some params give."""
        found: list[Tensor] = []
        with ExitStack() as undo:
            for name in {_below(p, self.call.module, self.tensors) for p in params}:
                owner = self.call.module.get_submodule(name)
                keep = owner.register_forward_hook(lambda _, __, out: found.extend(tensors_in(out)))  # pyright: ignore[reportUnknownArgumentType,reportUnknownLambdaType]
                undo.callback(keep.remove)
            self.call.again()
        return tuple(each.clone() for each in found)

    def _hides_experts(self, p: Param) -> bool:
        """Whether a feed-forward layer is a stack of them, or its block chooses and has no router.

        Experts that every token uses stand beside those that are chosen.
        """
        owner = self.call.module.get_submodule(_below(p, self.call.module, self.tensors))
        stacked = self.tensors[p.name].dim() == 3 and not isinstance(owner, nn.Conv1d)
        routed = any(each.kind is Kind.ROUTER for each in self.params)
        return stacked or (self.base.choices > 0 and not routed)

    def _own(self, p: Param, all_heard: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of what was heard, that of a param's own attention: a decoder's second is its cross."""
        if not self.crossed:
            return all_heard
        return all_heard[1:2] if "cross" in p.tags else all_heard[:1]

    def _after(self, params: Params) -> Seen:
        with changed(self.tensors, params, stirred):
            return self.call.again()

    def _silences(self, p: Param, *, cross: bool) -> bool:
        """Whether the values of an attention do not reach the output while a param is zero."""
        values = [v for v in self.params if v.kind is Kind.VALUE and ("cross" in v.tags) == cross]
        with changed(self.tensors, (p,), zeroed):
            return same(self.call.again().outputs, self._after(tuple(values)).outputs)

    def _acts_without_experts(self, p: Param) -> bool:
        experts = tuple(e for e in self.params if e.kind is Kind.EXPERT)
        with changed(self.tensors, experts, zeroed):
            return not same(self.call.again().outputs, self._after((p,)).outputs)

    def _side(self, p: Param) -> str:
        """A token's query changes what it looks at; its key what others look at."""
        owner = self.call.module.get_submodule(_below(p, self.call.module, self.tensors))
        rows, tokens = (self._own(p, self.base.maps)[0].shape[i] for i in (0, -2))
        with ExitStack() as undo:
            touched: list[bool] = []
            hook = owner.register_forward_hook(_one_token(p, (rows, tokens), touched))
            undo.callback(hook.remove)
            after = self.call.again()
        if not touched or not all(touched):
            return ""
        one, other = self._own(p, self.base.maps)[0], self._own(p, after.maps)[0]
        kept = [i for i in range(tokens) if i != tokens // 2]
        asks = torch.equal(one[..., kept, :], other[..., kept, :])
        if asks == (p.kind is Kind.QUERY):
            return ""
        return "changes only what its token looks at" if asks else "changes what others look at"


def _below(p: Param, module: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """The path, within a block, of the module that owns a param."""
    (name,) = [n for n, t in module.named_parameters() if t is tensors[p.name]][:1]
    return name.rpartition(".")[0]


def _one_token(
    p: Param, shape: tuple[int, int], touched: list[bool]
) -> Callable[..., Tensor | None]:
    """Adds to what a module gives for the middle token, in the rows of a param."""

    def hook(_: nn.Module, __: Any, out: Any) -> Tensor | None:
        fits = isinstance(out, Tensor) and out.dim() == 3 and out.shape[:2] == shape
        touched.append(fits)
        if not fits:
            return None
        out = out.clone()
        rows = out[:, shape[1] // 2].movedim(-1, 0)
        view = p.rows.over(rows) if p.rows else rows
        view += torch.randn(view.shape, generator=torch.Generator().manual_seed(11))
        return out

    return hook


@contextmanager
def changed(tensors: Mapping[str, Tensor], params: Iterable[Param], how: Change) -> Generator[None]:
    """Some params changed; then as they were, bit for bit."""
    held = [(view, view.clone()) for p in params for view in (p.view(tensors[p.name]),)]
    try:
        for i, (view, was) in enumerate(held):
            view.copy_(how(was, i))
        yield
    finally:
        for view, was in held:
            view.copy_(was)


def stirred(was: Tensor, number: int) -> Tensor:
    """Every number changed, about as much as it is large."""
    noise = torch.randn(was.shape, generator=torch.Generator().manual_seed(7 + number))
    return was + noise.to(was) * (was.abs().mean() + 0.05)


def zeroed(was: Tensor, number: int) -> Tensor:
    """Nothing."""
    return torch.zeros_like(was)


def _filled(tensors: Mapping[str, Tensor], params: Params) -> Any:
    """What starts as zero would hide what stands before it: here it does not."""
    empty = [p for p in params if not tensors[p.name].any()]
    return changed(tensors, empty, stirred)


def _matrix(p: Param) -> bool:
    return len(p.shape) - (p.rows is not None) > 1
