# SPDX-License-Identifier: Apache-2.0
"""Tiny models of the fifty model types that are used most, and of some more that have a row."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
import zoo
from torch import nn
from zoo import GROUPED, TEXT, VISION, Inputs, both, of, pairs, pixels, tokens

FIFTY = tuple(
    [
        "bert",
        "roberta",
        "xlm-roberta",
        "distilbert",
        "mpnet",
        "gpt2",
        "qwen2",
        "qwen3",
        "llama",
        "clip",
        "vit",
        "electra",
        "t5",
        "whisper",
        "wav2vec2",
        "opt",
        "gemma2",
        "gemma3",
        "mistral",
        "deberta-v2",
        "bart",
        "albert",
        "camembert",
        "mixtral",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_moe",
        "phi3",
        "siglip",
        "dinov2",
        "segformer",
        "blip",
        "layoutlmv3",
        "swin",
        "detr",
        "esm",
        "modernbert",
        "gpt_oss",
        "deepseek_v3",
        "olmo2",
        "gpt_neox",
        "marian",
        "mt5",
        "m2m_100",
        "longformer",
        "hubert",
        "llava",
        "vit_mae",
        "bloom",
        "falcon",
    ]
)
FURTHER = ("smollm3", "phi", "mbart", "dinov3_vit", "siglip2", "olmoe", "qwen2_moe")

TWO = {
    "vocab_size": 64,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_experts": 4}
SOUND = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "vocab_size": 32,
}
SCENE = {"image_token_id": 63, "image_token_index": 63}


def sounds() -> Inputs:
    return {"input_values": torch.randn(2, 200, generator=torch.Generator().manual_seed(1))}


def seen(count: int) -> Callable[[], Inputs]:
    """Tokens of which some stand for a picture."""

    def feed() -> Inputs:
        ids = tokens()["input_ids"]
        return pixels() | {"input_ids": torch.cat([torch.full((2, count), 63), ids], 1)}

    return feed


def patches() -> Inputs:
    """Two pictures, each 4 by 4 patches of 2 by 2 pixels in 2 frames, then merged to 4 tokens."""
    values = torch.randn(32, 3 * 2 * 2 * 2, generator=torch.Generator().manual_seed(1))
    ids = torch.cat([torch.full((2, 4), 63), tokens()["input_ids"]], 1)
    return {
        "pixel_values": values,
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "input_ids": ids,
        "mm_token_type_ids": (ids == 63).int(),
    }


def documents() -> Inputs:
    boxes = torch.arange(32).reshape(1, 8, 4).repeat(2, 1, 1)
    return both() | {"bbox": boxes, "attention_mask": torch.ones(2, 8, dtype=torch.long)}


def glances() -> Inputs:
    """Tokens of which the first looks at all, as Longformer does it."""
    mask = torch.zeros(2, 8, dtype=torch.long)
    mask[:, 0] = 1
    return tokens() | {"global_attention_mask": mask}


def flat() -> Inputs:
    """Pictures as SigLIP 2 takes them: 16 patches of 4 by 4 pixels each."""
    values = torch.randn(2, 16, 48, generator=torch.Generator().manual_seed(1))
    sizes = {"spatial_shapes": torch.tensor([[4, 4]] * 2)}
    mask = {"pixel_attention_mask": torch.ones(2, 16, dtype=torch.long)}
    return tokens() | {"pixel_values": values} | sizes | mask


def looking(name: str, text: Any, **extra: Any) -> Callable[[], nn.Module]:
    """A decoder that sees pictures."""

    def make() -> nn.Module:
        config = getattr(hf, f"{name}Config")(text_config=text, **SCENE, **extra)
        return getattr(hf, f"{name}ForConditionalGeneration")(config)

    return make


def qwen(name: str, **vision: Any) -> Callable[[], nn.Module]:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 10000.0}
    vision |= {"depth": 2, "num_heads": 4, "patch_size": 2, "spatial_merge_size": 2}
    settings = {"text_config": {**GROUPED, "rope_parameters": rope}, "vision_config": vision}

    def make() -> nn.Module:
        config = getattr(hf, f"{name}Config")(**settings, image_token_id=63)
        return getattr(hf, f"{name}ForConditionalGeneration")(config)

    return make


def detr() -> nn.Module:
    bones = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], out_features=["stage2"]
    )
    settings = {key: value for key, value in TWO.items() if key != "vocab_size"}
    config = hf.DetrConfig(
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config=bones,
        num_queries=5,
        **settings,
    )
    return hf.DetrForObjectDetection(config)


CLIP = {**VISION, "model_type": "clip_vision_model"}
SIGLIP = {**VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    name: zoo.ROWS[zoo_name]
    for name, zoo_name in {
        **{name: name for name in (*FIFTY, *FURTHER) if name in zoo.ROWS},
        "gpt_neox": "gpt-neox",
    }.items()
} | {
    "xlm-roberta": (of("XLMRobertaForSequenceClassification", "XLMRobertaConfig", **TEXT), tokens),
    "camembert": (of("CamembertForSequenceClassification", "CamembertConfig", **TEXT), tokens),
    "mpnet": (of("MPNetModel", "MPNetConfig", **TEXT), tokens),
    "qwen2": (of("Qwen2ForCausalLM", "Qwen2Config", **GROUPED), tokens),
    "wav2vec2": (of("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SOUND), sounds),
    "hubert": (of("HubertForSequenceClassification", "HubertConfig", **SOUND), sounds),
    "opt": (
        of(
            "OPTForCausalLM",
            "OPTConfig",
            ffn_dim=24,
            word_embed_proj_dim=12,
            do_layer_norm_before=False,
            **TEXT,
        ),
        tokens,
    ),
    "gemma2": (of("Gemma2ForCausalLM", "Gemma2Config", head_dim=4, **GROUPED), tokens),
    "gemma3": (
        looking("Gemma3", {**GROUPED, "head_dim": 4}, vision_config=SIGLIP, mm_tokens_per_image=4),
        lambda: seen(4)() | {"token_type_ids": (seen(4)()["input_ids"] == 63).int()},
    ),
    "mixtral": (
        of("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, **GROUPED),
        tokens,
    ),
    "qwen2_vl": (qwen("Qwen2VL", embed_dim=16, hidden_size=16, mlp_ratio=2), patches),
    "qwen2_5_vl": (
        qwen(
            "Qwen2_5_VL",
            hidden_size=16,
            out_hidden_size=16,
            intermediate_size=24,
            window_size=8,
            fullatt_block_indexes=[1],
        ),
        patches,
    ),
    "qwen3_moe": (of("Qwen3MoeForCausalLM", "Qwen3MoeConfig", head_dim=4, **EXPERTS), tokens),
    "segformer": (
        of(
            "SegformerForImageClassification",
            "SegformerConfig",
            num_encoder_blocks=2,
            depths=[1, 1],
            sr_ratios=[2, 1],
            hidden_sizes=[8, 16],
            patch_sizes=[3, 3],
            strides=[2, 2],
            num_attention_heads=[2, 4],
            mlp_ratios=[2, 2],
        ),
        pixels,
    ),
    "blip": (
        lambda: hf.BlipForConditionalGeneration(
            hf.BlipConfig(
                text_config={**TEXT, "encoder_hidden_size": 16},
                vision_config={**VISION, "initializer_range": 0.02},
                projection_dim=16,
            )
        ),
        both,
    ),
    "layoutlmv3": (
        of(
            "LayoutLMv3ForTokenClassification",
            "LayoutLMv3Config",
            input_size=16,
            patch_size=4,
            coordinate_size=3,
            shape_size=2,
            has_relative_attention_bias=True,
            has_spatial_attention_bias=True,
            **TEXT,
        ),
        documents,
    ),
    "detr": (detr, lambda: pixels()),
    "esm": (of("EsmForMaskedLM", "EsmConfig", mask_token_id=3, **TEXT), tokens),
    "gpt_oss": (
        of("GptOssForCausalLM", "GptOssConfig", head_dim=4, num_local_experts=4, **GROUPED),
        tokens,
    ),
    "deepseek_v3": (
        of(
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            first_k_dense_replace=1,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            q_lora_rank=8,
            kv_lora_rank=8,
            qk_rope_head_dim=4,
            qk_nope_head_dim=4,
            v_head_dim=6,
            **{**TEXT, "num_key_value_heads": 4},
        ),
        tokens,
    ),
    "olmo2": (of("Olmo2ForCausalLM", "Olmo2Config", **GROUPED), tokens),
    "marian": (of("MarianMTModel", "MarianConfig", **TWO), pairs),
    "mbart": (of("MBartForConditionalGeneration", "MBartConfig", **TWO), pairs),
    "m2m_100": (of("M2M100ForConditionalGeneration", "M2M100Config", **TWO), pairs),
    "mt5": (
        of(
            "MT5ForConditionalGeneration",
            "MT5Config",
            vocab_size=64,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
        ),
        pairs,
    ),
    "longformer": (
        of(
            "LongformerForSequenceClassification",
            "LongformerConfig",
            attention_window=[4, 4],
            **TEXT,
        ),
        glances,
    ),
    "llava": (
        looking("Llava", {**GROUPED, "model_type": "llama"}, vision_config=CLIP),
        seen(16),
    ),
    "vit_mae": (of("ViTMAEModel", "ViTMAEConfig", mask_ratio=0.0, **VISION), pixels),
    "smollm3": (of("SmolLM3ForCausalLM", "SmolLM3Config", **GROUPED), tokens),
    "phi": (of("PhiForCausalLM", "PhiConfig", qk_layernorm=True, **GROUPED), tokens),
    "dinov3_vit": (
        of("DINOv3ViTModel", "DINOv3ViTConfig", num_register_tokens=2, **VISION),
        pixels,
    ),
    "siglip2": (
        lambda: hf.Siglip2Model(
            hf.Siglip2Config(
                text_config={**TEXT, "projection_size": 16},
                vision_config={**VISION, "num_patches": 16},
            )
        ),
        flat,
    ),
    "olmoe": (of("OlmoeForCausalLM", "OlmoeConfig", **EXPERTS), tokens),
    "qwen2_moe": (
        of(
            "Qwen2MoeForCausalLM",
            "Qwen2MoeConfig",
            shared_expert_intermediate_size=12,
            **EXPERTS,
        ),
        tokens,
    ),
}


def build(name: str) -> nn.Module:
    """A tiny model of a type, in evaluation mode."""
    torch.manual_seed(0)
    return MODELS[name][0]().eval()


def table() -> str:
    """What each of the fifty types, and of the further ones, is by its behaviour."""
    from fedplan.models.validate import check_params

    lines, works = list[str](), 0
    for name in (*FIFTY, *FURTHER):
        found = check_params(build(name), MODELS[name][1]())
        faults = [f"{v.param.key} {v.fault}" for v in found if v.fault]
        works += name in FIFTY and not faults
        said = faults[0] if faults else " ".join(sorted({str(v.param.kind) for v in found}))
        lines.append(f"{name:16} {len(found):4} params  {'FAULT' if faults else 'ok'}: {said}")
    return "\n".join([*lines, f"{works} of the {len(FIFTY)} types behave as their rows say", ""])


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sys.stdout.write(table())
