# SPDX-License-Identifier: Apache-2.0
"""Methods that add low-rank adapters, or prompts, to a frozen model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import nn

from fedplan.errors import FedplanError
from fedplan.language.canonical import with_text
from fedplan.language.parser import parse_part
from fedplan.language.parts import (
    Part,
    adapter,
    body,
    common,
    fusion,
    head,
    lora_a,
    lora_b,
    own,
    prompt,
)
from fedplan.language.plan import Plan, chain, freeze, keep, share
from fedplan.language.resolution import require_known_part
from fedplan.methods.lora import (
    ProductRule,
    average_separately,
    by_residual,
    by_svd,
    train_at_client_rank,
)
from fedplan.methods.method import Method
from fedplan.models.adapters import adapter_families, import_peft
from fedplan.models.description import describe
from fedplan.models.prompts import add_prompts

SCALE = 1
"""The LoRA scale, alpha / r."""


def fedit(rank: int = 8, target: str = "query | value", with_head: bool | None = None) -> Method:
    """FedIT: LoRA on a frozen model; both factors are averaged, each separately.

    Zhang et al., Towards Building the Federated GPT: Federated Instruction Tuning, 2024. The mean
    of the products is not the product of the means: the ledger records the difference of each
    round; FFA-LoRA, FlexLoRA and FedEx-LoRA avoid the difference. LoRA of `rank` is added to the
    layers of the part `target` (plan language). `with_head` also trains and averages the head: by
    default that of a classifier, and not that of a language model, since serving engines load
    adapters without a head.
    """
    return _lora(share, adapter, with_head, _adapt(rank, target))


def ffa_lora(rank: int = 8, target: str = "query | value", with_head: bool | None = None) -> Method:
    """FFA-LoRA: the input factor A stays as initialized, the output factor B is trained and shared.

    Sun et al., Improving LoRA in Privacy-preserving Federated Learning, 2024. Settings as in fedit.
    """
    return _lora(share, lora_b, with_head, _adapt(rank, target))


def fedsa_lora(
    rank: int = 8, target: str = "query | value", with_head: bool | None = None
) -> Method:
    """FedSA-LoRA: the input factor A is averaged, each client keeps its output factor B.

    Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning, 2025. Settings
    as in fedit.
    """

    def roles(part: Part) -> Plan:
        return chain(share(part), keep(lora_b))

    return _lora(roles, lora_a, with_head, _adapt(rank, target))


def flexlora(
    rank: int = 8, target: str = "query | value", with_head: bool | None = None, trait: str = ""
) -> Method:
    """FlexLoRA: the mean of the clients' products, truncated to the rank by SVD.

    Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
    Resources, 2024. A client whose trait `trait` is a lower rank trains only the first directions,
    those with the largest singular values; with an empty `trait` all clients train the full rank.
    Differences from the paper: each factor gets the square root of each singular value; a client of
    lower rank sends zeros for the rest; and if the product of the mean factors is the mean of the
    products, as after a round of one client, these factors are kept. `rank`, `target`, `with_head`:
    as in fedit.
    """
    method = _lora(share, adapter, with_head, _adapt(rank, target), by_svd())
    return replace(method, client_hooks=(train_at_client_rank(trait),) if trait else ())


def fedex_lora(
    rank: int = 8, target: str = "query | value", with_head: bool | None = None
) -> Method:
    """FedEx-LoRA: factors are averaged separately, and the residual is added to the frozen weight.

    Singhal et al., FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large
    Language Models, 2025. The residual is the mean of the products minus the product of the means.
    Clients download the changed frozen weights in full; the paper sends factors of the residual.
    `rank`, `target`, `with_head`: as in fedit.
    """
    return _lora(share, adapter, with_head, _adapt(rank, target), by_residual(SCALE))


def feddpa(
    rank: int = 8, own_rank: int = 8, target: str = "query | value", with_head: bool | None = None
) -> Method:
    """FedDPA: a common LoRA adapter is averaged, and each client keeps an own one beside it.

    Yang et al., Dual-Personalizing Adapter for Federated Foundation Models, 2024. The common
    adapter has `rank`, the own one `own_rank`; the layer adds the products of both. Differences
    from the paper: both train together under one loss, and both count fully at inference; the paper
    trains one after the other and weighs them for each example. `target`: as in fedit; `with_head`
    as there.
    """

    def roles(part: Part) -> Plan:
        return chain(share(part), keep(adapter & own))

    adapt = partial(add_two_adapters, rank=rank, own_rank=own_rank, on=parse_part(target))
    return _lora(roles, adapter & common, with_head, adapt)


def _lora(
    roles: Callable[[Part], Plan],
    shared: Part,
    with_head: bool | None,
    adapt: Callable[[nn.Module], nn.Module],
    product: ProductRule | None = None,
) -> Method:
    """Return a method with a plan of `roles`, a function of the shared part.

    The head is shared, too, if `with_head` says so; by default unless it is a language model's.
    """
    plans = [chain(freeze(), roles(part)) for part in (shared, shared | head)]
    return Method(
        plans[with_head is not False],
        adapt=adapt,
        lora_aggregation=product or average_separately(),
        plan_without_head=plans[0] if with_head is None else None,
    )


def _adapt(rank: int, target: str) -> Callable[[nn.Module], nn.Module]:
    return partial(add_lora, rank=rank, on=parse_part(target))


@with_text("lora")
def add_lora(model: nn.Module, *, rank: int, on: Part) -> nn.Module:
    """Add LoRA to the modules of the part `on`, in place, unless the model has an adapter."""
    peft = import_peft()

    if adapter_families(model):
        return model
    config = peft.LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=hosts_of(model, on))
    return peft.get_peft_model(cast(Any, model), config)


@with_text("two_adapters")
def add_two_adapters(model: nn.Module, *, rank: int, own_rank: int, on: Part) -> nn.Module:
    """Add the LoRA adapters "common" and "own" to the modules of the part `on`, both active.

    Raises FedplanError for a model that has an adapter.
    """
    if families := adapter_families(model):
        raise FedplanError(
            f"feddpa adds two adapters, and the model has one of peft's {', '.join(families)}: "
            "leave out model.adapter, or write the plan for your own adapters, named common and own"
        )
    peft, hosts = import_peft(), hosts_of(model, on)
    configs = {
        name: peft.LoraConfig(r=each, lora_alpha=SCALE * each, target_modules=hosts)
        for name, each in (("common", rank), ("own", own_rank))
    }
    adapted = peft.get_peft_model(cast(Any, model), configs["common"], adapter_name="common")
    adapted.add_adapter("own", configs["own"])
    adapted.base_model.set_adapter([*configs])
    return adapted


def hosts_of(model: nn.Module, part: Part) -> list[str]:
    """Return the sorted names of the modules in a model's blocks that own a param of a part."""
    params = describe(model)
    require_known_part(part & body, params)
    return sorted({p.name.rpartition(".")[0] for p in params if p.block_id and part.holds(p)})


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
    gate: float = 0.0,
) -> Method:
    """pFedDC: common prompts are averaged; each client keeps own prompts and the fusion module.

    Zhang et al., Personalized Federated Learning via Dual-Prompt Optimization and Cross Fusion,
    2025, arXiv 2506.21144. The paper leaves open, and options here are: the numbers of `text` and
    `vision` prompts, prompts in all blocks (`deep`), the block where image prompts enter
    (`vision_at`), initial values (`start`: words or noise), the prompts that are the queries of the
    fusion attention (`query`), the `heads` and inner `width` of the attention, and whether the
    output replaces the prompts or is added, times a learned gate that starts at `gate`. `fusion` is
    attention, replace, sum, or mlp (a control with as many parameters).
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
        gate=gate,
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
    """Return a function that adds prompts of one level, "common" or "own", to a model in place."""
    return partial(
        _prompts,
        text=text,
        vision=vision,
        levels=(level,),
        deep=deep,
        start=start,
        vision_at=vision_at,
    )


METHODS = (
    *(fedit, ffa_lora, fedsa_lora, flexlora, fedex_lora, feddpa),
    *(pfeddc, promptfl, local_prompts),
)
"""The methods of this module, as lists of methods order them."""
