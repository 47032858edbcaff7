# SPDX-License-Identifier: Apache-2.0
"""Looks at attention: the probabilities and the output of each block of a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import zoo
from torch import Tensor, nn

from fedplan.description import blocks_of
from fedplan.params import Block, Params

Seen = dict[tuple[Block, bool], Tensor]
"""Attention probabilities by block, self-attention (False) and cross-attention (True) apart."""


@dataclass
class Look:
    """What a model attended to, and what its blocks gave."""

    maps: Seen
    outputs: dict[Block, Tensor]


@torch.no_grad()
def look(name: str, model: nn.Module) -> Look:
    """Run a batch through a model and keep what its blocks did."""
    blocks, outputs = blocks_of(model), dict[Block, Tensor]()

    def keep(block: Block) -> object:
        def hook(_: nn.Module, __: object, out: object) -> None:
            # A block that is run several times (ALBERT) is judged by its first run.
            outputs.setdefault(block, _first(out))

        return hook

    hooks = [module.register_forward_hook(keep(block)) for block, module in blocks.items()]
    maps = dict(_packed(model)) if name == "torch" else dict(_returned(name, model))
    for hook in hooks:
        hook.remove()
    # ALBERT runs its one block several times, and returns the attention of each run.
    return Look({where: seen for where, seen in maps.items() if where[0] in blocks}, outputs)


def _first(out: object) -> Tensor:
    return out if isinstance(out, Tensor) else _first(out[0])


def _returned(name: str, model: nn.Module) -> Iterator[tuple[tuple[Block, bool], Tensor]]:
    out = model(**zoo.feed(name), output_attentions=True)
    (stack,) = {b.stack for b in blocks_of(model)} if "attentions" in out else {""}
    for where, found, cross in (
        (stack, out.get("attentions"), False),
        ("encoder", out.get("encoder_attentions"), False),
        ("decoder", out.get("decoder_attentions"), False),
        ("decoder", out.get("cross_attentions"), True),
        ("text", out.get("text_model_output", {}).get("attentions"), False),
        ("vision", out.get("vision_model_output", {}).get("attentions"), False),
    ):
        for i, each in enumerate(found or ()):
            # Swin returns the attention of each stage's last block, of two here.
            yield (Block(where, 2 * i + 1 if name == "swin" else i), cross), each


def _packed(model: zoo.Torch) -> Iterator[tuple[tuple[Block, bool], Tensor]]:
    x = model.embed(zoo.feed("torch")["input_ids"])
    for i, layer in enumerate(model.encoder.layers):
        _, weights = layer.self_attn(x, x, x, need_weights=True, average_attn_weights=False)
        yield (Block("encoder", i), False), weights
        x = layer(x)


@torch.no_grad()
def stir(model: nn.Module, params: Params) -> None:
    """Change every number of some params."""
    tensors = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(7)
    for p in params:
        view = p.view(tensors[p.name])
        view.add_(torch.randn(view.shape, generator=generator))
