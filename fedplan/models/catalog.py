# SPDX-License-Identifier: Apache-2.0
"""Catalog: a model's params by folder, hub id, manifest or short name, without its weights."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import UnknownModel
from fedplan.models.hub import fetched, is_hub_id
from fedplan.models.params import ITEMSIZE, Params
from fedplan.models.schema import read

if TYPE_CHECKING:
    from torch import nn

SHORT: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-base": ("bert", "BertForSequenceClassification", {}),
    "roberta-base": (
        "roberta",
        "RobertaForSequenceClassification",
        {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    ),
    "distilbert-base": ("distilbert", "DistilBertForSequenceClassification", {}),
    "minilm-l6": (
        "bert",
        "BertForSequenceClassification",
        {
            "hidden_size": 384,
            "num_hidden_layers": 6,
            "intermediate_size": 1536,
        },
    ),
    "modernbert-base": ("modernbert", "ModernBertForSequenceClassification", {}),
    "vit-base-16": ("vit", "ViTForImageClassification", {"num_labels": 10}),
    "vit-tiny-16": (
        "vit",
        "ViTForImageClassification",
        {
            "num_labels": 10,
            "hidden_size": 192,
            "num_attention_heads": 3,
            "intermediate_size": 768,
        },
    ),
    "dinov2-small": (
        "dinov2",
        "Dinov2ForImageClassification",
        {
            "num_labels": 10,
            "hidden_size": 384,
            "num_attention_heads": 6,
            "image_size": 518,
            "patch_size": 14,
        },
    ),
    "swin-tiny": (
        "swin",
        "SwinForImageClassification",
        {"num_labels": 10},
    ),
    "clip-vit-base-16": ("clip", "CLIPModel", {"vision_config": {"patch_size": 16}}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "t5-small": ("t5", "T5ForConditionalGeneration", {}),
    "llama-3.2-1b": (
        "llama",
        "LlamaForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "llama-2-7b": ("llama", "LlamaForCausalLM", {"vocab_size": 32000}),
}
"""Public configurations: the model type, the class with its usual head, and what differs."""

TASKS = {
    "backbone": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "multi-label": "AutoModelForSequenceClassification",
    "regression": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "image-classification": "AutoModelForImageClassification",
    "image-text": "AutoModel",
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "instruction": "AutoModelForCausalLM",
}

MANIFESTS = Path(__file__).parent / "schemas"
"""The params of the short names, written down: to read them takes neither torch nor seconds."""


def params_of(name: str, *, task: str = "", labels: int = 0, dtype: str = "float32") -> Params:
    """The params of a model that is only named.

    A hub id, as in hub:org/name, may fetch its configuration, never weights; anything else fetches
    nothing.
    """
    if dtype not in ITEMSIZE:
        raise UnknownModel(f"there is no dtype {dtype!r}; there are {', '.join(ITEMSIZE)}")
    written = Path(name) if name.endswith(".json") else MANIFESTS / f"{name}.json"
    if name.endswith(".json") or (name in SHORT and not task and not labels):
        params = read(written)
    else:
        from fedplan.models.description import describe

        params = describe(skeleton(name, task=task, labels=labels))
    return tuple(replace(p, dtype=dtype) for p in params)


def skeleton(name: str, *, task: str = "", labels: int = 0) -> nn.Module:
    """A model's structure on the meta device: every name and shape, and no memory."""
    import torch
    import transformers

    if task and task not in TASKS:
        raise UnknownModel(f"there is no task {task!r}; there are {', '.join(TASKS)}")
    config, usual = configuration(name)
    if labels:
        config.num_labels = labels
    loader = getattr(transformers, TASKS[task] if task else usual)
    with torch.device("meta"):
        return loader.from_config(config) if task or usual == "AutoModel" else loader(config)


def configuration(name: str) -> tuple[Any, str]:
    """The configuration that a name stands for, and the class that it is usually loaded with."""
    import transformers

    if name in SHORT:
        model_type, usual, settings = SHORT[name]
        return transformers.AutoConfig.for_model(model_type, **settings), usual
    if not Path(name, "config.json").is_file() and not is_hub_id(name):
        raise UnknownModel(_unknown(name))
    try:
        config = fetched(transformers.AutoConfig, name)
    except (OSError, ValueError) as error:
        raise UnknownModel(f"{name!r} cannot be read as a model: {_first_line(error)}") from error
    usual = str((config.architectures or ["AutoModel"])[0])
    return config, usual if usual in dir(transformers) else "AutoModel"


def _unknown(name: str) -> str:
    close = get_close_matches(name.lower(), SHORT, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return (
        f"{name!r} is not a folder with a config.json, a hub id as hub:org/name, or a short name: "
        f"{hint}Short names: {', '.join(SHORT)}"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]
