# SPDX-License-Identifier: Apache-2.0
"""Tiny models of further model types with a layer map: newer decoders, experts, image readers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fifty
import torch
import transformers as hf
from torch import nn
from zoo import GROUPED, TEXT, VISION, Inputs, of, tokens

Case = tuple[Callable[[], nn.Module], Callable[[], Inputs]]
HEADS = {**GROUPED, "head_dim": 4}
EXPERTS = {**HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_local_experts": 4}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1} | {
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
SCOUT = {"num_local_experts": 4, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 24}
SHUFFLED = {"intermediate_size": 64, "projector_input_dim": 16, "projector_output_dim": 16} | {
    "vision_output_dim": 16
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
DEEP = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}


def causal(name: str, **settings: Any) -> Case:
    """A decoder of the classes with this name, and tokens for it."""
    return of(f"{name}ForCausalLM", f"{name}Config", **settings), tokens


def seer(name: str, text: str, vision: str, feed: Callable[[], Inputs], **extra: Any) -> Case:
    """A decoder that sees pictures, of a language tower and a vision tower; and its inputs."""
    sight = {**VISION, "model_type": vision, **extra.pop("sight", {})}
    words = {**HEADS, "model_type": text, **extra.pop("words", {})}

    def make() -> nn.Module:
        towers = {"text_config": words, "vision_config": sight}
        config = getattr(hf, f"{name}Config")(**towers, **fifty.SCENE, **extra)
        return getattr(hf, f"{name}ForConditionalGeneration")(config)

    return make, feed


def qwen3(name: str, text: dict[str, Any]) -> Case:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    sight = {"hidden_size": 16, "out_hidden_size": 16, "intermediate_size": 24, "depth": 2}
    sight |= {"num_heads": 4, "patch_size": 2, "spatial_merge_size": 2, **DEEP}

    def make() -> nn.Module:
        towers = {"text_config": {**text, "rope_parameters": rope}, "vision_config": sight}
        config = getattr(hf, f"{name}Config")(**towers, image_token_id=63)
        return getattr(hf, f"{name}ForConditionalGeneration")(config)

    return make, fifty.patches


def tiles(count: int) -> Callable[[], Inputs]:
    """Pictures as Idefics 3 takes them: one tile of each."""

    def feed() -> Inputs:
        batch = fifty.seen(count)()
        return batch | {"pixel_values": batch["pixel_values"][:, None]}

    return feed


def sized(count: int) -> Callable[[], Inputs]:
    """Pictures with their sizes."""
    return lambda: fifty.seen(count)() | {"image_sizes": torch.tensor([[16, 16]] * 2)}


DECODERS = {
    "apertus": causal("Apertus", **HEADS),
    "arcee": causal("Arcee", **HEADS),
    "cohere": causal("Cohere", use_qk_norm=True, **GROUPED),
    "cohere2": causal("Cohere2", **HEADS, **WINDOWS),
    "ernie4_5": causal("Ernie4_5", **HEADS),
    "exaone4": causal("Exaone4", **HEADS, **WINDOWS),
    "glm": causal("Glm", **HEADS),
    "glm4": causal("Glm4", **HEADS),
    "gptj": causal("GPTJ", n_embd=16, n_layer=2, n_head=4, rotary_dim=4, vocab_size=64),
    "granite": causal("Granite", **GROUPED),
    "helium": causal("Helium", **HEADS),
    "hunyuan_v1_dense": causal("HunYuanDenseV1", **HEADS),
    "ministral": causal("Ministral", **HEADS, **WINDOWS),
    "ministral3": causal("Ministral3", **HEADS),
    "nemotron": causal("Nemotron", **HEADS),
    "olmo": causal("Olmo", **GROUPED),
    "olmo3": causal("Olmo3", **GROUPED, **WINDOWS),
    "persimmon": causal("Persimmon", qk_layernorm=True, **TEXT),
    "seed_oss": causal("SeedOss", **HEADS),
    "stablelm": causal("StableLm", qk_layernorm=True, **GROUPED),
    "starcoder2": causal("Starcoder2", **GROUPED),
}
MIXTURES = {
    "deepseek_v2": causal(
        "DeepseekV2", **{**ROUTED, **LATENT, "v_head_dim": 6, "num_key_value_heads": 4}
    ),
    "dots1": causal("Dots1", **ROUTED),
    "ernie4_5_moe": causal("Ernie4_5_Moe", moe_num_experts=4, moe_k=2, **EXPERTS),
    "flex_olmo": causal("FlexOlmo", num_experts=4, num_experts_per_tok=2, **GROUPED),
    "glm4_moe": causal("Glm4Moe", use_qk_norm=True, **ROUTED),
    "granitemoe": causal("GraniteMoe", num_local_experts=4, num_experts_per_tok=2, **GROUPED),
    "granitemoeshared": causal(
        "GraniteMoeShared",
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=12,
        **GROUPED,
    ),
    "hunyuan_v1_moe": causal("HunYuanMoEV1", num_experts=4, moe_topk=2, **HEADS),
    "llama4_text": (of("Llama4ForCausalLM", "Llama4TextConfig", **HEADS, **SCOUT), tokens),
    "phimoe": causal("Phimoe", num_local_experts=4, **GROUPED),
}
SEERS = {
    "aya_vision": seer("AyaVision", "cohere2", "siglip_vision_model", fifty.seen(4)),
    "idefics3": seer("Idefics3", "llama", "idefics3_vision", tiles(4), scale_factor=2),
    "internvl": seer(
        "InternVL", "qwen2", "internvl_vision", fifty.seen(4), sight={"use_qk_norm": True}
    ),
    "llama4": seer(
        "Llama4", "llama4_text", "llama4_vision_model", fifty.seen(4), sight=SHUFFLED, words=SCOUT
    ),
    "mistral3": seer("Mistral3", "ministral3", "pixtral", sized(4), sight={"head_dim": 4}),
    "paligemma": seer(
        "PaliGemma", "gemma", "siglip_vision_model", fifty.seen(16), projection_dim=16
    ),
    "qwen3_vl": qwen3("Qwen3VL", HEADS),
    "qwen3_vl_moe": qwen3("Qwen3VLMoe", {**EXPERTS, "num_experts": 4}),
    "smolvlm": seer("SmolVLM", "llama", "smolvlm_vision", tiles(4), scale_factor=2),
}
MODELS: dict[str, Case] = {
    "deberta": (
        of(
            "DebertaForSequenceClassification",
            "DebertaConfig",
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            position_biased_input=False,
            **TEXT,
        ),
        tokens,
    ),
    **DECODERS,
    **MIXTURES,
    **SEERS,
}


PROJECTORS = ("projector", "connector", "merger")
"""Words in the paths of what brings pictures into a decoder."""
UNMAPPED = {
    "qwen3_5": "linear attention layers have no attention weights",
    "qwen3_next": "linear attention layers have no attention weights",
    "gemma4": "embeddings by layer enter inside of each block",
    "diffllama": "its lambdas weigh two attentions of one layer",
    "jamba": "state-space layers have no attention weights",
    "mllama": "layers of cross-attention stand between the others",
    "xlm": "the parts of one layer stand in several lists",
}
"""Types without a layer map, and why: plans that name a part are refused on them."""


def build(name: str) -> nn.Module:
    """A tiny model of a type, in evaluation mode."""
    torch.manual_seed(0)
    return MODELS[name][0]().eval()
