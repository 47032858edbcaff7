# SPDX-License-Identifier: Apache-2.0
"""Methods that train prompts of a frozen image-text model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from fedplan.language.canonical import with_text
from fedplan.language.parts import common, fusion, own, prompt
from fedplan.language.plan import chain, freeze, keep, share
from fedplan.methods.method import Method
from fedplan.models.prompts import add_prompts

_fusion = fusion
_prompts = with_text("prompts")(add_prompts)


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
    """pFedDC: common prompts are averaged; each client keeps own prompts and the fusion module.

    Zhang et al., Personalized Federated Learning via Dual-Prompt Optimization and Cross Fusion,
    2025, arXiv 2506.21144. The paper leaves open, and options here are: the numbers of `text` and
    `vision` prompts, prompts in all blocks (`deep`), the block where image prompts enter
    (`vision_at`), initial values (`start`: words or noise), the prompts that are the queries of the
    fusion attention (`query`), the `heads` and inner `width` of the attention, and whether the
    output replaces the prompts or is added. `fusion` is attention, replace, sum, or mlp (a control
    with as many parameters).
    """
    personal = prompt & own if fusion == "sum" else prompt & own | _fusion
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
    return Method(chain(freeze(), share(prompt & common), keep(personal)), adapt=adapt)


def promptfl(
    text: int = 4, vision: int = 0, deep: bool = False, start: str = "words", vision_at: int = 0
) -> Method:
    """PromptFL: clients train prompts instead of the model, the server averages the prompts.

    Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of Models,
    2023. The paper uses text prompts only. Settings as in pfeddc.
    """
    adapt = _one_level("common", text, vision, deep, start, vision_at)
    return Method(chain(freeze(), share(prompt & common)), adapt=adapt)


def local_prompts(
    text: int = 4, vision: int = 4, deep: bool = False, start: str = "words", vision_at: int = 0
) -> Method:
    """Local prompts: each client trains own prompts alone. The baseline of prompt methods.

    Zhou et al., Learning to Prompt for Vision-Language Models, 2022, at each client alone; image
    prompts as in Jia et al., Visual Prompt Tuning, 2022. Settings as in pfeddc.
    """
    adapt = _one_level("own", text, vision, deep, start, vision_at)
    return Method(chain(freeze(), keep(prompt & own)), adapt=adapt)


def _one_level(
    level: str, text: int, vision: int, deep: bool, start: str, vision_at: int
) -> Callable[[nn.Module], nn.Module]:
    """Return a function that adds prompts of one level, "common" or "own", to a model in place.

    `text`, `vision`, `deep`, `start`, `vision_at`: as in `add_prompts`.
    """
    return partial(
        _prompts,
        text=text,
        vision=vision,
        levels=(level,),
        deep=deep,
        start=start,
        vision_at=vision_at,
    )
