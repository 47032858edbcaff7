# SPDX-License-Identifier: Apache-2.0
"""Methods that train prompts of a frozen model of pictures and texts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from fedplan.language.parts import common, fusion, own, prompt
from fedplan.language.plan import chain, freeze, keep, share
from fedplan.language.wording import stated
from fedplan.methods.method import Method
from fedplan.models.prompts import add_prompts

_fusion = fusion
_prompts = stated("prompts")(add_prompts)


def pfeddc(
    text: int = 4,
    vision: int = 4,
    deep: bool = False,
    fusion: str = "attention",
    query: str = "own",
    heads: int = 1,
    width: int = 64,
    start: str = "words",
    vision_at: int = 0,
) -> Method:
    """pFedDC: common prompts are averaged; each client keeps own ones, and what fuses the two.

    Zhang et al., Personalized Federated Learning via Dual-Prompt Optimization and Cross Fusion,
    2025, arXiv 2506.21144. Open in what is public of the paper, and so options here: the lengths,
    the depth, the block where a picture's prompts enter, which side asks in the attention, its
    heads and inner width, and whether its result replaces the prompts or is added to them. `fusion`
    is attention, replace, sum, or mlp, which is the control with as many numbers.
    """
    kept = prompt & own if fusion == "sum" else prompt & own | _fusion
    adapt = partial(
        _prompts,
        text=text,
        vision=vision,
        deep=deep,
        fusion=fusion,
        query=query,
        heads=heads,
        width=width,
        start=start,
        vision_at=vision_at,
    )
    return Method(chain(freeze(), share(prompt & common), keep(kept)), adapt=adapt)


def promptfl(
    text: int = 4, vision: int = 0, deep: bool = False, start: str = "words", vision_at: int = 0
) -> Method:
    """PromptFL: clients train and average prompts instead of the model.

    Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models,
    2023. The paper's prompts are those of the text only.
    """
    adapt = _one_level("common", text, vision, deep, start, vision_at)
    return Method(chain(freeze(), share(prompt & common)), adapt=adapt)


def local_prompts(
    text: int = 4, vision: int = 4, deep: bool = False, start: str = "words", vision_at: int = 0
) -> Method:
    """Prompts that each client trains for itself, and nothing shared: the floor of the others.

    Zhou et al., Learning to Prompt for Vision-Language Models, 2022, at each client alone; the
    prompts of pictures are those of Jia et al., Visual Prompt Tuning, 2022.
    """
    adapt = _one_level("own", text, vision, deep, start, vision_at)
    return Method(chain(freeze(), keep(prompt & own)), adapt=adapt)


def _one_level(
    level: str, text: int, vision: int, deep: bool, start: str, vision_at: int
) -> Callable[[nn.Module], nn.Module]:
    """What adds prompts of one level; nothing is fused."""
    return partial(
        _prompts,
        text=text,
        vision=vision,
        levels=(level,),
        deep=deep,
        start=start,
        vision_at=vision_at,
    )
