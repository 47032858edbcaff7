# SPDX-License-Identifier: Apache-2.0
"""Small random inputs and small models, to check a layer map with."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.tensors.devices import fork_rng_state, model_device, to_device

LAYER_COUNTS = "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth"
"""Config attributes with the number of layers."""
_SIZES = {
    LAYER_COUNTS: 2,
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
SMALL_SIZES = {name: size for names, size in _SIZES.items() for name in names.split()}
"""Small values of config attributes."""


def small_model(config: Any) -> nn.Module:
    """Build a small random model of a transformers config's type, in eval mode; seeded.

    Tries small values of all SMALL_SIZES, then of the number of layers only, then the original
    config, until a model runs on dummy inputs; `config` itself is not changed. Raises FedplanError
    if none runs.
    """
    import transformers

    for names in (tuple(SMALL_SIZES), tuple(LAYER_COUNTS.split()), ()):
        try:
            small = deepcopy(config)
            for part in (small, *(getattr(small, each, None) for each in small.sub_configs)):
                for name in names if part is not None else ():
                    if isinstance(getattr(part, name, None), int):
                        setattr(part, name, min(SMALL_SIZES[name], getattr(part, name)))
            with fork_rng_state(seed=0), torch.no_grad():
                loader: Any = transformers.AutoModel
                model: nn.Module = loader.from_config(small).eval()
                model(**dummy_inputs(model))
            return model
        # Models raise arbitrary exceptions for sizes that do not fit each other.
        except Exception as error:
            last_error = error
    raise FedplanError(f"a small {config.model_type} cannot be built and run: {last_error}")


def dummy_inputs(model: nn.Module) -> dict[str, Tensor]:
    """A small seeded random batch of two examples for a Hugging Face model, on the model's device.

    Has the model's main input, and decoder_input_ids or pixel_values if needed. Raises FedplanError
    for other models, and for a main input that is not in INPUTS.
    """
    config, main = getattr(model, "config", None), str(getattr(model, "main_input_name", ""))
    if config is None or main not in INPUTS:
        raise FedplanError(f"no dummy inputs for {type(model).__name__}: give a batch")
    batch = {main: INPUTS[main](config)}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = _tokens(config)[:, :5]
    if "text_config" in dir(config) and main == "input_ids" and "vision_config" in dir(config):
        batch["pixel_values"] = _pixels(config.vision_config)
    return to_device(batch, model_device(model))


def _tokens(config: Any) -> Tensor:
    vocab_size = min(getattr(_config_with(config, "vocab_size"), "vocab_size", 64), 1000)
    return torch.randint(3, vocab_size - 3, (2, 8), generator=torch.Generator().manual_seed(1))


def _pixels(config: Any) -> Tensor:
    vision = _config_with(config, "image_size")
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    return _noise(2, getattr(vision, "num_channels", 3), size, size)


def _wave(config: Any) -> Tensor:
    mels = getattr(config, "num_mel_bins", 0)
    return _noise(2, config.max_length, mels) if mels else _noise(2, 4000)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _config_with(config: Any, name: str) -> Any:
    """The config, or its first sub-config, with an attribute `name`; the config if none has."""
    inner = (getattr(config, each, None) for each in ("vision_config", "text_config", "encoder"))
    return next((c for c in (config, *inner) if c is not None and name in dir(c)), config)


INPUTS: dict[str, Callable[[Any], Tensor]] = {
    "input_ids": _tokens,
    "pixel_values": _pixels,
    "input_features": lambda config: _noise(
        2, config.num_mel_bins, 2 * config.max_source_positions
    ),
    "input_values": _wave,
}
"""Makers of a random input from a config, by the name of the input."""
