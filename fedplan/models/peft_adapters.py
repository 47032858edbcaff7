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


def adapter_family(name: str) -> tuple[str, dict[str, Any]]:
    """Return (family, preset settings) of an adapter name, a key of FAMILIES or ALIASES.

    Raises UnknownAdapter for another name, with similar names.
    """
    names = {**{family: (family, dict[str, Any]()) for family in FAMILIES}, **ALIASES}
    if name not in names:
        close = get_close_matches(name.lower(), names, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownAdapter(
            f"there is no adapter {name!r}: {hint}There are {', '.join(sorted(names))}"
        )
    return names[name]


def make_peft_config(name: str, settings: Mapping[str, Any], loader: str = "") -> Any:
    """The config object of peft for an adapter name, as "lora", with settings.

    `settings` are fields of that config. `loader` is the name of the transformers class that loads
    the model, a key of TASK_TYPES; for other names peft's task type is None. Raises UnknownAdapter
    for an unknown name or setting, for an init_lora_weights that would change the model's own
    weights, and if peft is missing or too old.
    """
    family, preset = adapter_family(name)
    classes = {k.value.lower(): each for k, each in _peft().PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if family not in classes:
        raise UnknownAdapter(f"this version of peft has no {family}: install a later one")
    allowed = {f.name for f in fields(classes[family])} - _RESERVED
    for setting in settings.keys() - allowed:
        close = get_close_matches(setting, allowed, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownAdapter(
            f"{name} has no setting {setting!r}: {hint}It has {', '.join(sorted(allowed))}"
        )
    _require_lora_init(name, settings.get("init_lora_weights", True))
    return classes[family](task_type=TASK_TYPES.get(loader), **{**preset, **settings})


def _require_lora_init(name: str, init: object) -> None:
    """Raise UnknownAdapter, with `name`, if `init` would change the model's own weights."""
    if init not in (True, False, "gaussian", "orthogonal"):
        raise UnknownAdapter(
            f"{name} with init_lora_weights = {init!r} changes the model's own weights, so the "
            "adapter alone would be useless: leave it out"
        )


def add_adapter(model: nn.Module, config: Any) -> nn.Module:
    """Wrap a model, in place, with a newly initialized adapter, and return the PeftModel.

    `config` is made by `make_peft_config`. Raises UnknownAdapter if the model has an adapter.
    """
    if families := adapter_families(model):
        raise UnknownAdapter(f"the model already has an adapter, of peft's {', '.join(families)}")
    return _peft().get_peft_model(model, config)


def load_adapter(model: nn.Module, name: str) -> nn.Module:
    """Wrap a model, in place, with a saved adapter to train further, and return the PeftModel.

    `name` is a folder or a hub id (hub:org/name, may download). Only safetensors are read. Raises
    UnknownAdapter if a file is missing, the family is unsupported, the folder has only the output
    of a prompt encoder (p_tuning, or prefix_tuning with prefix_projection), init_lora_weights
    changes the model's own weights, the model has an adapter, or tensors are missing or unexpected.
    """
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    peft = _peft()
    folder = Path(name)
    if is_hub_id(name):
        import huggingface_hub

        download = cast("Any", huggingface_hub).snapshot_download
        folder = Path(download(strip_hub_prefix(name), allow_patterns=[CONFIG, WEIGHTS]))
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise UnknownAdapter(f"{name!r} is no adapter: there is no {file} in it")
    config = peft.PeftConfig.from_pretrained(str(folder))
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
    _require_lora_init(repr(name), getattr(config, "init_lora_weights", True))
    config.inference_mode = False
    adapted = add_adapter(model, config)
    keys = peft.set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
    unexpected = sorted({*keys.unexpected_keys} - {"prompt_embeddings"})
    if wrong := unexpected + _missing_tensors(adapted, keys.missing_keys):
        raise UnknownAdapter(f"the adapter {name!r} does not fit this model: see {wrong[0]!r}")
    return adapted


def _missing_tensors(model: nn.Module, missing_keys: Iterable[str]) -> list[str]:
    """The first name of each trainable adapter tensor of a model that was not loaded.

    A tensor was not loaded if all its names are in `missing_keys`. Prompts are not checked.
    """
    modules, missing = dict(model.named_modules()), set(missing_keys)
    names = dict[Tensor, list[str]]()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        adapter = find_adapter_tensor(modules, name) if tensor.requires_grad else None
        if adapter is not None and adapter.kind is not Kind.PROMPT:
            names.setdefault(tensor, []).append(name)
    return [each[0] for each in names.values() if missing.issuperset(each)]


def save_adapter(model: nn.Module, folder: Path, trained: Iterable[str] = ()) -> None:
    """Save only the adapter of a model into a folder, by peft's save_pretrained.

    `trained` are the names of all tensors that training changed. Raises UnknownAdapter, before
    anything is written, if a trained tensor is not in the adapter, or the model has no adapter.
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

    May change the model in place. A model without packed weights and adapters is returned
    unchanged. Raises UnknownAdapter if the adapters cannot be merged.
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
