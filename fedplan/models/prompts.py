# SPDX-License-Identifier: Apache-2.0
"""Learned prompts, common and own, for the text and image towers of a frozen DualEncoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fedplan.models.description import block_modules
from fedplan.models.dual_encoder import DualEncoder, ModelError
from fedplan.models.fusion import DualFusion, Fuse, make_fusion, sum_levels
from fedplan.models.params import Block

LEVELS = ("common", "own")
"""The levels of prompts: to share, and to keep."""
INIT_STD = 0.02
"""Standard deviation of newly drawn prompts."""


@final
@dataclass(frozen=True)
class PromptConfig:
    """The settings of `add_prompts`, with the same meaning; raises ModelError for invalid ones."""

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
    """The prompts at the input of one block: `length` vectors of width `size` per level.

    Newly drawn from torch's global generator.
    """

    def __init__(self, length: int, size: int, levels: tuple[str, ...]) -> None:
        super().__init__()
        for level in LEVELS:
            values = nn.Parameter(torch.randn(length, size) * INIT_STD) if level in levels else None
            self.register_parameter(level, values)

    def vectors(self, fuse: Fuse) -> Tensor:
        """The vectors to insert: those of the only level, or both levels fused by `fuse`."""
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
) -> DualEncoder:
    """Add prompts to a DualEncoder, in place, and return it; existing weights do not change.

    `text` and `vision` are the numbers of prompts. Text prompts replace the words of the template
    after the first token (texts are lengthened if there are too few); image prompts are inserted
    between the class token and the patches, before block `vision_at`. `levels`: "common", "own" or
    both, combined by `fusion` (with `query`, `heads`, `width`: see `make_fusion`). `deep`: separate
    prompts for each block. `start`: "words" initializes the first level with the embeddings of the
    words that it replaces; all else is drawn from N(0, 0.02²) with torch's global generator. Raises
    ModelError if the model is no DualEncoder or has prompts, and for invalid settings.
    """
    if not isinstance(dual, DualEncoder) or dual.prompts is not None:
        raise ModelError(
            f"prompts are added to a DualEncoder without prompts, not to {type(dual).__name__}: "
            'in a study use task.kind = "image-text"'
        )
    config = PromptConfig(text, vision, levels, deep, fusion, query, heads, width, start, vision_at)
    _require_block(dual, vision_at)
    lengthen_texts(dual, text)
    words = _word_vectors(dual, text, deep) if text and start == "words" else []
    attach_prompts(dual, config)
    level = "common" if "common" in levels else "own"
    with torch.no_grad():
        for prompt, vectors in zip(_tower_prompts(dual, "text"), words, strict=False):
            prompt.get_parameter(level).copy_(vectors)
    return dual


def _require_block(dual: DualEncoder, number: int) -> None:
    """Raise ModelError unless the vision tower has a block of this number."""
    depth = sum(block.stack == "vision" for block in block_modules(dual.backbone))
    if not 0 <= number < depth:
        raise ModelError(
            f"vision_at is {number}, but the vision tower has the blocks 0 to {depth - 1}"
        )


def lengthen_texts(dual: DualEncoder, length: int) -> None:
    """Lengthen the class texts in place, so that the template has `length` words before the name.

    The added tokens repeat the first word. Does nothing if there are enough.
    """
    # Never a special token: masks and poolers depend on those.
    missing = length - dual.lead
    if missing <= 0:
        return
    first, rest = dual.ids[:, :1], dual.ids[:, 1:]
    fillers = dual.ids[:1, 1:2].expand(len(first), missing)
    ids = torch.cat([first, fillers, rest], 1)
    mask = torch.cat([dual.mask[:, :1].expand(-1, missing), dual.mask], 1)
    dual.set_texts(ids, mask)
    dual.lead = length


def attach_prompts(dual: DualEncoder, config: PromptConfig) -> None:
    """Add newly drawn prompts and fusion modules to a model, in place, and hook them in."""
    reference = next(dual.backbone.parameters())
    blocks = block_modules(dual.backbone)
    dual.prompt_config, dual.prompts, fusions = config, DualPrompts(), DualFusion()
    for stack, length in config.lengths.items():
        size = _hidden_size(dual, stack)
        depth = sum(block.stack == stack for block in blocks)
        count = depth if config.deep else 1
        prompts = [Prompt(length, size, config.levels) for _ in range(count)]
        dual.prompts.add_module(stack, nn.ModuleList(prompts) if config.deep else prompts[0])
        fusion = _fusion(config, size)
        if fusion is not None:
            fusions[stack] = fusion
    if fusions:
        dual.fusion = fusions
    for module in (dual.prompts, fusions):
        module.to(reference.device, reference.dtype)
    by_stack = dict(fusions.named_children())
    for stack in config.lengths:
        first_block = config.vision_at if stack == "vision" else 0
        _hook_tower(dual, stack, by_stack.get(stack, sum_levels), first_block)


def _fusion(config: PromptConfig, size: int) -> nn.Module | None:
    """A fusion module for prompts of width `size`; None for a single level or a sum."""
    if len(config.levels) < len(LEVELS):
        return None
    return make_fusion(
        config.fusion, size, query=config.query, heads=config.heads, width=config.width
    )


def _hook_tower(dual: DualEncoder, stack: str, fuse: Fuse | nn.Module, first_block: int) -> None:
    """Register the hooks that insert the prompts of a tower, from `first_block` on."""
    # A partial survives a deep copy with its arguments; a closure would keep the old ones.
    blocks, (first, *deeper) = block_modules(dual.backbone), _tower_prompts(dual, stack)
    if first_block:
        block = blocks[Block(stack, first_block)]
        block.register_forward_pre_hook(partial(_insert_in_input, first, fuse))
        return
    hook = _replace if stack == "text" else _insert
    dual.embeddings(stack).register_forward_hook(partial(hook, first, fuse))
    for number, prompt in enumerate(deeper, 1):
        block = blocks[Block(stack, number)]
        block.register_forward_pre_hook(partial(_replace_in_input, prompt, fuse))


def _replace(prompt: Prompt, fuse: Fuse, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: replace the vectors after the first one by the prompt."""
    vectors = prompt.vectors(fuse)
    rest = output[:, 1 + len(vectors) :]
    return torch.cat([output[:, :1], vectors.expand(len(output), -1, -1), rest], 1)


def _insert(prompt: Prompt, fuse: Fuse, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """Forward hook: insert the prompt between the first vector and the others."""
    vectors = prompt.vectors(fuse).expand(len(output), -1, -1)
    return torch.cat([output[:, :1], vectors, output[:, 1:]], 1)


def _insert_in_input(
    prompt: Prompt, fuse: Fuse, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (_insert(prompt, fuse, module, (), args[0]), *args[1:])


def _replace_in_input(
    prompt: Prompt, fuse: Fuse, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (_replace(prompt, fuse, module, (), args[0]), *args[1:])


def _tower_prompts(dual: DualEncoder, stack: str) -> list[Prompt]:
    """The prompts of a tower in the order of its blocks; empty if it has none."""
    prompts = dict(cast("nn.Module", dual.prompts).named_children()).get(stack)
    if isinstance(prompts, nn.ModuleList):
        return [cast("Prompt", prompt) for prompt in prompts]
    return [cast("Prompt", prompts)] if prompts is not None else []


def _hidden_size(dual: DualEncoder, stack: str) -> int:
    towers = {"text": dual.config.text_config, "vision": dual.config.vision_config}
    return int(towers[stack].hidden_size)


def _word_vectors(dual: DualEncoder, length: int, deep: bool) -> list[Tensor]:
    """The text tower's vectors at the positions of the prompts, averaged over the classes.

    At the input of the first block, or with `deep` of each block: (length, size) each.
    """
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
