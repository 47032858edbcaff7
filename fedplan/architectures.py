# SPDX-License-Identifier: Apache-2.0
"""The architectures that fedplan knows: the only file that spells names of other people's models.

Norms and embedding tables are told by their layer type, and what stands outside a Hugging Face
backbone is its head; a row says the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

from fedplan.anatomy import (
    Anatomy,
    Layout,
    falcon,
    grouped,
    key_value,
    path,
    per_head,
    thirds,
)
from fedplan.params import Kind

KNOWN: dict[str, Anatomy] = {}


def teach(
    name: str,
    *,
    like: str = "",
    blocks: Mapping[str, str] | None = None,
    fused: Mapping[str, Layout] | None = None,
    towers: Mapping[str, str] | None = None,
    cross: str = "",
    acts_on: Mapping[str, str] | None = None,
    tags: Mapping[str, str] | None = None,
    beside: Mapping[str, str] | None = None,
    **kinds: str,
) -> Anatomy:
    """Teach fedplan an architecture: a `config.model_type`, or the class name of a plain module.

    A class name may be given with its module, as in `torch.nn.modules.transformer.Transformer`.
    `blocks` says per stack where its list of blocks is; each further word is a kind. Either takes
    paths separated by spaces: several, or several spellings of one. `like` starts from another row.

    >>> row = teach("my_vit", like="vit", query="attn.to_q", key="attn.to_k", value="attn.to_v")
    """
    words = dict.fromkeys(cross.split(), "cross") | dict(tags or {})
    row = Anatomy(
        blocks=dict(blocks or {}),
        kinds={path(p): Kind(kind) for kind, paths in kinds.items() for p in paths.split()},
        fused={path(p): layout for p, layout in (fused or {}).items()},
        acts_on={path(p): Kind(kind) for p, kind in (acts_on or {}).items()},
        towers=dict(towers or {}),
        tags={path(p): tag for p, tag in words.items()},
        beside=dict(beside or {}),
    )
    KNOWN[name] = _over(KNOWN[like], row) if like else row
    return KNOWN[name]


def _over(old: Anatomy, new: Anatomy) -> Anatomy:
    """A row laid over another: what the new one says is added, or heard instead."""
    maps = [f.name for f in fields(Anatomy) if f.name != "of"]
    said = {name: getattr(old, name) | getattr(new, name) for name in maps}
    said["blocks"] = new.blocks or old.blocks
    return replace(new, **said)


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
teach("roberta", like="bert")
teach("xlm-roberta", like="bert")
teach("camembert", like="bert")
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
teach("dinov2", like="vit", scale="layer_scale1 layer_scale2")
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
teach("mistral", like="llama")
teach("qwen2", like="llama")
teach("qwen3", like="llama", acts_on={"self_attn.q_norm": "query", "self_attn.k_norm": "key"})
teach("gemma", like="llama")
teach("phi3", like="llama", fused={"self_attn.qkv_proj": grouped})

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
teach("whisper", like="bart", embed="conv1 conv2", head="projector classifier layer_weights")

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
