# SPDX-License-Identifier: Apache-2.0
"""Methods that train low-rank adapters on a frozen model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

from torch import nn

from fedplan.language.parser import parse_part
from fedplan.language.parts import Part, adapter, body, head, lora_a, lora_b
from fedplan.language.plan import Plan, chain, freeze, keep, share
from fedplan.language.resolution import require_told
from fedplan.language.wording import stated
from fedplan.methods.method import Method
from fedplan.methods.products import ProductRule, apart, by_residual, by_svd
from fedplan.models.adapters import families_in
from fedplan.models.description import describe
from fedplan.training.ranks import narrowed

SCALE = 1
"""What the product of the sides is multiplied by: peft's alpha / r."""


def fedit(rank: int = 8, on: str = "query | value", with_head: bool = True) -> Method:
    """FedIT: LoRA on a frozen model; both of its sides are averaged, each by itself.

    Zhang et al., Towards Building the Federated GPT: Federated Instruction Tuning, 2024. The mean
    of the products is not the product of the means: each round's line of the ledger says how far
    the two are apart, and FFA-LoRA, FlexLoRA and FedEx-LoRA remove it, each in its way.
    """
    return _lora(share(_and_head(adapter, with_head)), rank, on)


def ffa_lora(rank: int = 8, on: str = "query | value", with_head: bool = True) -> Method:
    """FFA-LoRA: the input side stays as it was drawn, the output side is trained and averaged.

    Sun et al., Improving LoRA in Privacy-preserving Federated Learning, 2024.
    """
    return _lora(share(_and_head(lora_b, with_head)), rank, on)


def fedsa_lora(rank: int = 8, on: str = "query | value", with_head: bool = True) -> Method:
    """FedSA-LoRA: the input side is averaged, each client keeps its output side.

    Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning, 2025.
    """
    return _lora(chain(share(_and_head(lora_a, with_head)), keep(lora_b)), rank, on)


def flexlora(
    rank: int = 8, on: str = "query | value", with_head: bool = True, trait: str = ""
) -> Method:
    """FlexLoRA: the mean of the clients' products, cut back to the rank by its singular values.

    Bai et al., Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client
    Resources, 2024. A client whose `trait` says a lower rank trains the first directions, which are
    the largest. Where we differ: both sides get the root of each singular value, and a client of
    lower rank sends zeros for the rest.
    """
    made = _lora(share(_and_head(adapter, with_head)), rank, on, by_svd())
    return replace(made, wraps=(narrowed(trait),) if trait else ())


def fedex_lora(rank: int = 8, on: str = "query | value", with_head: bool = True) -> Method:
    """FedEx-LoRA: sides are averaged apart, and the frozen weight takes what their product lacks.

    Singhal et al., FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Large
    Language Models, 2025. The weights below LoRA are the federation's, and come down when they
    have changed: whole, where the paper sends factors of the residual.
    """
    return _lora(share(_and_head(adapter, with_head)), rank, on, by_residual(SCALE))


def _lora(plan: Plan, rank: int, on: str, product: ProductRule | None = None) -> Method:
    adapt = partial(add_lora, rank=rank, on=parse_part(on))
    return Method(chain(freeze(), plan), adapt=adapt, product=product or apart())


def _and_head(part: Part, with_head: bool) -> Part:
    """A classifier's new head is trained too; a language model's is tied, and is left out."""
    return part | head if with_head else part


@stated("lora")
def add_lora(model: nn.Module, *, rank: int, on: Part) -> nn.Module:
    """The model with LoRA on the layers of a part; one that has an adapter stays as it is."""
    import peft

    if families_in(model):
        return model
    config = peft.LoraConfig(r=rank, lora_alpha=SCALE * rank, target_modules=hosts_of(model, on))
    return peft.get_peft_model(cast(Any, model), config)


def hosts_of(model: nn.Module, part: Part) -> list[str]:
    """The layers in a model's blocks that hold something of a part."""
    params = describe(model)
    require_told(part & body, params)
    return sorted({p.name.rpartition(".")[0] for p in params if p.at and part.holds(p)})
