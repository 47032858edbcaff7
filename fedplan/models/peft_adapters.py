# SPDX-License-Identifier: Apache-2.0
"""Adding, loading, saving and merging adapters of peft.

Weights are read from safetensors only; peft itself would also read pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fedplan.errors import UnknownAdapter
from fedplan.models.adapter_tensors import (
    FAMILIES,
    adapter_families,
    find_adapter_tensor,
    merge_adapters,
)
from fedplan.models.hub import is_hub_id, strip_hub_prefix
from fedplan.models.params import Kind
from fedplan.models.quantized import dequantize, is_quantized

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("lora", {"use_dora": True}),
    "prefix": ("prefix_tuning", {}),
    "prompt": ("prompt_tuning", {}),
}
"""Further names of adapters: the family and its settings."""
TASK_TYPES = {
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}
"""peft's task type by the transformers class that loads a model; None for other classes."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files in the folder of an adapter."""

_RESERVED = frozenset(
    ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path")
) | {"revision", "inference_mode", "megatron_core", "megatron_config", "tokenizer_name_or_path"}
_PROMPTS = "prompt_embeddings"
_LORA_INITS = (True, False, "gaussian", "orthogonal")


def adapter_family(name: str) -> tuple[str, dict[str, Any]]:
    """The family of an adapter name, and its preset settings; raises UnknownAdapter if none."""
    names = {**{family: (family, dict[str, Any]()) for family in FAMILIES}, **ALIASES}
    if name not in names:
        close = get_close_matches(name.lower(), names, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownAdapter(
            f"there is no adapter {name!r}: {hint}There are {', '.join(sorted(names))}"
        )
    return names[name]


def make_peft_config(name: str, settings: Mapping[str, Any], loader: str = "") -> Any:
    """The config object of peft for an adapter name, with settings.

    `loader` is the transformers class that loads the model; peft's task type follows from it.
    Raises UnknownAdapter for an unknown name or setting.
    """
    family, preset = adapter_family(name)
    classes = {k.value.lower(): each for k, each in _peft().PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if family not in classes:
        raise UnknownAdapter(f"this version of peft has no {family}: install a later one")
    _require_settings(name, settings, {f.name for f in fields(classes[family])} - _RESERVED)
    _require_lora_init(name, settings.get("init_lora_weights", True))
    return classes[family](task_type=TASK_TYPES.get(loader), **{**preset, **settings})


def _require_lora_init(name: str, init: object) -> None:
    """Raise UnknownAdapter if an init_lora_weights would change the model's own weights."""
    if init not in _LORA_INITS:
        raise UnknownAdapter(
            f"{name} with init_lora_weights = {init!r} changes the model's own weights, so the "
            "adapter alone would be useless: leave it out"
        )


def _require_settings(name: str, settings: Mapping[str, Any], allowed: set[str]) -> None:
    """Raise UnknownAdapter for a setting that is not allowed, with similar ones."""
    for setting in settings.keys() - allowed:
        close = get_close_matches(setting, allowed, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownAdapter(
            f"{name} has no setting {setting!r}: {hint}It has {', '.join(sorted(allowed))}"
        )


def add_adapter(model: nn.Module, config: Any) -> nn.Module:
    """Wrap a model with a newly initialized adapter; raises UnknownAdapter if it has one."""
    if families := adapter_families(model):
        raise UnknownAdapter(f"the model already has an adapter, of peft's {', '.join(families)}")
    return _peft().get_peft_model(model, config)


def load_adapter(model: nn.Module, name: str) -> nn.Module:
    """Wrap a model with a saved adapter from a folder or hub:org/name, to train it further.

    Raises UnknownAdapter if it is no supported adapter, or does not fit the model.
    """
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    peft = _peft()
    folder = _download(name) if is_hub_id(name) else Path(name)
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise UnknownAdapter(f"{name!r} is no adapter: there is no {file} in it")
    config = peft.PeftConfig.from_pretrained(str(folder))
    _require_trainable_adapter(config, name)
    _require_lora_init(repr(name), getattr(config, "init_lora_weights", True))
    config.inference_mode = False
    adapted = add_adapter(model, config)
    keys = peft.set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
    unexpected = sorted({*keys.unexpected_keys} - {_PROMPTS})
    if wrong := unexpected + _missing_tensors(adapted, keys.missing_keys):
        raise UnknownAdapter(f"the adapter {name!r} does not fit this model: see {wrong[0]!r}")
    return adapted


def _download(name: str) -> Path:
    import huggingface_hub

    download = cast("Any", huggingface_hub).snapshot_download
    return Path(download(strip_hub_prefix(name), allow_patterns=[CONFIG, WEIGHTS]))


def _require_trainable_adapter(config: Any, name: str) -> None:
    """Raise UnknownAdapter for an unsupported family, or one saved without its encoder."""
    family = str(config.peft_type.value).lower()
    if family not in FAMILIES:
        raise UnknownAdapter(
            f"{name!r} is an adapter of peft's {family}, which fedplan does not train: use one of "
            f"{', '.join(FAMILIES)}"
        )
    if family == "p_tuning" or (family == "prefix_tuning" and config.prefix_projection):
        raise UnknownAdapter(
            f"{name!r} was saved as the output of its {family} encoder, without the encoder, so it "
            "cannot be trained further: use prompt_tuning, or prefix_tuning without "
            "prefix_projection"
        )


def _missing_tensors(model: nn.Module, missing_keys: Iterable[str]) -> list[str]:
    """The first name of each adapter tensor, prompts excepted, all of whose names are missing."""
    modules, missing = dict(model.named_modules()), set(missing_keys)
    names = dict[Tensor, list[str]]()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        adapter = find_adapter_tensor(modules, name) if tensor.requires_grad else None
        if adapter is not None and adapter.kind is not Kind.PROMPT:
            names.setdefault(tensor, []).append(name)
    return [each[0] for each in names.values() if missing.issuperset(each)]


def save_adapter(model: nn.Module, folder: Path, trained: Iterable[str] = ()) -> None:
    """Save the adapter of a model alone, as peft loads it.

    `trained` are the names of all tensors that training changed; raises UnknownAdapter if one does
    not belong to the adapter, or if there is no adapter.
    """
    if not adapter_families(model):
        raise UnknownAdapter("the model has no adapter: export the whole model")
    modules = dict(model.named_modules())
    for name in trained:
        if find_adapter_tensor(modules, name) is None and "modules_to_save" not in name.split("."):
            raise UnknownAdapter(
                f"{name!r} was trained too and is not in the adapter: export the whole model; or, "
                "in another run, freeze it, or name its layer in model.adapter.modules_to_save"
            )
    cast("Any", model).save_pretrained(folder)


def merge_and_dequantize(model: nn.Module) -> nn.Module:
    """The model with float weights and without adapters: dequantized, then adapters merged.

    Raises UnknownAdapter if the adapters cannot be merged.
    """
    # Merging into packed weights would round them once more.
    if not is_quantized(model):
        return merge_adapters(model)
    if not adapter_families(model):
        return dequantize(model)
    peft, adapted = _peft(), cast("Any", model)
    config = adapted.peft_config[adapted.active_adapter]
    values = peft.get_peft_model_state_dict(adapted)
    float_model = add_adapter(dequantize(adapted.unload()), config)
    peft.set_peft_model_state_dict(float_model, values)
    return merge_adapters(float_model)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UnknownAdapter("adapters need peft: pip install fedplan[lora]") from error
    return peft
