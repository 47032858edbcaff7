# SPDX-License-Identifier: Apache-2.0
"""The architectures that fedplan knows: the only file that spells names of other people's models.

Norms and embedding tables are told by their layer type, and what stands outside a Hugging Face
backbone is its head; a row says the rest.
"""

from __future__ import annotations

from dataclasses import replace

from fedplan.models.layouts import falcon, grouped, key_value, latent, per_head, thirds
from fedplan.models.teaching import KNOWN, teach

# Text encoders
teach(
    "bert",
    blocks={"encoder": "encoder.layer"},
    query="self.query",
    key="self.key",
    value="self.value",
    out="attention.output.dense crossattention.output.dense",
    mlp="intermediate.dense output.dense",
    head="pooler",
    cross="crossattention",
)
for name in ("roberta", "xlm-roberta", "camembert"):
    teach(name, like="bert")
teach("esm", like="bert", head="contact_head")
teach(
    "mpnet",
    like="bert",
    query="attn.q",
    key="attn.k",
    value="attn.v",
    out="attn.o",
    position="relative_attention_bias",
)
teach(
    "longformer",
    like="bert",
    query="self.query_global",
    key="self.key_global",
    value="self.value_global",
)
teach(
    "layoutlmv3",
    like="bert",
    position="rel_pos_bias rel_pos_x_bias rel_pos_y_bias",
    embed="cls_token pos_embed patch_embed",
)
teach("electra", like="bert", embed="embeddings_project")
teach(
    "albert",
    blocks={"encoder": "albert_layer_groups.*.albert_layers"},
    query="attention.query",
    key="attention.key",
    value="attention.value",
    out="attention.dense",
    mlp="ffn ffn_output",
    embed="embedding_hidden_mapping_in",
    head="pooler",
)
teach(
    "distilbert",
    blocks={"encoder": "transformer.layer"},
    query="attention.q_lin",
    key="attention.k_lin",
    value="attention.v_lin",
    out="attention.out_lin",
    mlp="ffn",
)
teach(
    "deberta-v2",
    like="bert",
    query="self.query_proj self.pos_query_proj",
    key="self.key_proj self.pos_key_proj",
    value="self.value_proj",
    position="encoder.rel_embeddings",
    embed="embed_proj",
    acts_on={"encoder.LayerNorm": "position"},
)
teach(
    "modernbert",
    blocks={"encoder": "layers"},
    fused={"attn.Wqkv": thirds},
    out="attn.Wo",
    mlp="mlp",
)

# Vision: the second names are those of transformers before 5.9 (DINOv2: before 5.18)
teach(
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
teach("deit", like="vit")
teach("vit_mae", like="vit")
teach("dinov2", like="vit", scale="layer_scale1 layer_scale2")
teach("dinov3_vit", like="dinov2", blocks={"vision": "model.layer"})
teach("beit", like="vit", scale="lambda_1 lambda_2", position="relative_position_bias")
teach(
    "swin",
    like="vit",
    blocks={"vision": "encoder.layers.*.blocks"},
    query="self.query",
    key="self.key",
    value="self.value",
    position="relative_position_bias self.relative_position_bias_table",
    embed="downsample",
)

# The reduced sequence is what tokens look at, and what they are passed: it is key.
teach(
    "segformer",
    like="vit",
    blocks={"vision": "stages.*.blocks"},
    key="attention.sequence_reduction",
    embed="patch_embeddings",
)

# Sound
teach(
    "wav2vec2",
    blocks={"encoder": "encoder.layers"},
    query="attention.q_proj",
    key="attention.k_proj",
    value="attention.v_proj",
    out="attention.out_proj",
    mlp="feed_forward",
    embed="masked_spec_embed feature_extractor feature_projection pos_conv_embed",
)
teach("hubert", like="wav2vec2")

# Two towers
teach(
    "clip_text_model",
    blocks={"text": "encoder.layers"},
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.out_proj",
    mlp="mlp",
)
teach(
    "clip_vision_model",
    like="clip_text_model",
    blocks={"vision": "encoder.layers"},
    embed="embeddings",
)
teach("clip", head="visual_projection text_projection classifier", scale="logit_scale")
teach("siglip_text_model", like="clip_text_model", head="head")
teach("siglip_vision_model", like="clip_vision_model", head="head")
teach("siglip", scale="logit_scale logit_bias", head="classifier")
for part in ("", "_text_model", "_vision_model"):
    teach(f"siglip2{part}", like=f"siglip{part}")
teach(
    "blip_text_model",
    like="bert",
    blocks={"text": "encoder.layer"},
)
teach(
    "blip_vision_model",
    like="clip_vision_model",
    fused={"self_attn.qkv": thirds},
    out="self_attn.projection",
)
teach("blip", like="clip", head="itm_head vision_proj text_proj")
teach(
    "vision-text-dual-encoder",
    like="clip",
    towers={"vision_model": "vision", "text_model": "text"},
)

DUALS = {"clip": "CLIPModel", "vision-text-dual-encoder": "VisionTextDualEncoderModel"}
"""Models of two towers that compare pictures with texts, and the class of each."""
TOWERS = {"text": "text_model", "vision": "vision_model"}
EMBEDDINGS = "embeddings"
RESIZED = frozenset({"clip_vision_model", "vit", "deit"})
"""Vision towers whose embeddings must be asked for pictures of another size."""

# Our own: prompts of two towers, and what fuses their levels
teach(
    "fedplan.models.prompts.DualPrompts",
    towers={"text": "text", "vision": "vision"},
    beside={"text": "text", "vision": "vision"},
    tags={"common": "common", "own": "own"},
    prompt="common own",
)
teach(
    "fedplan.models.fusion.DualFusion",
    towers={"text": "fusion", "vision": "fusion"},
    tags={"text": "text", "vision": "vision"},
    query="query",
    key="key",
    value="value",
    out="out",
    mlp="mlp",
    scale="gate",
)

# Decoders
teach(
    "gpt2",
    blocks={"decoder": "h"},
    fused={"attn.c_attn": thirds, "crossattention.c_attn": key_value},
    query="crossattention.q_attn",
    out="attn.c_proj crossattention.c_proj",
    mlp="mlp",
    cross="crossattention",
)
teach(
    "gpt_neox",
    blocks={"decoder": "layers"},
    fused={"attention.query_key_value": per_head},
    out="attention.dense",
    mlp="mlp",
)
teach(
    "bloom",
    blocks={"decoder": "h"},
    fused={"self_attention.query_key_value": per_head},
    out="self_attention.dense",
    mlp="mlp",
)
teach("falcon", like="bloom", fused={"self_attention.query_key_value": falcon})
teach(
    "mpt",
    blocks={"decoder": "blocks"},
    fused={"attn.Wqkv": thirds},
    out="attn.out_proj",
    mlp="ffn",
)
teach(
    "llama",
    blocks={"decoder": "layers"},
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.o_proj",
    mlp="mlp",
)
for name in ("mistral", "qwen2", "qwen2_vl_text", "qwen2_5_vl_text", "smollm3", "gemma", "gemma2"):
    teach(name, like="llama")
NORMED = {"self_attn.q_norm": "query", "self_attn.k_norm": "key"}
for name in ("qwen3", "gemma3_text", "olmo2"):
    teach(name, like="llama", acts_on=NORMED)
teach("phi3", like="llama", fused={"self_attn.qkv_proj": grouped})
teach(
    "phi",
    like="llama",
    out="self_attn.dense",
    acts_on={"self_attn.q_layernorm": "query", "self_attn.k_layernorm": "key"},
)

# Mixtures of experts; an expert that every token uses is mlp
teach("mixtral", like="llama", router="mlp.gate", expert="mlp.experts")
teach("qwen2_moe", like="mixtral")
for name in ("qwen3_moe", "olmoe"):
    teach(name, like="mixtral", acts_on=NORMED)
teach("gpt_oss", like="mixtral", router="mlp.router", key="self_attn.sinks")
# What key and value are both pressed into decides who attends to whom: it is key.
teach(
    "deepseek_v3",
    like="mixtral",
    query="self_attn.q_a_proj self_attn.q_b_proj",
    key="self_attn.kv_a_proj_with_mqa",
    fused={"self_attn.kv_b_proj": latent},
    acts_on={"self_attn.q_a_layernorm": "query", "self_attn.kv_a_layernorm": "key"},
)

# Pictures as tokens of a decoder
teach("llava", embed="multi_modal_projector")
teach("gemma3", like="llava")
teach(
    "qwen2_vl_vision",
    blocks={"vision": "blocks"},
    fused={"attn.qkv": thirds},
    out="attn.proj",
    mlp="mlp",
    embed="patch_embed merger merger.mlp",
)
teach("qwen2_5_vl_vision", like="qwen2_vl_vision")

# Encoder and decoder
teach(
    "t5",
    blocks={"encoder": "encoder.block", "decoder": "decoder.block"},
    query="SelfAttention.q EncDecAttention.q",
    key="SelfAttention.k EncDecAttention.k",
    value="SelfAttention.v EncDecAttention.v",
    out="SelfAttention.o EncDecAttention.o",
    position="relative_attention_bias",
    mlp="DenseReluDense",
    head="lm_head qa_outputs",
    cross="EncDecAttention",
)
teach(
    "bart",
    blocks={"encoder": "encoder.layers", "decoder": "decoder.layers"},
    query="self_attn.q_proj encoder_attn.q_proj",
    key="self_attn.k_proj encoder_attn.k_proj",
    value="self_attn.v_proj encoder_attn.v_proj",
    out="self_attn.out_proj encoder_attn.out_proj",
    mlp="fc1 fc2",
    cross="encoder_attn",
)
for name in ("marian", "mbart", "m2m_100"):
    teach(name, like="bart")
teach("mt5", like="t5")
teach(
    "opt",
    like="bart",
    blocks={"decoder": "decoder.layers"},
    embed="project_in",
    head="project_out",
)
teach("whisper", like="bart", embed="conv1 conv2", head="projector classifier layer_weights")
teach(
    "detr",
    like="bart",
    out="self_attn.o_proj encoder_attn.o_proj",
    mlp="mlp",
    embed="backbone input_projection",
)

# Whatever two models are joined: each is the stack that its place says
for name in ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder"):
    towers = {"encoder": "encoder", "decoder": "decoder"}
    teach(name, towers=towers, embed="enc_to_dec_proj")

for name, row in KNOWN.items():
    if not name.startswith("fedplan."):
        KNOWN[name] = replace(row, of="transformers")

# Plain torch. An adapter of peft on the attention itself acts on its packed weight.
PACKED = ("in_proj_weight", "in_proj_bias", "self_attn.weight", "multihead_attn.weight")
for name in ("EncoderLayer", "DecoderLayer"):
    teach(
        f"torch.nn.modules.transformer.Transformer{name}",
        fused=dict.fromkeys(PACKED, thirds),
        query="q_proj_weight",
        key="k_proj_weight bias_k",
        value="v_proj_weight bias_v",
        out="self_attn.out_proj multihead_attn.out_proj",
        mlp="linear1 linear2",
        cross="multihead_attn",
    )
teach("torch.nn.modules.transformer.TransformerEncoder", blocks={"encoder": "layers"})
teach("torch.nn.modules.transformer.TransformerDecoder", blocks={"decoder": "layers"})

EAGER = "_attn_implementation"
GIVES_ATTENTION = {"output_attentions": True, "need_weights": True, "average_attn_weights": False}
"""What to say to an attention module that gives its probabilities only if it is asked."""
BRIDGE = "text_projection.weight"
