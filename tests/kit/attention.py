# SPDX-License-Identifier: Apache-2.0
"""Looks at tiny models: what their blocks attend to and give, and all that a look must not touch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import zoo
from torch import Tensor, nn

from fedplan.models.description import block_modules
from fedplan.models.params import Block, Params
from fedplan.tensors.named import digest

Seen = dict[tuple[Block, bool], Tensor]
"""Attention probabilities by block, self-attention (False) and cross-attention (True) apart."""


@dataclass
class ProbeInput:
    """What a model attended to, and what its blocks gave."""

    maps: Seen
    outputs: dict[Block, Tensor]


@torch.no_grad()
def look(name: str, model: nn.Module) -> ProbeInput:
    """Run a batch through a model and keep what its blocks did."""
    blocks, outputs = block_modules(model), dict[Block, Tensor]()

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
    return ProbeInput({where: seen for where, seen in maps.items() if where[0] in blocks}, outputs)


def _first(out: object) -> Tensor:
    return out if isinstance(out, Tensor) else _first(out[0])


def _returned(name: str, model: nn.Module) -> Iterator[tuple[tuple[Block, bool], Tensor]]:
    out = model(**zoo.feed(name), output_attentions=True)
    (stack,) = {b.stack for b in block_modules(model)} if "attentions" in out else {""}
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


def fresh(name: str) -> nn.Module:
    """A tiny model as its library builds it: with its own kernel for attention."""
    torch.manual_seed(0)
    return zoo.ROWS[name][0]().eval()


def trace(model: nn.Module) -> dict[str, Any]:
    """A model's bits, gradients, flags, modes, kernels and hooks, and the random numbers."""
    modules, weights = list(model.modules()), list(model.parameters())
    return {
        "values": [digest(each) for each in model.state_dict().values()],
        "gradients": [None if w.grad is None else digest(w.grad) for w in weights],
        "flags": [w.requires_grad for w in weights],
        "modes": [module.training for module in modules],
        "kernels": [_kernels(getattr(module, "config", None)) for module in modules],
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "random": torch.get_rng_state().tolist(),
    }


def _kernels(config: Any) -> Any:
    own = getattr(config, "_attn_implementation", None)
    inner = [_kernels(getattr(config, each)) for each in getattr(config, "sub_configs", {})]
    return [own, *inner] if inner else own
