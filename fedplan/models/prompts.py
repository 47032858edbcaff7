# SPDX-License-Identifier: Apache-2.0
"""Prompts: learned vectors, common and own, beside the words and the patches of a frozen model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from fedplan.models.description import blocks_of
from fedplan.models.dual import Dual, ModelError
from fedplan.models.fusion import DualFusion, Fuse, fusion_of, total
from fedplan.models.params import Block

LEVELS = ("common", "own")
SPREAD = 0.02


@final
@dataclass(frozen=True)
class Settings:
    """What `add_prompts` was asked for."""

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
            raise ModelError(f"prompts of lengths {self.text} and {self.vision}: give one or more")
        if not self.levels or set(self.levels) - set(LEVELS):
            raise ModelError(f"prompts of levels {self.levels}: take common, own or both")
        if self.start not in ("words", "noise"):
            raise ModelError(f"prompts start as words or as noise, not as {self.start!r}")
        if self.vision_at and self.deep:
            raise ModelError(
                f"deep prompts stand in every block, and vision_at is {self.vision_at}: leave one "
                "out"
            )

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each tower's prompts, where it has any."""
        both = {"text": self.text, "vision": self.vision}
        return {stack: length for stack, length in both.items() if length}


@final
class Prompt(nn.Module):
    """The vectors that enter at one place, of one level or of both."""

    def __init__(self, length: int, size: int, levels: tuple[str, ...]) -> None:
        super().__init__()
        for level in LEVELS:
            drawn = nn.Parameter(torch.randn(length, size) * SPREAD) if level in levels else None
            self.register_parameter(level, drawn)

    def values(self, fuse: Fuse) -> Tensor:
        """What enters: the only level, or both fused."""
        found = dict(self.named_parameters())
        return fuse(**found) if len(found) == len(LEVELS) else next(iter(found.values()))


@final
class DualPrompts(nn.Module):
    """The prompts of each tower: one, or one for each block."""


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
) -> Dual:
    """The model with prompts in front of its texts and pictures; its weights are not touched.

    A text's prompts stand in place of its first words after the first token, or before them where
    the template has fewer; a picture's stand between the class token and the patches. `deep` gives
    each block prompts of its own. A picture's prompts enter in front of the block `vision_at`: what
    is below makes the same of a picture in every step. With `start="words"` the first level starts
    as the words that it stands for, and the rest is drawn from N(0, 0.02²), from torch's global
    generator.
    """
    if not isinstance(dual, Dual) or dual.prompts is not None:
        raise ModelError(
            f"prompts are added to a Dual that has none yet, not to {type(dual).__name__}: "
            'in a study take task.kind = "image-text"'
        )
    settings = Settings(text, vision, levels, deep, fusion, query, heads, width, start, vision_at)
    _require_block(dual, vision_at)
    make_room(dual, text)
    words = _words(dual, text, deep) if text and start == "words" else []
    attach(dual, settings)
    level = "common" if "common" in levels else "own"
    with torch.no_grad():
        for prompt, found in zip(_places(dual, "text"), words, strict=False):
            prompt.get_parameter(level).copy_(found)
    return dual


def _require_block(dual: Dual, number: int) -> None:
    depth = sum(block.stack == "vision" for block in blocks_of(dual.backbone))
    if not 0 <= number < depth:
        raise ModelError(
            f"prompts of pictures cannot enter at block {number}: the tower has the blocks 0 to "
            f"{depth - 1}"
        )


def make_room(dual: Dual, length: int) -> None:
    """Lengthen the texts, where the template has fewer words in front than there are prompts.

    The fillers repeat the first word: never a special token, by which masks and poolers go.
    """
    missing = length - dual.lead
    if missing <= 0:
        return
    first, rest = dual.ids[:, :1], dual.ids[:, 1:]
    fillers = dual.ids[:1, 1:2].expand(len(first), missing)
    ids = torch.cat([first, fillers, rest], 1)
    mask = torch.cat([dual.mask[:, :1].expand(-1, missing), dual.mask], 1)
    dual.write(ids, mask)
    dual.lead = length


def attach(dual: Dual, settings: Settings) -> None:
    """Give the model prompts and fusions, freshly drawn, and let them into the towers."""
    like = next(dual.backbone.parameters())
    blocks = blocks_of(dual.backbone)
    dual.settings, dual.prompts, fusions = settings, DualPrompts(), DualFusion()
    for stack, length in settings.lengths.items():
        size = _size(dual, stack)
        depth = sum(block.stack == stack for block in blocks)
        count = depth if settings.deep else 1
        made = [Prompt(length, size, settings.levels) for _ in range(count)]
        dual.prompts.add_module(stack, nn.ModuleList(made) if settings.deep else made[0])
        fusion = _fusion(settings, size)
        if fusion is not None:
            fusions[stack] = fusion
    if fusions:
        dual.fusion = fusions
    for module in (dual.prompts, fusions):
        module.to(like.device, like.dtype)
    held = dict(fusions.named_children())
    for stack in settings.lengths:
        at = settings.vision_at if stack == "vision" else 0
        _let_in(dual, stack, held.get(stack, total), at)


def _fusion(settings: Settings, size: int) -> nn.Module | None:
    """The fusion for prompts of this size; one level alone has none."""
    if len(settings.levels) < len(LEVELS):
        return None
    return fusion_of(
        settings.fusion, size, query=settings.query, heads=settings.heads, width=settings.width
    )


def _let_in(dual: Dual, stack: str, fuse: Fuse | nn.Module, at: int) -> None:
    """Hook a tower. A partial keeps its arguments through a deep copy; a closure would not."""
    blocks, (first, *deeper) = blocks_of(dual.backbone), _places(dual, stack)
    if at:
        block = blocks[Block(stack, at)]
        block.register_forward_pre_hook(partial(_insert_in_front, first, fuse))
        return
    enter = _replace if stack == "text" else _insert
    dual.embeddings(stack).register_forward_hook(partial(enter, first, fuse))
    for number, prompt in enumerate(deeper, 1):
        block = blocks[Block(stack, number)]
        block.register_forward_pre_hook(partial(_replace_in_front, prompt, fuse))


def _replace(prompt: Prompt, fuse: Fuse, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The vectors after the first one replaced by the prompt."""
    entering = prompt.values(fuse)
    rest = output[:, 1 + len(entering) :]
    return torch.cat([output[:, :1], entering.expand(len(output), -1, -1), rest], 1)


def _insert(prompt: Prompt, fuse: Fuse, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """The prompt between the first vector and the others."""
    entering = prompt.values(fuse).expand(len(output), -1, -1)
    return torch.cat([output[:, :1], entering, output[:, 1:]], 1)


def _insert_in_front(
    prompt: Prompt, fuse: Fuse, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (_insert(prompt, fuse, module, (), args[0]), *args[1:])


def _replace_in_front(
    prompt: Prompt, fuse: Fuse, module: nn.Module, args: tuple[Any, ...]
) -> tuple[Any, ...]:
    return (_replace(prompt, fuse, module, (), args[0]), *args[1:])


def _places(dual: Dual, stack: str) -> list[Prompt]:
    """The prompts of a tower, from the first block on."""
    held = dict(cast("nn.Module", dual.prompts).named_children()).get(stack)
    if isinstance(held, nn.ModuleList):
        return [cast("Prompt", prompt) for prompt in held]
    return [cast("Prompt", held)] if held is not None else []


def _size(dual: Dual, stack: str) -> int:
    towers = {"text": dual.config.text_config, "vision": dual.config.vision_config}
    return int(towers[stack].hidden_size)


def _words(dual: Dual, length: int, deep: bool) -> list[Tensor]:
    """What stands at the prompts' places in front of each block, the mean over the classes."""
    found = list[Any]()
    tower, training = dual.tower("text"), dual.tower("text").training
    hooks = [dual.embeddings("text").register_forward_hook(lambda m, a, out: found.append(out))]
    if deep:
        for block, module in blocks_of(dual.backbone).items():
            if block.stack == "text" and block.number:
                hooks.append(module.register_forward_pre_hook(lambda m, a: found.append(a[0])))
    tower.eval()
    try:
        with torch.no_grad():
            tower(input_ids=dual.ids, attention_mask=dual.mask)
    finally:
        tower.train(training)
        for hook in hooks:
            hook.remove()
    return [each[:, 1 : 1 + length].mean(0) for each in found]
