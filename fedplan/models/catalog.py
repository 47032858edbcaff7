# SPDX-License-Identifier: Apache-2.0
"""Models by name: folder, hub id, manifest or short name; their configs and params, no weights.

Only names that start with "hub:" may reach the network. A manifest is a JSON file with the params
of a model, to check plans without the model.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import UnknownModel
from fedplan.models.params import ITEMSIZE, Kind, Param, Params, Rows

if TYPE_CHECKING:
    from torch import nn


HUB_PREFIX = "hub:"
"""Prefix of hub ids; without it a name is a local path, so a mistyped path is never fetched."""


def is_hub_id(name: str) -> bool:
    """Whether a name is a hub id, as in hub:org/name."""
    return name.startswith(HUB_PREFIX)


def strip_hub_prefix(name: str) -> str:
    """A hub id without its prefix, as Hugging Face libraries take it; other names unchanged."""
    return name.removeprefix(HUB_PREFIX)


def load_pretrained(
    loader: Any, name: str, *, local_files_only: bool = False, **settings: Any
) -> Any:
    """Call `loader.from_pretrained` for a folder or hub id (hub:org/name); no remote code runs.

    Only a hub id may be downloaded, and not with `local_files_only`. Raises UnknownModel for a hub
    id that was not downloaded before, if the Hub cannot be reached. The loader's other exceptions
    pass, as OSError for a missing folder.
    """
    try:
        return loader.from_pretrained(
            strip_hub_prefix(name),
            local_files_only=local_files_only or not is_hub_id(name),
            trust_remote_code=False,
            **settings,
        )
    except OSError as error:
        from huggingface_hub.constants import HF_HUB_OFFLINE
        from huggingface_hub.errors import LocalEntryNotFoundError

        if not is_hub_id(name) or not isinstance(error.__cause__, LocalEntryNotFoundError):
            raise
        reason = "HF_HUB_OFFLINE is set" if HF_HUB_OFFLINE else "the Hub is not asked here"
        if not HF_HUB_OFFLINE and not local_files_only:
            reason = "the Hub cannot be reached"
        raise UnknownModel(
            f"{name!r} is not in this machine's cache, and {reason}: fetch it where there is a "
            f"network, by `hf download {strip_hub_prefix(name)}`, or give a model folder"
        ) from error


@contextmanager
def no_progress_bars() -> Generator[None]:
    """Context manager that disables the progress bars of transformers until exit."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


@contextmanager
def no_load_report() -> Generator[None]:
    """Context manager that disables transformers' report on values that a file does not have."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


_DEFAULTS = {f.name: f.default for f in fields(Param)}


def manifest_json(params: Params) -> str:
    """The params as a JSON list, one per line; fields with default values are left out."""
    lines = list[str]()
    for param in params:
        values = {f.name: getattr(param, f.name) for f in fields(Param)}
        values |= {"tags": sorted(param.tags), "on": sorted(param.on), "shape": list(param.shape)}
        values["rows"] = asdict(param.rows) if param.rows else None
        values |= {"tied": list(param.tied), "uncertain": sorted(param.uncertain)}
        kept = {k: v for k, v in values.items() if v not in (_DEFAULTS[k], []) or k == "shape"}
        lines.append(json.dumps(kept))
    return "[\n" + ",\n".join(lines) + "\n]\n"


def read_manifest(file: Path) -> Params:
    """Read the params of a manifest file, as written by `manifest_json`.

    Raises UnknownModel, with file and entry, if the file or a param is invalid.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnknownModel(f"{file} is not a manifest: {error}") from error
    if not isinstance(entries, list):
        raise UnknownModel(f"{file} is not a manifest: it is not a list of params")
    items: list[Any] = entries  # pyright: ignore[reportUnknownVariableType]
    params = tuple(_from_json(item, f"{file}, entry {i}") for i, item in enumerate(items))
    keys = [p.key for p in params]
    if len(set(keys)) < len(keys):
        raise UnknownModel(f"{file} is not a manifest: it has a param twice")
    if not sum(p.numel for p in params):
        raise UnknownModel(f"{file} is not a manifest: its params have no elements")
    return params


def _from_json(entry: Any, location: str) -> Param:
    try:
        values = dict(entry)
        rows = values.get("rows")
        values |= {
            "kind": Kind(values["kind"]),
            "shape": tuple(_require_size(size, "shape") for size in values["shape"]),
            "rows": None
            if rows is None
            else Rows(**{name: _require_size(value, name) for name, value in rows.items()}),
            "tags": frozenset(_require_strings(values.get("tags", []))),
            "on": frozenset(Kind(k) for k in values.get("on", [])),
            "tied": _require_strings(values.get("tied", [])),
            "uncertain": frozenset(_require_strings(values.get("uncertain", []))),
        }
        param = Param(**values)
        _require_strings([param.name, param.stack, param.dtype])
        block, depth = param.block, _require_size(param.depth, "depth")
        if not param.name or not param.name.isprintable():
            raise ValueError(f"name {param.name!r}")
        if param.dtype not in ITEMSIZE:
            raise ValueError(f"dtype {param.dtype!r}")
        if block is not None and _require_size(block, "block") >= depth:
            raise ValueError(f"block {block} of {depth}")
        if len(param.shape) > 16 or param.nbytes >= 2**62:
            raise ValueError(f"shape {param.shape}")
        part = param.rows
        if part and part.start + part.size > part.step:
            raise ValueError(f"rows {part}")
        if part and param.shape[part.dim : part.dim + 2] != (part.count, part.size):
            raise ValueError(f"rows {part} of shape {param.shape}")
        return param
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise UnknownModel(f"{location} is not a param: {error!r}") from error


def _require_size(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{name} {str(value)[:40]}")
    return value


def _require_strings(values: Any) -> tuple[str, ...]:
    if not all(type(v) is str for v in values):
        raise ValueError(f"strings {str(values)[:40]}")
    return tuple(values)


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
    "llama-3.1-8b": (
        "llama",
        "LlamaForCausalLM",
        {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
        | {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "llama-3.1-70b": (
        "llama",
        "LlamaForCausalLM",
        {"vocab_size": 128256, "hidden_size": 8192, "intermediate_size": 28672}
        | {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8},
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
    "image-multi-label": "AutoModelForImageClassification",
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
    labels of a classifier, `dtype` the dtype given to all params. Of a hub id only the config is
    downloaded. A manifest (.json) ignores `task` and `labels`. Raises UnknownModel for an unknown
    name, task or dtype.
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

    `task` and `num_labels` as in `params_of`. Raises UnknownModel for an unknown name or task.
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
    """Return (transformers config, usual class name or AutoModel); UnknownModel if unreadable."""
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
