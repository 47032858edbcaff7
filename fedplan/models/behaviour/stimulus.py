# SPDX-License-Identifier: Apache-2.0
"""Stimulus: a small batch, and a small copy of a model, to look at its behaviour with."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.tensors.devices import brought, device_of, forked

LAYERS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth"
NAMES = {
    LAYERS: 2,
    "vocab_size entity_vocab_size": 300,
    "hidden_size d_model n_embd embedding_size dim entity_emb_size": 32,
    "intermediate_size d_ff n_inner ffn_dim d_inner hidden_dim moe_intermediate_size": 48,
    "encoder_ffn_dim decoder_ffn_dim": 48,
    "num_attention_heads n_head n_heads num_heads": 4,
    "encoder_attention_heads decoder_attention_heads": 4,
    "head_dim d_head d_kv rotary_dim": 8,
    "num_experts num_local_experts n_routed_experts": 4,
    "max_position_embeddings n_positions n_ctx max_length image_size": 64,
    "num_key_value_heads": 2,
}
SIZES = {name: size for names, size in NAMES.items() for name in names.split()}
"""What to make small in a configuration, in the names that configurations have for it."""


def small_model(config: Any) -> nn.Module:
    """A model of a configuration's type, as small as it can be built and run."""
    import transformers

    for names in (tuple(SIZES), tuple(LAYERS.split()), ()):
        try:
            with forked(seed=0), torch.no_grad():
                loader: Any = transformers.AutoModel
                model: nn.Module = loader.from_config(_small(config, names)).eval()
                model(**stimulus(model))
            return model
        # What other people's models raise for sizes that do not fit each other is anything.
        except Exception as error:
            said = error
    raise FedplanError(f"a small {config.model_type} cannot be built and run: {said}")


def _small(config: Any, names: tuple[str, ...]) -> Any:
    """A configuration with small numbers, also in those within it."""
    made = deepcopy(config)
    for one in (made, *(getattr(made, each, None) for each in made.sub_configs)):
        for name in names if one is not None else ():
            if isinstance(getattr(one, name, None), int):
                setattr(one, name, min(SIZES[name], getattr(one, name)))
    return made


def stimulus(model: nn.Module) -> dict[str, Tensor]:
    """A small random batch for a Hugging Face model, by the name of its main input."""
    config, main = getattr(model, "config", None), str(getattr(model, "main_input_name", ""))
    if config is None or main not in INPUTS:
        raise FedplanError(f"{type(model).__name__}: give a batch to look at its behaviour with")
    batch = {main: INPUTS[main](config)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = _tokens(config)[:, :5]
    if "text_config" in dir(config) and main == "input_ids" and "vision_config" in dir(config):
        batch["pixel_values"] = _pixels(config.vision_config)
    return brought(batch, device_of(model))


def _tokens(config: Any) -> Tensor:
    most = min(getattr(_of(config, "vocab_size"), "vocab_size", 64), 1000)
    return torch.randint(3, most - 3, (2, 8), generator=torch.Generator().manual_seed(1))


def _pixels(config: Any) -> Tensor:
    found = _of(config, "image_size")
    size = found.image_size if isinstance(found.image_size, int) else found.image_size[0]
    return _noise(2, getattr(found, "num_channels", 3), size, size)


def _features(config: Any) -> Tensor:
    return _noise(2, config.num_mel_bins, 2 * config.max_source_positions)


def _wave(config: Any) -> Tensor:
    mels = getattr(config, "num_mel_bins", 0)
    return _noise(2, config.max_length, mels) if mels else _noise(2, 4000)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _of(config: Any, name: str) -> Any:
    """The configuration, or the one within it, that has a field."""
    inner = (getattr(config, each, None) for each in ("vision_config", "text_config", "encoder"))
    return next((c for c in (config, *inner) if c is not None and name in dir(c)), config)


INPUTS: dict[str, Callable[[Any], Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": _features,
    "input_values": _wave,
}
