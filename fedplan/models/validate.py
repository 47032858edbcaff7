# SPDX-License-Identifier: Apache-2.0
"""Validation of a layer map: each param is changed, and the model must react as its kind says.

In its block, a query or key changes the attention map; a value changes the context and not the map;
the context reaches the output through out only; an mlp changes the output, and neither map nor
context. A head changes no block, an embedding reaches one, a router acts through its experts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedplan.errors import UnknownArchitecture
from fedplan.models.attention import eager_attention
from fedplan.models.description import block_modules, describe
from fedplan.models.params import Block, Kind, Param, Params
from fedplan.models.trace import (
    BlockCall,
    BlockTrace,
    ModelTrace,
    Tensors,
    dummy_inputs,
    same_tensors,
    tensors_in,
    trace_model,
)
from fedplan.tensors.devices import eval_mode

KERNEL = frozenset({Kind.QUERY, Kind.KEY, Kind.POSITION})
"""Kinds that determine attention weights."""
AFTER_ATTENTION = (Kind.MLP, Kind.EXPERT, Kind.ROUTER, Kind.SCALE)
"""Kinds that must not change attention in their block."""
UNCHECKED = (Kind.NORM, Kind.ADAPTER, Kind.PROMPT)
"""Kinds known by class: norms, and the adapters and prompts of peft and fedplan."""
EXPECTED_BEHAVIOUR = {
    Kind.QUERY: "moves what its own token looks at",
    Kind.KEY: "moves what others look at",
    Kind.VALUE: "moves what attention passes on, and not who attends to whom",
    Kind.OUT: "is the only way of values to the output",
    Kind.POSITION: "moves who attends to whom",
    Kind.MLP: "moves its block's output, and no attention in it",
    Kind.ROUTER: "moves its block's output through the experts alone",
    Kind.EXPERT: "moves no attention in its block",
    Kind.NORM: "known by its class; none acts on query or key alone unmapped",
    Kind.SCALE: "moves no attention in its block",
    Kind.EMBED: "reaches a block",
    Kind.HEAD: "moves no block",
    Kind.PROMPT: "not checked",
    Kind.ADAPTER: "not checked",
    Kind.UNKNOWN: "",
}
"""The behaviour of each kind that passes its checks, for reports."""
NOT_RUN = "did not run on this input"
"""The fault of params that the input does not reach."""
_UNMAPPED = "is in no layer map"


@dataclass(frozen=True)
class ParamCheck:
    """The result of checking one param: `fault` says how it contradicts its kind, or is empty."""

    param: Param
    fault: str = ""


def check_params(
    model: nn.Module, batch: Mapping[str, Tensor] | None = None
) -> tuple[ParamCheck, ...]:
    """Check that params behave as their kinds say; return one ParamCheck for each checked param.

    Of each stack, the blocks of different structure and the last block are checked. `batch` has
    inputs by name, by default `dummy_inputs`. Many forward passes run in eval mode; the model is
    left unchanged. Raises as `describe`, and FedplanError if there are no dummy inputs.
    """
    params, blocks = describe(model), block_modules(model)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(eval_mode(model))
        stack.enter_context(eager_attention(model))
        batch = dummy_inputs(model) if batch is None else batch
        tensors, trace = dict(model.named_parameters()), trace_model(model, batch, blocks)
        checks = list[ParamCheck]()
        for p in params:
            if p.block_id is None and p.kind not in UNCHECKED:
                with _changed_values(tensors, (p,)):
                    changed = trace_model(model, batch, blocks)
                checks.append(ParamCheck(p, _fault_outside_blocks(p, trace, changed)))
        blocks_params: dict[Block, list[Param]] = {}
        for p in params:
            if p.block_id:
                blocks_params.setdefault(p.block_id, []).append(p)
        seen: list[object] = []
        for block, block_params in blocks_params.items():
            checked = [p for p in block_params if p.kind is not Kind.PROMPT]
            structure = (block.stack, [(p.kind, p.shape, p.tags, p.on) for p in checked])
            is_last = block.number == block_params[0].depth - 1
            if not checked or (structure in seen and not is_last):
                continue
            seen.append(structure)
            if block not in trace.calls:
                checks += [ParamCheck(p, NOT_RUN) for p in block_params]
                continue
            # All-zero params would hide the params before them.
            with _changed_values(tensors, [p for p in block_params if not tensors[p.name].any()]):
                checker = _BlockChecker(trace.calls[block], tensors, tuple(block_params))
                checks += [ParamCheck(p, checker.fault(p)) for p in checked]
    return tuple(checks)


def require_valid_layer_map(
    model: nn.Module, batch: Mapping[str, Tensor] | None = None, *, label: str
) -> None:
    """Raise UnknownArchitecture, starting with `label`, if `check_params` finds faults."""
    faults = [v for v in check_params(model, batch) if v.fault]
    if faults:
        lines = [f"  {v.param.kind}: {v.param.key} {v.fault}" for v in faults]
        more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise UnknownArchitecture(
            f"{label} does not fit {type(model).__name__}, by behaviour:\n"
            + "\n".join(lines[:8] + more)
        )


def _fault_outside_blocks(p: Param, before: ModelTrace, after: ModelTrace) -> str:
    """How param `p`, outside all blocks, contradicts the kind of `p`; "" if not at all."""

    def any_changed(old: Mapping[Block, Tensors], new: Mapping[Block, Tensors]) -> bool:
        return any(not same_tensors(old[block], new[block]) for block in old)

    output_changed = not same_tensors(before.outputs, after.outputs)
    inputs_changed = any_changed(before.block_inputs, after.block_inputs)
    if p.kind is Kind.UNKNOWN:
        return _UNMAPPED
    if p.kind in (Kind.HEAD, Kind.SCALE):
        moves = inputs_changed or any_changed(before.block_outputs, after.block_outputs)
        return "moves a block, but should come after all" if moves else ""
    if p.kind is Kind.EMBED:
        bypasses_blocks = output_changed and not inputs_changed
        return "moves the output, but reaches no block" if bypasses_blocks else ""
    if p.kind is Kind.POSITION:
        same_maps = same_tensors(before.maps, after.maps)
        return "moves the output, but no attention" if output_changed and same_maps else ""
    return "is in no block"


class _BlockChecker:
    """Checks the params of one block: `fault(p)` replays the block with changed params."""

    def __init__(self, call: BlockCall, tensors: Mapping[str, Tensor], params: Params) -> None:
        self.call, self.tensors, self.params = call, tensors, params
        self.base = call.replay()
        self.has_cross = any("cross" in p.tags for p in params)

    def fault(self, p: Param) -> str:
        if p.kind is Kind.UNKNOWN:
            return _UNMAPPED
        if p.kind in KERNEL or p.on & KERNEL or p.kind in (Kind.VALUE, Kind.OUT):
            return self._attention_fault(p)
        if p.kind is Kind.NORM:
            return self._norm_fault(p)
        return self._later_fault(p) if p.kind in AFTER_ATTENTION else ""

    def _attention_fault(self, p: Param) -> str:
        """The fault of a query, key, position, value or out `p`, or "".

        A query, key or position must change the attention map; a value must change the context (the
        product of map and values) and not the map; an out must change neither, but the output, and
        be the only way of the context to the output.
        """
        attention = self._attention(p, self.base)
        if not attention[0]:
            return NOT_RUN
        after = self._replay_with((p,))
        same_maps, same_contexts = map(same_tensors, attention, self._attention(p, after))
        same_output = same_tensors(self.base.outputs, after.outputs)
        if p.kind in KERNEL or p.on & KERNEL:
            if same_maps:
                # A key's bias adds the same to all logits of a query, and so changes nothing.
                no_effect = same_output and not _is_matrix(p)
                return "" if no_effect else "does not move its block's attention"
            has_side = p.kind in (Kind.QUERY, Kind.KEY) and _is_matrix(p)
            return self._side_fault(p) if has_side else ""
        if p.kind is Kind.VALUE:
            if not same_maps:
                return "moves its block's attention"
            return "does not move what attention passes on" if same_contexts else ""
        if not (same_maps and same_contexts):
            return "moves attention"
        if same_output:
            return "does not move its block's output"
        is_only_way = not _is_matrix(p) or self._blocks_values(p, cross="cross" in p.tags)
        return "" if is_only_way else "is not the only way of values to the output"

    def _later_fault(self, p: Param) -> str:
        """The fault of a param that comes after attention (mlp, expert, router or scale), or "".

        Noise in `p` must change no attention map before it. A scale must be no matrix, a router
        must act through experts alone, and an mlp must change the output, look like no expert or
        router, and not be the only way of the values to the output.
        """
        after = self._replay_with((p,))
        count = 1 if self.has_cross else None  # cross-attention may come after an mlp
        if not same_tensors(self.base.maps[:count], after.maps[:count]):
            return "moves its block's attention"
        if p.kind is Kind.SCALE and _is_matrix(p):
            return "is a matrix, and no scale"
        if p.kind is Kind.ROUTER:
            experts = [e for e in self.params if e.kind is Kind.EXPERT]
            with _changed_values(self.tensors, experts, to_zero=True):
                without_experts = self.call.replay().outputs
                has_effect = not same_tensors(without_experts, self._replay_with((p,)).outputs)
            return "moves its block's output without any expert" if has_effect else ""
        # An expert without tokens, or a scale of zeros, has no effect.
        if p.kind is not Kind.MLP:
            return ""
        is_stack = self.tensors[p.name].dim() == 3 and not isinstance(self._owner(p), nn.Conv1d)
        has_router = any(each.kind is Kind.ROUTER for each in self.params)
        if is_stack or (self.base.choices > 0 and not has_router):
            return "is one of experts or a router, but not mapped as such"
        if same_tensors(self.base.outputs, after.outputs):
            return "does not move its block's output"
        values = [v for v in self.params if v.kind is Kind.VALUE]
        sides = {"cross" in v.tags for v in values if self._attention(v, self.base)[0]}
        if _is_matrix(p) and any(self._blocks_values(p, cross=cross) for cross in sides):
            return "is the only way of values to the output"
        return ""

    def _norm_fault(self, p: Param) -> str:
        """The fault of a norm `p` that no layer map assigns to query or key, or ""."""
        values = [v for v in self.params if v.kind is Kind.VALUE and "cross" not in v.tags]
        if not values or same_tensors(self.base.maps[:1], self._replay_with((p,)).maps[:1]):
            return ""
        outputs: list[Tensor] = []

        def record(_: nn.Module, __: Any, out: Any) -> None:
            outputs.extend(each.clone() for each in tensors_in(out))

        with ExitStack() as undo:
            for owner in {self._owner(v) for v in values}:
                undo.callback(owner.register_forward_hook(record).remove)
            self.call.replay()
            count = len(outputs)
            self._replay_with((p,))
        unchanged = count and same_tensors(tuple(outputs[:count]), tuple(outputs[count:]))
        return "acts on query or key alone, but is not mapped so" if unchanged else ""

    def _owner(self, p: Param) -> nn.Module:
        named = self.call.module.named_parameters()
        (name,) = [n for n, t in named if t is self.tensors[p.name]][:1]
        return self.call.module.get_submodule(name.rpartition(".")[0])

    def _attention(self, p: Param, trace: BlockTrace) -> tuple[Tensors, Tensors]:
        """Return (maps, contexts) of the attention that `p` is part of; empty if it did not run."""
        if not self.has_cross:
            return trace.maps, trace.contexts
        # A decoder's block runs self-attention first, and cross-attention second.
        part = slice(1, 2) if "cross" in p.tags else slice(0, 1)
        return trace.maps[part], trace.contexts[part]

    def _replay_with(self, noisy: Iterable[Param]) -> BlockTrace:
        with _changed_values(self.tensors, noisy):
            return self.call.replay()

    def _blocks_values(self, p: Param, *, cross: bool) -> bool:
        """Whether the values have no effect on the output while `p` is zero."""
        values = [v for v in self.params if v.kind is Kind.VALUE and ("cross" in v.tags) == cross]
        with _changed_values(self.tensors, (p,), to_zero=True):
            return same_tensors(self.call.replay().outputs, self._replay_with(values).outputs)

    def _side_fault(self, p: Param) -> str:
        """The fault of a query or key matrix `p`, or ""; also "" if its output is not of tokens.

        With noise in the output of its module for one token, a query changes only the map row of
        that token, and a key changes other rows.
        """
        before = self._attention(p, self.base)[0][0]
        examples, tokens = before.shape[0], before.shape[-2]
        applied: list[bool] = []

        def add_noise(_: nn.Module, __: Any, out: Any) -> Tensor | None:
            fits = (
                isinstance(out, Tensor) and out.dim() == 3 and out.shape[:2] == (examples, tokens)
            )
            applied.append(fits)
            if not fits:
                return None
            out = out.clone()
            features = out[:, tokens // 2].movedim(-1, 0)
            view = replace(p.rows, dim=0).view(features) if p.rows else features
            view += torch.randn(view.shape, generator=torch.Generator().manual_seed(11))
            return out

        hook = self._owner(p).register_forward_hook(add_noise)
        try:
            after = self._attention(p, self.call.replay())[0]
        finally:
            hook.remove()
        if not applied or not all(applied):
            return ""
        others = [i for i in range(tokens) if i != tokens // 2]
        only_own = torch.equal(before[..., others, :], after[0][..., others, :])
        if only_own == (p.kind is Kind.QUERY):
            return ""
        return "changes only what its token looks at" if only_own else "changes what others look at"


@contextmanager
def _changed_values(
    tensors: Mapping[str, Tensor], params: Iterable[Param], *, to_zero: bool = False
) -> Generator[None]:
    """Change params in place, to zero or by seeded noise; restore all values on exit."""
    originals = [(view, view.clone()) for p in params for view in (p.view(tensors[p.name]),)]
    try:
        for i, (view, value) in enumerate(originals):
            if to_zero:
                view.zero_()
            else:
                noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(7 + i))
                view.copy_(value + noise.to(value) * (value.abs().mean() + 0.05))
        yield
    finally:
        for view, original in originals:
            view.copy_(original)


def _is_matrix(p: Param) -> bool:
    return len(p.shape) - (p.rows is not None) > 1
