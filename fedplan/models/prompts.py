# SPDX-License-Identifier: Apache-2.0
"""Learned prompts, common and own, for a frozen DualEncoder, and modules that fuse both levels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from fedplan.models.description import block_modules
from fedplan.models.dual_encoder import DualEncoder, ModelError
from fedplan.models.params import Block

FUSIONS = ("attention", "replace", "mlp", "sum")
"""The kinds of fusion."""
QUERIES = ("own", "common", "both")
"""The prompts that may be the queries of the fusion attention."""


class Fuse(Protocol):
    """A function from a common and an own prompt, each (length, size), to the fused prompt."""

    def __call__(self, common: Tensor, own: Tensor) -> Tensor: ...


def sum_levels(common: Tensor, own: Tensor) -> Tensor:
    """The sum of both prompts: a fusion without parameters."""
    return own + common


@final
class DualFusion(nn.ModuleDict):
    """The fusion modules of a DualEncoder by tower, "text" and "vision"."""


@final
class AttentionFusion(nn.Module):
    """Fusion by cross-attention F between the prompts: `own + common + gate * F`.

    `size` is the width of the prompts, `width` the inner width (0: `size`). `query` is the prompt
    that gives the queries; with "both", F is the mean of both directions. The gate starts at
    `gate`; with None, the result is F alone. Raises ModelError if `heads` does not divide the
    width.
    """

    def __init__(
        self, size: int, *, heads: int, width: int, query: str, gate: float | None
    ) -> None:
        super().__init__()
        width = width or size
        if heads < 1 or width % heads:
            raise ModelError(f"a fusion of width {width} cannot be divided into {heads} heads")
        self.heads, self.query_level = heads, query
        self.query, self.key, self.value = (nn.Linear(size, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, size, bias=False)
        self.gate = None if gate is None else nn.Parameter(torch.tensor(float(gate)))

    def forward(self, common: Tensor, own: Tensor) -> Tensor:
        """The prompt (length x size) fused from a common and an own prompt of that shape."""
        if self.query_level == "both":
            attended = (self._attend(own, common) + self._attend(common, own)) / 2
        else:
            own_queries = self.query_level == "own"
            attended = self._attend(*((own, common) if own_queries else (common, own)))
        return attended if self.gate is None else own + common + self.gate * attended

    def _attend(self, queries: Tensor, keys: Tensor) -> Tensor:
        """Multi-head attention of `queries` to `keys`, both (length, size)."""
        inputs = ((self.query, queries), (self.key, keys), (self.value, keys))
        heads = [layer(x).unflatten(-1, (self.heads, -1)).transpose(0, 1) for layer, x in inputs]
        return self.out(scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1))


@final
class MlpFusion(nn.Module):
    """Fusion by a gated feed-forward layer with as many parameters as AttentionFusion.

    A control experiment: each vector is fused only with the other prompt's vector at the same
    position. The gate starts at `gate`; at 0 the result starts as the sum of both prompts.
    """

    def __init__(self, size: int, *, width: int, gate: float) -> None:
        super().__init__()
        width = width or size
        layers = {n: nn.Linear(size, width, bias=False) for n in ("first", "second", "third")}
        self.mlp = nn.ModuleDict({**layers, "last": nn.Linear(width, size, bias=False)})
        self.gate = nn.Parameter(torch.tensor(float(gate)))

    def forward(self, common: Tensor, own: Tensor) -> Tensor:
        """The prompt (length x size) fused from a common and an own prompt of that shape."""
        inner = gelu(self.mlp["first"](own) + self.mlp["second"](common))
        mixed = self.mlp["last"](inner * self.mlp["third"](common))
        return own + common + self.gate * mixed


def make_fusion(
    kind: str, size: int, *, query: str, heads: int, width: int, gate: float
) -> nn.Module | None:
    """The fusion module of a kind (one of FUSIONS) for prompts of width `size`; None for "sum"."""
    if kind not in FUSIONS or query not in QUERIES:
        raise ModelError(
            f"there is no fusion {kind!r} with query {query!r}: use one of {', '.join(FUSIONS)}, "
            f"with query {', '.join(QUERIES)}"
        )
    if kind == "sum":
        return None
    if kind == "mlp":
        return MlpFusion(size, width=width, gate=gate)
    start = gate if kind == "attention" else None
    return AttentionFusion(size, heads=heads, width=width, query=query, gate=start)


LEVELS = ("common", "own")
"""The levels of prompts: to share, and to keep."""
INIT_STD = 0.02
"""Standard deviation of newly drawn prompts."""


@final
@dataclass(frozen=True)
class PromptConfig:
    """The settings of `add_prompts` as a value; each field is the argument of that name.

    Raises ModelError for invalid settings; those of the fusion are checked by `attach_prompts`.
    """

    text: int = 4
    vision: int = 4
    levels: tuple[str, ...] = LEVELS
    deep: bool = False
    fusion: str = "attention"
    query: str = "own"
    heads: int = 1
    width: int = 64
    start: str = "words"
    vision_at: int = 0
    gate: float = 0.0

    def __post_init__(self) -> None:
        if self.text < 0 or self.vision < 0 or not self.text + self.vision:
            raise ModelError(f"prompt lengths are {self.text} and {self.vision}: give one or more")
        if not self.levels or set(self.levels) - set(LEVELS):
            raise ModelError(f"prompt levels are {self.levels}: use common, own or both")
        if self.start not in ("words", "noise"):
            raise ModelError(f"prompts start as words or as noise, not as {self.start!r}")
        if self.vision_at and self.deep:
            raise ModelError(
                f"deep prompts are in every block, but vision_at is {self.vision_at}: leave one out"
            )

    @property
    def lengths(self) -> dict[str, int]:
        """The number of prompts by tower, without towers that have none."""
        lengths = {"text": self.text, "vision": self.vision}
        return {stack: length for stack, length in lengths.items() if length}


@final
class Prompt(nn.Module):
    """The prompts at the input of one block: `length` vectors of width `size` for each level.

    Each of `levels` is a parameter drawn from N(0, INIT_STD squared); a missing level is None.
    """

    def __init__(self, length: int, size: int, levels: tuple[str, ...]) -> None:
        super().__init__()
        for level in LEVELS:
            values = nn.Parameter(torch.randn(length, size) * INIT_STD) if level in levels else None
            self.register_parameter(level, values)

    def vectors(self, fuse: Fuse) -> Tensor:
        """The vectors (length x size) of the only level, or of both levels fused by `fuse`."""
        levels = dict(self.named_parameters())
        return fuse(**levels) if len(levels) == len(LEVELS) else next(iter(levels.values()))


@final
class DualPrompts(nn.Module):
    """The prompts by tower: one Prompt, or a list with one for each block."""


def add_prompts(
    dual: nn.Module,
    *,
    text: int = 4,
    vision: int = 4,
    levels: tuple[str, ...] = LEVELS,
    deep: bool = False,
    fusion: str = "attention",
    query: str = "own",
    heads: int = 1,
    width: int = 64,
    start: str = "words",
    vision_at: int = 0,
    gate: float = 0.0,
) -> DualEncoder:
    """Add prompts to a DualEncoder `dual`, in place, and return `dual`; weights do not change.

    `text` and `vision` are the numbers of prompts. Text prompts replace the words of the template
    after the first token (texts are lengthened if there are too few); image prompts are inserted
    between the class token and the patches, before block `vision_at`. `levels`: "common", "own" or
    both, combined by `fusion` (`query`, `heads`, `width`, `gate`: see AttentionFusion). `deep`:
    separate prompts for each block. `start` "words" sets the common text prompts (without these the
    own ones) to the hidden vectors of the replaced words; all others are drawn from N(0, 0.02²).
    Raises ModelError if `dual` is no DualEncoder or has prompts, and for invalid settings.
    """
    if not isinstance(dual, DualEncoder) or dual.prompts is not None:
        raise ModelError(
            f"prompts are added to a DualEncoder without prompts, not to {type(dual).__name__}: "
            'in a study use task.kind = "image-text"'
        )
    config = PromptConfig(
        text, vision, levels, deep, fusion, query, heads, width, start, vision_at, gate
    )
    depth = sum(block.stack == "vision" for block in block_modules(dual.backbone))
    if not 0 <= vision_at < depth:
        raise ModelError(
            f"vision_at is {vision_at}, but the vision tower has the blocks 0 to {depth - 1}"
        )
    lengthen_texts(dual, text)
    words = _word_vectors(dual, text, deep) if text and start == "words" else []
    attach_prompts(dual, config)
    level = "common" if "common" in levels else "own"
    with torch.no_grad():
        for prompt, vectors in zip(_tower_prompts(dual, "text"), words, strict=False):
            prompt.get_parameter(level).copy_(vectors)
    return dual


def lengthen_texts(dual: DualEncoder, length: int) -> None:
    """Lengthen the class texts of `dual`, to `length` tokens before the class name."""
    # Never a special token: masks and poolers depend on those.
    missing = length - dual.lead
    if missing <= 0:
        return
    fillers = dual.ids[:1, 1:2].expand(len(dual.ids), missing)
    ids = torch.cat([dual.ids[:, :1], fillers, dual.ids[:, 1:]], 1)
    mask = torch.cat([dual.mask[:, :1].expand(-1, missing), dual.mask], 1)
    dual.set_texts(ids, mask)
    dual.lead = length


def attach_prompts(dual: DualEncoder, config: PromptConfig) -> None:
    """Add newly drawn prompts and fusion modules to `dual`, in place, as `config` says."""
    reference = next(dual.backbone.parameters())
    blocks = block_modules(dual.backbone)
    dual.prompt_config, dual.prompts, fusions = config, DualPrompts(), DualFusion()
    towers = {"text": dual.config.text_config, "vision": dual.config.vision_config}
    for stack, length in config.lengths.items():
        size = int(towers[stack].hidden_size)
        count = sum(block.stack == stack for block in blocks) if config.deep else 1
        prompts = [Prompt(length, size, config.levels) for _ in range(count)]
        dual.prompts.add_module(stack, nn.ModuleList(prompts) if config.deep else prompts[0])
        if len(config.levels) == len(LEVELS):
            names = ("query", "heads", "width", "gate")
            settings: dict[str, Any] = {name: getattr(config, name) for name in names}
            fusion = make_fusion(config.fusion, size, **settings)
            if fusion is not None:
                fusions[stack] = fusion
    if fusions:
        dual.fusion = fusions
    for module in (dual.prompts, fusions):
        module.to(reference.device, reference.dtype)
    by_stack = dict(fusions.named_children())
    # A partial survives a deep copy with its arguments; a closure would keep the old ones.
    for stack in config.lengths:
        fuse, (first, *deeper) = by_stack.get(stack, sum_levels), _tower_prompts(dual, stack)
        if stack == "vision" and config.vision_at:
            block = blocks[Block(stack, config.vision_at)]
            block.register_forward_pre_hook(partial(_prompt_input, first, fuse, False))
            continue
        hook = partial(_prompt_output, first, fuse, stack == "text")
        dual.embeddings(stack).register_forward_hook(hook)
        for number, prompt in enumerate(deeper, 1):
            block = blocks[Block(stack, number)]
            block.register_forward_pre_hook(partial(_prompt_input, prompt, fuse, True))


def _prompt_output(
    prompt: Prompt, fuse: Fuse, replaces: bool, module: nn.Module, args: Any, output: Tensor
) -> Tensor:
    """Forward hook: put the prompt after token 0; it replaces tokens, or the output gets longer."""
    vectors = prompt.vectors(fuse)
    rest = output[:, 1 + len(vectors) if replaces else 1 :]
    return torch.cat([output[:, :1], vectors.expand(len(output), -1, -1), rest], 1)


def _prompt_input(
    prompt: Prompt, fuse: Fuse, replaces: bool, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Forward pre-hook: return `args` with the first changed as by `_prompt_output`."""
    return (_prompt_output(prompt, fuse, replaces, module, (), args[0]), *args[1:])


def _tower_prompts(dual: DualEncoder, stack: str) -> list[Prompt]:
    """The prompts of a tower ("text" or "vision") by block; empty if the tower has none."""
    prompts = dict(cast("nn.Module", dual.prompts).named_children()).get(stack)
    if isinstance(prompts, nn.ModuleList):
        return [cast("Prompt", prompt) for prompt in prompts]
    return [cast("Prompt", prompts)] if prompts is not None else []


def _word_vectors(dual: DualEncoder, length: int, deep: bool) -> list[Tensor]:
    """The hidden vectors of the words that `length` text prompts replace, averaged over classes."""
    inputs = list[Any]()
    tower, training = dual.tower("text"), dual.tower("text").training
    hooks = [dual.embeddings("text").register_forward_hook(lambda m, a, out: inputs.append(out))]
    if deep:
        for block, module in block_modules(dual.backbone).items():
            if block.stack == "text" and block.number:
                hooks.append(module.register_forward_pre_hook(lambda m, a: inputs.append(a[0])))
    tower.eval()
    try:
        with torch.no_grad():
            tower(input_ids=dual.ids, attention_mask=dual.mask)
    finally:
        tower.train(training)
        for hook in hooks:
            hook.remove()
    return [each[:, 1 : 1 + length].mean(0) for each in inputs]
