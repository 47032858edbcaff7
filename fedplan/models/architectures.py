# SPDX-License-Identifier: Apache-2.0
"""The layer maps of all known architectures; the only file with module names of other libraries.

Norms and embedding tables are recognized by their class, and everything outside a Hugging Face
backbone is its head; a layer map defines the rest.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedplan.models.layer_maps import (
    LAYER_MAPS,
    falcon,
    grouped,
    key_value,
    latent,
    per_head,
    register_layer_map,
    thirds,
)


def _attention(paths: str, names: str) -> dict[str, Any]:
    """The paths of query, key, value and out, for which one of `names` each replaces `{0}`."""
    kinds = ("query", "key", "value", "out")
    return {kind: paths.format(name) for kind, name in zip(kinds, names.split(), strict=False)}


# Text encoders
register_layer_map(
    "bert",
    blocks={"encoder": "encoder.layer"},
    **_attention("self.{0}", "query key value"),
    out="attention.output.dense crossattention.output.dense",
    mlp="intermediate.dense output.dense",
    head="pooler",
    cross="crossattention",
)
for name in ("roberta", "xlm-roberta", "camembert"):
    register_layer_map(name, like="bert")
register_layer_map("esm", like="bert", head="contact_head")
register_layer_map(
    "mpnet", like="bert", **_attention("attn.{0}", "q k v o"), position="relative_attention_bias"
)
register_layer_map("longformer", like="bert", **_attention("self.{0}_global", "query key value"))
register_layer_map(
    "layoutlmv3",
    like="bert",
    position="rel_pos_bias rel_pos_x_bias rel_pos_y_bias",
    embed="cls_token pos_embed patch_embed",
)
register_layer_map("electra", like="bert", embed="embeddings_project")
register_layer_map(
    "albert",
    blocks={"encoder": "albert_layer_groups.*.albert_layers"},
    **_attention("attention.{0}", "query key value dense"),
    mlp="ffn ffn_output",
    embed="embedding_hidden_mapping_in",
    head="pooler",
)
register_layer_map(
    "distilbert",
    blocks={"encoder": "transformer.layer"},
    **_attention("attention.{0}_lin", "q k v out"),
    mlp="ffn",
)
register_layer_map(
    "deberta-v2",
    like="bert",
    query="self.query_proj self.pos_query_proj",
    key="self.key_proj self.pos_key_proj",
    value="self.value_proj",
    position="encoder.rel_embeddings",
    embed="embed_proj",
    acts_on={"encoder.LayerNorm": "position"},
)
register_layer_map(
    "deberta",
    like="bert",
    fused={"self.in_proj": per_head},
    query="self.q_bias self.pos_q_proj",
    key="self.pos_proj",
    value="self.v_bias",
    position="encoder.rel_embeddings",
    embed="embed_proj",
)
register_layer_map(
    "modernbert",
    blocks={"encoder": "layers"},
    fused={"attn.Wqkv": thirds},
    out="attn.Wo",
    mlp="mlp",
)

# Vision: the second names are those of transformers before 5.9 (DINOv2: before 5.18)
register_layer_map(
    "vit",
    blocks={"vision": "layers encoder.layer"},
    query="attention.q_proj attention.attention.query",
    key="attention.k_proj attention.attention.key",
    value="attention.v_proj attention.attention.value",
    out="attention.o_proj attention.output.dense",
    mlp="mlp intermediate.dense output.dense",
    embed="embeddings",
    head="pooler",
)
register_layer_map("deit", like="vit")
register_layer_map("vit_mae", like="vit")
register_layer_map("dinov2", like="vit", scale="layer_scale1 layer_scale2")
register_layer_map("dinov3_vit", like="dinov2", blocks={"vision": "model.layer"})
register_layer_map("beit", like="vit", scale="lambda_1 lambda_2", position="relative_position_bias")
register_layer_map(
    "swin",
    like="vit",
    blocks={"vision": "encoder.layers.*.blocks"},
    **_attention("self.{0}", "query key value"),
    position="relative_position_bias self.relative_position_bias_table",
    embed="downsample",
)

# The reduced sequence determines both keys and values: it is key.
register_layer_map(
    "segformer",
    like="vit",
    blocks={"vision": "stages.*.blocks"},
    key="attention.sequence_reduction",
    embed="patch_embeddings",
)

# Audio
register_layer_map(
    "wav2vec2",
    blocks={"encoder": "encoder.layers"},
    **_attention("attention.{0}_proj", "q k v out"),
    mlp="feed_forward",
    embed="masked_spec_embed feature_extractor feature_projection pos_conv_embed",
)
register_layer_map("hubert", like="wav2vec2")

# Two towers
register_layer_map(
    "clip_text_model",
    blocks={"text": "encoder.layers"},
    **_attention("self_attn.{0}_proj", "q k v out"),
    mlp="mlp",
)
register_layer_map(
    "clip_vision_model",
    like="clip_text_model",
    blocks={"vision": "encoder.layers"},
    embed="embeddings",
)
register_layer_map("clip", head="visual_projection text_projection classifier", scale="logit_scale")
register_layer_map("siglip_text_model", like="clip_text_model", head="head")
register_layer_map("siglip_vision_model", like="clip_vision_model", head="head")
register_layer_map("siglip", scale="logit_scale logit_bias", head="classifier")
for part in ("", "_text_model", "_vision_model"):
    register_layer_map(f"siglip2{part}", like=f"siglip{part}")
register_layer_map("blip_text_model", like="bert", blocks={"text": "encoder.layer"})
register_layer_map(
    "blip_vision_model",
    like="clip_vision_model",
    fused={"self_attn.qkv": thirds},
    out="self_attn.projection",
)
register_layer_map("blip", like="clip", head="itm_head vision_proj text_proj")
register_layer_map(
    "vision-text-dual-encoder", like="clip", towers={"vision_model": "vision", "text_model": "text"}
)

DUALS = {"clip": "CLIPModel", "vision-text-dual-encoder": "VisionTextDualEncoderModel"}
"""Dual encoders of images and texts: the transformers class by model type."""
TOWERS = {"text": "text_model", "vision": "vision_model"}
"""The submodule of each tower of a dual encoder, by stack."""
EMBEDDINGS = "embeddings"
"""The submodule of a tower that makes the input of its first block."""
RESIZED = frozenset({"clip_vision_model", "vit", "deit"})
"""Vision towers that need `interpolate_pos_encoding` for images of another size."""

# Our own: the prompts of a dual encoder, and their fusion
register_layer_map(
    "fedplan.models.prompts.DualPrompts",
    towers={"text": "text", "vision": "vision"},
    beside={"text": "text", "vision": "vision"},
    tags={"common": "common", "own": "own"},
    prompt="common own",
)
register_layer_map(
    "fedplan.models.prompts.DualFusion",
    towers={"text": "fusion", "vision": "fusion"},
    tags={"text": "text", "vision": "vision"},
    **_attention("{0}", "query key value out"),
    mlp="mlp",
    scale="gate",
)

# Decoders
register_layer_map(
    "gpt2",
    blocks={"decoder": "h"},
    fused={"attn.c_attn": thirds, "crossattention.c_attn": key_value},
    query="crossattention.q_attn",
    out="attn.c_proj crossattention.c_proj",
    mlp="mlp",
    cross="crossattention",
)
register_layer_map(
    "gpt_neox",
    blocks={"decoder": "layers"},
    fused={"attention.query_key_value": per_head},
    out="attention.dense",
    mlp="mlp",
)
register_layer_map(
    "bloom",
    blocks={"decoder": "h"},
    fused={"self_attention.query_key_value": per_head},
    out="self_attention.dense",
    mlp="mlp",
)
register_layer_map("falcon", like="bloom", fused={"self_attention.query_key_value": falcon})
register_layer_map(
    "mpt", blocks={"decoder": "blocks"}, fused={"attn.Wqkv": thirds}, out="attn.out_proj", mlp="ffn"
)
register_layer_map(
    "llama", blocks={"decoder": "layers"}, **_attention("self_attn.{0}_proj", "q k v o"), mlp="mlp"
)
LIKE_LLAMA = (
    *("mistral", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "smollm3", "gemma", "gemma2"),
    *("arcee", "cohere2", "ernie4_5", "glm", "glm4", "granite", "helium", "ministral"),
    *("ministral3", "olmo", "seed_oss", "starcoder2"),
)
for name in LIKE_LLAMA:
    register_layer_map(name, like="llama")
register_layer_map(
    "nemotron", like="llama", norm="input_layernorm post_attention_layernorm model.norm"
)
QK_NORMS = {"self_attn.q_norm": "query", "self_attn.k_norm": "key"}
for name in ("qwen3", "gemma3_text", "olmo2", "apertus", "cohere", "exaone4", "olmo3"):
    register_layer_map(name, like="llama", acts_on=QK_NORMS)
register_layer_map("qwen3_vl_text", like="qwen3")
register_layer_map(
    "hunyuan_v1_dense",
    like="llama",
    acts_on={"self_attn.query_layernorm": "query", "self_attn.key_layernorm": "key"},
)
LAYER_NORMS = {"self_attn.q_layernorm": "query", "self_attn.k_layernorm": "key"}
register_layer_map("stablelm", like="llama", acts_on=LAYER_NORMS)
register_layer_map(
    "persimmon",
    like="llama",
    fused={"self_attn.query_key_value": per_head},
    out="self_attn.dense",
    acts_on=LAYER_NORMS,
)
register_layer_map(
    "gptj", blocks={"decoder": "h"}, **_attention("attn.{0}_proj", "q k v out"), mlp="mlp"
)
register_layer_map("phi3", like="llama", fused={"self_attn.qkv_proj": grouped})
register_layer_map(
    "phi",
    like="llama",
    out="self_attn.dense",
    acts_on=LAYER_NORMS,
)

# Mixtures of experts; an expert that every token uses is mlp
register_layer_map("mixtral", like="llama", router="mlp.gate", expert="mlp.experts")
register_layer_map("qwen2_moe", like="mixtral")
register_layer_map("ernie4_5_moe", like="mixtral")
QK_NORMED = ("qwen3_moe", "olmoe", "qwen3_vl_moe_text", "glm4_moe", "dots1", "flex_olmo")
for name in QK_NORMED:
    register_layer_map(name, like="mixtral", acts_on=QK_NORMS)
register_layer_map(
    "hunyuan_v1_moe", like="hunyuan_v1_dense", router="mlp.gate", expert="mlp.experts"
)
register_layer_map("phimoe", like="mixtral", router="mlp.router")
register_layer_map(
    "granitemoe",
    like="llama",
    router="block_sparse_moe.router",
    expert="block_sparse_moe.experts",
)
register_layer_map("granitemoeshared", like="granitemoe", mlp="shared_mlp")
register_layer_map(
    "llama4_text",
    like="llama",
    mlp="feed_forward",
    router="feed_forward.router",
    expert="feed_forward.experts",
    head="lm_head",
)
register_layer_map("gpt_oss", like="mixtral", router="mlp.router", key="self_attn.sinks")
# The latent projection of key and value affects attention weights: it is key.
register_layer_map(
    "deepseek_v3",
    like="mixtral",
    query="self_attn.q_a_proj self_attn.q_b_proj",
    key="self_attn.kv_a_proj_with_mqa",
    fused={"self_attn.kv_b_proj": latent},
    acts_on={"self_attn.q_a_layernorm": "query", "self_attn.kv_a_layernorm": "key"},
)

register_layer_map("deepseek_v2", like="deepseek_v3")

# Images as tokens of a decoder
register_layer_map("llava", embed="multi_modal_projector")
for name in ("gemma3", "paligemma", "mistral3", "llama4", "internvl", "aya_vision"):
    register_layer_map(name, like="llava")
register_layer_map(
    "pixtral",
    blocks={"vision": "transformer.layers"},
    **_attention("attention.{0}_proj", "q k v o"),
    mlp="feed_forward",
    embed="patch_conv",
)
register_layer_map(
    "llama4_vision_model",
    like="clip_vision_model",
    blocks={"vision": "model.layers"},
    out="self_attn.o_proj",
    embed="patch_embedding class_embedding positional_embedding_vlm vision_adapter "
    "vision_adapter.mlp",
)
for name in ("idefics3", "smolvlm"):
    register_layer_map(name, embed="connector")
    register_layer_map(f"{name}_vision", like="clip_vision_model")
register_layer_map(
    "internvl_vision",
    like="dinov2",
    blocks={"vision": "encoder.layer"},
    scale="lambda_1 lambda_2",
    out="attention.projection_layer",
    acts_on={"attention.q_norm": "query", "attention.k_norm": "key"},
)
register_layer_map(
    "qwen2_vl_vision",
    blocks={"vision": "blocks"},
    fused={"attn.qkv": thirds},
    out="attn.proj",
    mlp="mlp",
    embed="patch_embed merger merger.mlp",
)
register_layer_map("qwen2_5_vl_vision", like="qwen2_vl_vision")
for name in ("qwen3_vl_vision", "qwen3_vl_moe_vision"):
    register_layer_map(
        name, like="qwen2_vl_vision", embed="patch_embed pos_embed merger deepstack_merger_list"
    )

# Encoder and decoder
register_layer_map(
    "t5",
    blocks={"encoder": "encoder.block", "decoder": "decoder.block"},
    **_attention("SelfAttention.{0} EncDecAttention.{0}", "q k v o"),
    position="relative_attention_bias",
    mlp="DenseReluDense",
    head="lm_head qa_outputs",
    cross="EncDecAttention",
)
register_layer_map(
    "bart",
    blocks={"encoder": "encoder.layers", "decoder": "decoder.layers"},
    **_attention("self_attn.{0}_proj encoder_attn.{0}_proj", "q k v out"),
    mlp="fc1 fc2",
    cross="encoder_attn",
)
for name in ("marian", "mbart", "m2m_100"):
    register_layer_map(name, like="bart")
register_layer_map("mt5", like="t5")
register_layer_map(
    "opt", like="bart", blocks={"decoder": "decoder.layers"}, embed="project_in", head="project_out"
)
register_layer_map(
    "whisper", like="bart", embed="conv1 conv2", head="projector classifier layer_weights"
)
register_layer_map(
    "detr",
    like="bart",
    out="self_attn.o_proj encoder_attn.o_proj",
    mlp="mlp",
    embed="backbone input_projection",
)

# Any two models joined: each is the stack of its position
for name in ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"):
    towers = {"encoder": "encoder", "decoder": "decoder"}
    register_layer_map(name, towers=towers, embed="enc_to_dec_proj")

for name, layer_map in LAYER_MAPS.items():
    if not name.startswith("fedplan."):
        LAYER_MAPS[name] = replace(layer_map, library="transformers")

# Plain torch. An adapter of peft on the attention module itself acts on its fused weight.
FUSED_NAMES = ("in_proj_weight", "in_proj_bias", "self_attn.weight", "multihead_attn.weight")
for name in ("EncoderLayer", "DecoderLayer"):
    register_layer_map(
        f"torch.nn.modules.transformer.Transformer{name}",
        fused=dict.fromkeys(FUSED_NAMES, thirds),
        query="q_proj_weight",
        key="k_proj_weight bias_k",
        value="v_proj_weight bias_v",
        out="self_attn.out_proj multihead_attn.out_proj",
        mlp="linear1 linear2",
        cross="multihead_attn",
    )
register_layer_map("torch.nn.modules.transformer.TransformerEncoder", blocks={"encoder": "layers"})
register_layer_map("torch.nn.modules.transformer.TransformerDecoder", blocks={"decoder": "layers"})

EAGER = "_attn_implementation"
"""The config attribute with the attention implementation, such as eager or sdpa."""
GIVES_ATTENTION = {"output_attentions": True, "need_weights": True, "average_attn_weights": False}
"""Keyword arguments with which attention modules return their probabilities."""
BRIDGE = "text_projection.weight"
"""The tensor of a bridge file that has the projection width of two joined towers."""
