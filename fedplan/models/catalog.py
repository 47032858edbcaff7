# SPDX-License-Identifier: Apache-2.0
"""Params and configs of models by name: folder, hub id, manifest or short name; no weights."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import UnknownModel
from fedplan.models.hub import is_hub_id, load_pretrained
from fedplan.models.manifest import read_manifest
from fedplan.models.params import ITEMSIZE, Params

if TYPE_CHECKING:
    from torch import nn

SHORT_NAMES: dict[str, tuple[str, str, dict[str, Any]]] = {
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
        {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536},
    ),
    "modernbert-base": ("modernbert", "ModernBertForSequenceClassification", {}),
    "vit-base-16": ("vit", "ViTForImageClassification", {"num_labels": 10}),
    "vit-tiny-16": (
        "vit",
        "ViTForImageClassification",
        {"num_labels": 10, "hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768},
    ),
    "dinov2-small": (
        "dinov2",
        "Dinov2ForImageClassification",
        {"num_labels": 10, "hidden_size": 384, "num_attention_heads": 6}
        | {"image_size": 518, "patch_size": 14},
    ),
    "swin-tiny": ("swin", "SwinForImageClassification", {"num_labels": 10}),
    "clip-vit-base-16": ("clip", "CLIPModel", {"vision_config": {"patch_size": 16}}),
    "gpt2": ("gpt2", "GPT2LMHeadModel", {}),
    "t5-small": ("t5", "T5ForConditionalGeneration", {}),
    "llama-3.2-1b": (
        "llama",
        "LlamaForCausalLM",
        {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192}
        | {"num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8}
        | {"head_dim": 64, "tie_word_embeddings": True},
    ),
    "llama-2-7b": ("llama", "LlamaForCausalLM", {"vocab_size": 32000}),
}
"""Short names of public models: model type, class with its usual head, config settings."""

TASK_CLASSES = {
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
"""The transformers class that loads a model for a task."""

MANIFEST_FOLDER = Path(__file__).parent / "schemas"
"""The manifests of the short names, which can be read quickly and without torch."""


def params_of(name: str, *, task: str = "", labels: int = 0, dtype: str = "float32") -> Params:
    """The params of a model by name: a folder, hub:org/name, a manifest file or a short name.

    `task` is one of TASK_CLASSES (default: the usual class of the model), `labels` the number of
    labels of a classifier (default: as in the config), `dtype` the dtype given to all params. A hub
    id downloads the config, nothing else is downloaded; weights are never loaded. A manifest file
    (.json) ignores `task` and `labels`. Raises UnknownModel for an unknown name, task or dtype.
    """
    if dtype not in ITEMSIZE:
        raise UnknownModel(f"there is no dtype {dtype!r}; there are {', '.join(ITEMSIZE)}")
    manifest = Path(name) if name.endswith(".json") else MANIFEST_FOLDER / f"{name}.json"
    if name.endswith(".json") or (name in SHORT_NAMES and not task and not labels):
        params = read_manifest(manifest)
    else:
        from fedplan.models.description import describe

        params = describe(meta_model(name, task=task, num_labels=labels))
    return tuple(replace(p, dtype=dtype) for p in params)


def meta_model(name: str, *, task: str = "", num_labels: int = 0) -> nn.Module:
    """A model on the meta device, without weights, by folder, hub:org/name or short name.

    `task` is one of TASK_CLASSES (default: the usual class of the model); `num_labels` replaces the
    number of labels in the config, 0 does not. Raises UnknownModel for an unknown name or task.
    """
    import torch
    import transformers

    if task and task not in TASK_CLASSES:
        raise UnknownModel(f"there is no task {task!r}; there are {', '.join(TASK_CLASSES)}")
    config, usual_class = load_model_config(name)
    if num_labels:
        config.num_labels = num_labels
    loader = getattr(transformers, TASK_CLASSES[task] if task else usual_class)
    with torch.device("meta"):
        if task or usual_class == "AutoModel":
            return loader.from_config(config)
        return loader(config)


def load_model_config(name: str) -> tuple[Any, str]:
    """Return (transformers config, usual class name) of a folder, hub:org/name or short name.

    The class is that of SHORT_NAMES, or else the first of the config's `architectures`; AutoModel
    if transformers has no such class. Raises UnknownModel for an unknown name, or if the config
    cannot be read.
    """
    import transformers

    if name in SHORT_NAMES:
        model_type, usual_class, settings = SHORT_NAMES[name]
        return transformers.AutoConfig.for_model(model_type, **settings), usual_class
    if not Path(name, "config.json").is_file() and not is_hub_id(name):
        close = get_close_matches(name.lower(), SHORT_NAMES, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownModel(
            f"{name!r} is not a folder with a config.json, a hub id as hub:org/name, or a short "
            f"name: {hint}Short names: {', '.join(SHORT_NAMES)}"
        )
    try:
        config = load_pretrained(transformers.AutoConfig, name)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UnknownModel(f"{name!r} cannot be read as a model: {reason}") from error
    usual_class = str((config.architectures or ["AutoModel"])[0])
    return config, usual_class if usual_class in dir(transformers) else "AutoModel"
