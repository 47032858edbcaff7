# SPDX-License-Identifier: Apache-2.0
"""Tiny models of every supported architecture, built from configurations: one row each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as hf
from torch import Tensor, nn

import fedplan

Inputs = dict[str, Tensor]

TEXT: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "num_channels": 3,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}


def tokens() -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {"input_ids": torch.randint(3, 60, (2, 8), generator=generator)}


def pixels() -> Inputs:
    return {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))}


def both() -> Inputs:
    return tokens() | pixels()


def pairs() -> Inputs:
    return tokens() | {"decoder_input_ids": tokens()["input_ids"][:, :5]}


def sound() -> Inputs:
    features = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": tokens()["input_ids"][:, :5]}


class Torch(nn.Module):
    """A classifier on torch's own encoder, whose attention packs query, key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(input_ids)))


def towers(name: str, **extra: Any) -> hf.PreTrainedModel:
    config = getattr(hf, f"{name}Config")(
        text_config={**TEXT, **extra}, vision_config=VISION, projection_dim=16
    )
    return getattr(hf, f"{name}Model")(config)


def dual() -> hf.PreTrainedModel:
    config = hf.VisionTextDualEncoderConfig.from_vision_text_configs(
        hf.ViTConfig(**VISION), hf.BertConfig(**TEXT), projection_dim=16
    )
    return hf.VisionTextDualEncoderModel(config)


def of(model: str, config: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(hf, model)(getattr(hf, config)(**settings))


SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 8,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 4,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FALCON = {**TEXT, "alibi": False}
FALCON.pop("intermediate_size")

ROWS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Inputs]]] = {
    "bert": (of("BertForSequenceClassification", "BertConfig", **TEXT), tokens),
    "bert-mlm": (of("BertForMaskedLM", "BertConfig", **TEXT), tokens),
    "roberta": (of("RobertaForTokenClassification", "RobertaConfig", **TEXT), tokens),
    "distilbert": (
        of(
            "DistilBertForSequenceClassification",
            "DistilBertConfig",
            vocab_size=64,
            dim=16,
            n_layers=2,
            n_heads=4,
            hidden_dim=24,
            max_position_embeddings=32,
        ),
        tokens,
    ),
    "electra": (
        of("ElectraForSequenceClassification", "ElectraConfig", embedding_size=12, **TEXT),
        tokens,
    ),
    "albert": (
        of("AlbertForSequenceClassification", "AlbertConfig", embedding_size=12, **TEXT),
        tokens,
    ),
    "deberta-v2": (
        of(
            "DebertaV2ForSequenceClassification",
            "DebertaV2Config",
            relative_attention=True,
            pos_att_type=["p2c", "c2p"],
            position_buckets=4,
            max_relative_positions=8,
            share_att_key=False,
            norm_rel_ebd="layer_norm",
            **TEXT,
        ),
        tokens,
    ),
    "modernbert": (
        of(
            "ModernBertForSequenceClassification",
            "ModernBertConfig",
            cls_token_id=1,
            sep_token_id=2,
            **TEXT,
        ),
        tokens,
    ),
    "vit": (of("ViTForImageClassification", "ViTConfig", **VISION), pixels),
    "deit": (of("DeiTForImageClassification", "DeiTConfig", **VISION), pixels),
    "dinov2": (of("Dinov2ForImageClassification", "Dinov2Config", mlp_ratio=2, **VISION), pixels),
    "beit": (
        of(
            "BeitForImageClassification",
            "BeitConfig",
            use_relative_position_bias=True,
            use_absolute_position_embeddings=True,
            **VISION,
        ),
        pixels,
    ),
    "swin": (of("SwinForImageClassification", "SwinConfig", **SWIN), pixels),
    "clip": (lambda: towers("CLIP"), both),
    "siglip": (lambda: towers("Siglip"), both),
    "dual": (dual, both),
    "gpt2": (of("GPT2LMHeadModel", "GPT2Config", **GPT2), tokens),
    "gpt-neox": (of("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT), tokens),
    "falcon": (of("FalconForCausalLM", "FalconConfig", multi_query=True, **FALCON), tokens),
    "falcon-heads": (
        of("FalconForCausalLM", "FalconConfig", multi_query=False, bias=True, **FALCON),
        tokens,
    ),
    "falcon-groups": (
        of(
            "FalconForCausalLM",
            "FalconConfig",
            new_decoder_architecture=True,
            num_kv_heads=2,
            **FALCON,
        ),
        tokens,
    ),
    "bloom": (
        of("BloomForCausalLM", "BloomConfig", vocab_size=64, hidden_size=16, n_layer=2, n_head=4),
        tokens,
    ),
    "mpt": (
        of(
            "MptForCausalLM",
            "MptConfig",
            d_model=16,
            n_heads=4,
            n_layers=2,
            vocab_size=64,
            max_seq_len=32,
            expansion_ratio=2,
        ),
        tokens,
    ),
    "phi3": (of("Phi3ForCausalLM", "Phi3Config", **GROUPED), tokens),
    "llama": (of("LlamaForCausalLM", "LlamaConfig", **GROUPED), tokens),
    "mistral": (of("MistralForCausalLM", "MistralConfig", **GROUPED), tokens),
    "qwen3": (of("Qwen3ForCausalLM", "Qwen3Config", head_dim=4, **GROUPED), tokens),
    "gemma": (of("GemmaForCausalLM", "GemmaConfig", head_dim=4, **GROUPED), tokens),
    "t5": (
        of(
            "T5ForConditionalGeneration",
            "T5Config",
            vocab_size=64,
            d_model=16,
            d_kv=4,
            d_ff=24,
            num_layers=2,
            num_heads=4,
        ),
        pairs,
    ),
    "bart": (
        of(
            "BartForConditionalGeneration",
            "BartConfig",
            vocab_size=64,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            max_position_embeddings=32,
        ),
        pairs,
    ),
    "whisper": (
        of(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            vocab_size=64,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=24,
            decoder_ffn_dim=24,
            num_mel_bins=8,
            max_source_positions=16,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        sound,
    ),
    "torch": (Torch, tokens),
}


ARCHITECTURES = tuple(ROWS)
FUSED = (
    *("modernbert", "gpt2", "gpt-neox", "falcon", "falcon-heads", "falcon-groups"),
    *("bloom", "mpt", "phi3", "torch"),
)

fedplan.register_layer_map("Torch", embed="embed", head="head")


def build(name: str, seed: int = 0) -> nn.Module:
    """A tiny model in evaluation mode, with attention that can be looked at."""
    torch.manual_seed(seed)
    model = ROWS[name][0]().eval()
    if isinstance(model, hf.PreTrainedModel):
        model.set_attn_implementation("eager")
    return model


def feed(name: str) -> Inputs:
    """A small batch for a model."""
    return ROWS[name][1]()


def with_lora(name: str) -> nn.Module:
    """A tiny model with LoRA on its attention and feed-forward layers, its classifier saved."""
    model = build(name)
    hosts = {
        p.name.rpartition(".")[0]
        for p in fedplan.describe(model)
        if p.block_id and p.kind in ("query", "key", "value", "mlp")
    }
    saved = ["classifier"] if "classifier" in dict(model.named_children()) else None
    config = peft.LoraConfig(r=2, target_modules=sorted(hosts), modules_to_save=saved)
    return peft.get_peft_model(model, config).eval()


def loss(output: Any) -> Tensor:
    """A number that depends on everything that a model returns."""
    if isinstance(output, Tensor):
        return output.double().square().mean()
    values = output.values() if isinstance(output, dict) else output
    found = [v for v in values if isinstance(v, Tensor | dict | tuple) and len(v) > 0]
    return torch.stack([loss(v) for v in found if not _whole_numbers(v)]).sum()


def _whole_numbers(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()
