# SPDX-License-Identifier: Apache-2.0
"""Validation of a layer map: each param is changed, and the model must react as its kind says.

In its block, a query or key changes the attention map; a value changes the context and not the map;
the context reaches the output through out only; an mlp changes the output, and neither map nor
context. A head changes no block, an embedding reaches one, a router acts through its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedplan.errors import UnknownArchitecture
from fedplan.models.attention import eager_attention
from fedplan.models.behaviour.dummy_inputs import dummy_inputs
from fedplan.models.behaviour.trace import (
    BlockCall,
    BlockTrace,
    ModelTrace,
    Tensors,
    same_tensors,
    tensors_in,
    trace_model,
)
from fedplan.models.description import block_modules, describe
from fedplan.models.params import Block, Kind, Param, Params
from fedplan.tensors.devices import eval_mode

Change = Callable[[Tensor, int], Tensor]
"""From a value and its number in a list to a changed value."""
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


@dataclass(frozen=True)
class ParamCheck:
    """The result for one param: `fault` says how it differs from its kind, or is empty."""

    param: Param
    fault: str = ""


def check_params(
    model: nn.Module, batch: Mapping[str, Tensor] | None = None
) -> tuple[ParamCheck, ...]:
    """Check all params outside blocks, and those of one block of each structure, by behaviour.

    Without a batch, dummy inputs are used. The model is left unchanged. Raises FedplanError if
    there are no dummy inputs for the model.
    """
    params, blocks = describe(model), block_modules(model)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(eval_mode(model))
        stack.enter_context(eager_attention(model))
        batch = dummy_inputs(model) if batch is None else batch
        tensors = dict(model.named_parameters())
        checks = list(_check_outside_blocks(model, batch, blocks, params))
        trace = trace_model(model, batch, blocks)
        for block in _distinct_blocks(params):
            block_params = tuple(p for p in params if p.block_id == block)
            if block not in trace.calls:
                checks += [ParamCheck(p, NOT_RUN) for p in block_params]
                continue
            with _zeros_randomized(tensors, block_params):
                checks += _BlockChecker(trace.calls[block], tensors, block_params).checks()
    return tuple(checks)


def require_valid_layer_map(
    model: nn.Module, batch: Mapping[str, Tensor] | None = None, *, label: str
) -> None:
    """Raise UnknownArchitecture, with the faults, unless all params behave as their kinds say.

    `label` names the layer map in the message.
    """
    faults = [v for v in check_params(model, batch) if v.fault]
    if faults:
        lines = [f"  {v.param.kind}: {v.param.key} {v.fault}" for v in faults]
        more = [f"  and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise UnknownArchitecture(
            f"{label} does not fit {type(model).__name__}, by behaviour:\n"
            + "\n".join(lines[:8] + more)
        )


def _distinct_blocks(params: Params) -> Iterator[Block]:
    """Yield the first block of each structure (kinds, shapes, tags), and the last of each stack."""
    structures: dict[Block, list[object]] = {}
    for p in params:
        if p.block_id and p.kind is not Kind.PROMPT:
            structures.setdefault(p.block_id, []).append((p.kind, p.shape, p.tags, p.on))
    seen: list[object] = []
    depths = {p.stack: p.depth for p in params}
    for block, structure in structures.items():
        if (block.stack, structure) not in seen or block.number == depths[block.stack] - 1:
            seen.append((block.stack, structure))
            yield block


def _check_outside_blocks(
    model: nn.Module,
    batch: Mapping[str, Tensor],
    blocks: Mapping[Block, nn.Module],
    params: Params,
) -> Iterator[ParamCheck]:
    """Yield the checks of params outside all blocks, by forward passes of the whole model."""
    tensors, before = dict(model.named_parameters()), trace_model(model, batch, blocks)
    for p in params:
        if p.block_id is None and p.kind not in UNCHECKED:
            with changed_values(tensors, (p,), add_noise):
                after = trace_model(model, batch, blocks)
            yield ParamCheck(p, _fault_outside_blocks(p, before, after))


def _fault_outside_blocks(p: Param, before: ModelTrace, after: ModelTrace) -> str:
    """The fault of a param outside all blocks, by traces before and after its change; or ""."""
    output_changed = not same_tensors(before.outputs, after.outputs)
    inputs_changed = any(
        not same_tensors(before.block_inputs[b], after.block_inputs[b]) for b in before.block_inputs
    )
    outputs_changed = any(
        not same_tensors(before.block_outputs[b], after.block_outputs[b])
        for b in before.block_outputs
    )
    if p.kind is Kind.UNKNOWN:
        return "is in no layer map"
    if p.kind in (Kind.HEAD, Kind.SCALE):
        moves_block = inputs_changed or outputs_changed
        return "moves a block, but should come after all" if moves_block else ""
    if p.kind is Kind.EMBED:
        bypasses_blocks = output_changed and not inputs_changed
        return "moves the output, but reaches no block" if bypasses_blocks else ""
    if p.kind is Kind.POSITION:
        same_maps = same_tensors(before.maps, after.maps)
        return "moves the output, but no attention" if output_changed and same_maps else ""
    return "is in no block"


class _BlockChecker:
    """Checks the params of one block by replays with some of them changed.

    `base` is the trace of the unchanged block.
    """

    def __init__(self, call: BlockCall, tensors: Mapping[str, Tensor], params: Params) -> None:
        self.call, self.tensors, self.params = call, tensors, params
        self.base = call.replay()
        self.has_cross = any("cross" in p.tags for p in params)

    def checks(self) -> Iterator[ParamCheck]:
        """Yield the check of each param of the block, prompts excepted."""
        return (ParamCheck(p, self._fault(p)) for p in self.params if p.kind is not Kind.PROMPT)

    def _fault(self, p: Param) -> str:
        """The fault of a param, by the checks of its kind, or ""."""
        if p.kind is Kind.UNKNOWN:
            return "is in no layer map"
        if p.kind in KERNEL or p.on & KERNEL:
            return self._kernel_fault(p)
        if p.kind is Kind.NORM:
            return self._norm_fault(p)
        if p.kind in (Kind.VALUE, Kind.OUT):
            return self._value_fault(p) if p.kind is Kind.VALUE else self._out_fault(p)
        return self._later_fault(p) if p.kind in AFTER_ATTENTION else ""

    def _kernel_fault(self, p: Param) -> str:
        """A query, key or position must change the map; a query only that of its own token."""
        maps, _ = self._attention(p, self.base)
        if not maps:
            return NOT_RUN
        after = self._after((p,))
        if same_tensors(maps, self._attention(p, after)[0]):
            # A key's bias adds the same to all logits of a query, and so changes nothing.
            no_effect = same_tensors(self.base.outputs, after.outputs) and not _is_matrix(p)
            return "" if no_effect else "does not move its block's attention"
        return self._side_fault(p) if p.kind in (Kind.QUERY, Kind.KEY) and _is_matrix(p) else ""

    def _value_fault(self, p: Param) -> str:
        """A value must change the context, and not the map."""
        maps, contexts = self._attention(p, self.base)
        if not maps:
            return NOT_RUN
        new_maps, new_contexts = self._attention(p, self._after((p,)))
        if not same_tensors(maps, new_maps):
            return "moves its block's attention"
        if same_tensors(contexts, new_contexts):
            return "does not move what attention passes on"
        return ""

    def _out_fault(self, p: Param) -> str:
        """An out must change the output only, and be the only way of the context to it."""
        attention = self._attention(p, self.base)
        if not attention[0]:
            return NOT_RUN
        after = self._after((p,))
        if not all(map(same_tensors, attention, self._attention(p, after))):
            return "moves attention"
        if same_tensors(self.base.outputs, after.outputs):
            return "does not move its block's output"
        is_only_way = not _is_matrix(p) or self._blocks_values(p, cross="cross" in p.tags)
        return "" if is_only_way else "is not the only way of values to the output"

    def _later_fault(self, p: Param) -> str:
        """A param after or beside attention must not change the map; further checks by kind."""
        after = self._after((p,))
        count = 1 if self.has_cross else None  # cross-attention may come after an mlp
        if not same_tensors(self.base.maps[:count], after.maps[:count]):
            return "moves its block's attention"
        if p.kind is Kind.SCALE and _is_matrix(p):
            return "is a matrix, and no scale"
        if p.kind is Kind.ROUTER and self._acts_without_experts(p):
            return "moves its block's output without any expert"
        if p.kind is Kind.MLP and self._hides_experts(p):
            return "is one of experts or a router, but not mapped as such"
        # An expert without tokens, or a scale of zeros, has no effect.
        if p.kind is Kind.MLP and same_tensors(self.base.outputs, after.outputs):
            return "does not move its block's output"
        values = [v for v in self.params if v.kind is Kind.VALUE]
        sides = {"cross" in v.tags for v in values if self._attention(v, self.base)[0]}
        is_mlp = p.kind is Kind.MLP and _is_matrix(p)
        if is_mlp and any(self._blocks_values(p, cross=cross) for cross in sides):
            return "is the only way of values to the output"
        return ""

    def _norm_fault(self, p: Param) -> str:
        """A norm that changes the map and no values acts on query or key, and must be mapped so."""
        values = [v for v in self.params if v.kind is Kind.VALUE and "cross" not in v.tags]
        if not values or same_tensors(self.base.maps[:1], self._after((p,)).maps[:1]):
            return ""
        before = self._owner_outputs(values)
        with changed_values(self.tensors, (p,), add_noise):
            after = self._owner_outputs(values)
        values_unchanged = before and same_tensors(before, after)
        return "acts on query or key alone, but is not mapped so" if values_unchanged else ""

    def _owner_outputs(self, params: list[Param]) -> tuple[Tensor, ...]:
        """The outputs, in a replay, of the modules that own some params."""
        outputs: list[Tensor] = []

        def record(_: nn.Module, __: Any, out: Any) -> None:
            outputs.extend(tensors_in(out))

        with ExitStack() as undo:
            for name in {_owner_path(p, self.call.module, self.tensors) for p in params}:
                owner = self.call.module.get_submodule(name)
                undo.callback(owner.register_forward_hook(record).remove)
            self.call.replay()
        return tuple(each.clone() for each in outputs)

    def _hides_experts(self, p: Param) -> bool:
        """Whether an mlp is a stack of experts, or its block has a top-k choice and no router."""
        owner = self.call.module.get_submodule(_owner_path(p, self.call.module, self.tensors))
        stacked = self.tensors[p.name].dim() == 3 and not isinstance(owner, nn.Conv1d)
        routed = any(each.kind is Kind.ROUTER for each in self.params)
        return stacked or (self.base.choices > 0 and not routed)

    def _attention(self, p: Param, trace: BlockTrace) -> tuple[Tensors, Tensors]:
        """The maps and the contexts of a param's attention; empty if it did not run."""
        if not self.has_cross:
            return trace.maps, trace.contexts
        # A decoder's block runs self-attention first, and cross-attention second.
        part = slice(1, 2) if "cross" in p.tags else slice(0, 1)
        return trace.maps[part], trace.contexts[part]

    def _after(self, params: Params) -> BlockTrace:
        """The trace of a replay with noise added to some params."""
        with changed_values(self.tensors, params, add_noise):
            return self.call.replay()

    def _blocks_values(self, p: Param, *, cross: bool) -> bool:
        """Whether values have no effect on the output while a param is zero.

        `cross`: the values of cross-attention, instead of self-attention.
        """
        values = [v for v in self.params if v.kind is Kind.VALUE and ("cross" in v.tags) == cross]
        with changed_values(self.tensors, (p,), to_zero):
            return same_tensors(self.call.replay().outputs, self._after(tuple(values)).outputs)

    def _acts_without_experts(self, p: Param) -> bool:
        """Whether a param changes the output while all experts are zero."""
        experts = tuple(e for e in self.params if e.kind is Kind.EXPERT)
        with changed_values(self.tensors, experts, to_zero):
            return not same_tensors(self.call.replay().outputs, self._after((p,)).outputs)

    def _side_fault(self, p: Param) -> str:
        """A query changed at one token must change the map of that token only; a key, of others.

        Empty if the output of its module is not [examples, tokens, features].
        """
        owner = self.call.module.get_submodule(_owner_path(p, self.call.module, self.tensors))
        before = self._attention(p, self.base)[0][0]
        examples, tokens = before.shape[0], before.shape[-2]
        applied: list[bool] = []
        hook = owner.register_forward_hook(_perturb_middle_token(p, (examples, tokens), applied))
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


def _owner_path(p: Param, module: nn.Module, tensors: Mapping[str, Tensor]) -> str:
    """The path, within a block, of the module that owns a param."""
    (name,) = [n for n, t in module.named_parameters() if t is tensors[p.name]][:1]
    return name.rpartition(".")[0]


def _perturb_middle_token(
    p: Param, shape: tuple[int, int], applied: list[bool]
) -> Callable[..., Tensor | None]:
    """A forward hook that adds noise to the output for the middle token, in the param's rows.

    `shape` is (examples, tokens); each call appends to `applied` whether the output has it.
    """

    def hook(_: nn.Module, __: Any, out: Any) -> Tensor | None:
        fits = isinstance(out, Tensor) and out.dim() == 3 and out.shape[:2] == shape
        applied.append(fits)
        if not fits:
            return None
        out = out.clone()
        features = out[:, shape[1] // 2].movedim(-1, 0)
        view = p.rows.view_outputs(features) if p.rows else features
        view += torch.randn(view.shape, generator=torch.Generator().manual_seed(11))
        return out

    return hook


@contextmanager
def changed_values(
    tensors: Mapping[str, Tensor], params: Iterable[Param], change: Change
) -> Generator[None]:
    """Context manager that changes the values of some params, and restores them bit for bit."""
    originals = [(view, view.clone()) for p in params for view in (p.view(tensors[p.name]),)]
    try:
        for i, (view, original) in enumerate(originals):
            view.copy_(change(original, i))
        yield
    finally:
        for view, original in originals:
            view.copy_(original)


def add_noise(value: Tensor, number: int) -> Tensor:
    """The value plus noise of about its mean magnitude, seeded by `number`."""
    noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(7 + number))
    return value + noise.to(value) * (value.abs().mean() + 0.05)


def to_zero(value: Tensor, number: int) -> Tensor:
    """Zeros of the same shape."""
    return torch.zeros_like(value)


def _zeros_randomized(tensors: Mapping[str, Tensor], params: Params) -> Any:
    """Context manager that adds noise to all-zero params, which would hide those before them."""
    zeros = [p for p in params if not tensors[p.name].any()]
    return changed_values(tensors, zeros, add_noise)


def _is_matrix(p: Param) -> bool:
    return len(p.shape) - (p.rows is not None) > 1
