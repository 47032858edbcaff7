# SPDX-License-Identifier: Apache-2.0
"""Grafting: an adapter by its name in peft put on a model, read from a folder, and written alone.

Weights are read from safetensors, by ourselves: peft would also read what was pickled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fedplan.errors import UnknownAdapter
from fedplan.models.adapters import FAMILIES, families_in, graft_of, merged
from fedplan.models.hub import bare, is_hub_id
from fedplan.models.params import Kind
from fedplan.models.quantised import dequantised, is_quantised

ALIASES: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("lora", {"use_dora": True}),
    "prefix": ("prefix_tuning", {}),
    "prompt": ("prompt_tuning", {}),
}
"""Further names of adapters: the family, and what it is told."""
TASK_TYPES = {
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
    "AutoModelForCausalLM": "CAUSAL_LM",
    "AutoModelForSeq2SeqLM": "SEQ_2_SEQ_LM",
    "AutoModelForQuestionAnswering": "QUESTION_ANS",
}
"""What peft calls the task of a model, by the class that loads it; other classes have no word."""
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What the folder of an adapter holds."""

_OURS = frozenset(
    ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path")
) | {"revision", "inference_mode", "megatron_core", "megatron_config", "tokenizer_name_or_path"}
_PROMPTS = "prompt_embeddings"
_STARTS = (True, False, "gaussian", "orthogonal")


def family_named(name: str) -> tuple[str, dict[str, Any]]:
    """The family that a name stands for, and what it is told besides."""
    known = {**{family: (family, dict[str, Any]()) for family in FAMILIES}, **ALIASES}
    if name not in known:
        close = get_close_matches(name.lower(), known, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownAdapter(
            f"there is no adapter {name!r}: {hint}There are {', '.join(sorted(known))}"
        )
    return known[name]


def configured(name: str, settings: Mapping[str, Any], loader: str = "") -> Any:
    """The configuration of peft by the name of a family; unknown settings are refused.

    `loader` is the class of transformers that loads the model: what peft calls the task follows.
    """
    family, told = family_named(name)
    kinds = {k.value.lower(): each for k, each in _peft().PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    if family not in kinds:
        raise UnknownAdapter(f"this version of peft has no {family}: install a later one")
    _require_known(name, settings, {f.name for f in fields(kinds[family])} - _OURS)
    _require_start(name, settings.get("init_lora_weights", True))
    return kinds[family](task_type=TASK_TYPES.get(loader), **{**told, **settings})


def _require_start(name: str, start: object) -> None:
    if start not in _STARTS:
        raise UnknownAdapter(
            f"{name} with init_lora_weights = {start!r} takes a part of the model's own weights "
            "away, so that the adapter would mean nothing without them: leave it out"
        )


def _require_known(name: str, settings: Mapping[str, Any], known: set[str]) -> None:
    for word in settings.keys() - known:
        close = get_close_matches(word, known, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownAdapter(
            f"{name} has no setting {word!r}: {hint}It has {', '.join(sorted(known))}"
        )


def graft(model: nn.Module, config: Any) -> nn.Module:
    """The model with an adapter of this configuration, drawn anew."""
    if there := families_in(model):
        raise UnknownAdapter(f"the model has an adapter already, by peft's {', '.join(there)}")
    return _peft().get_peft_model(model, config)


def load_adapter(model: nn.Module, name: str) -> nn.Module:
    """The model with an adapter from a folder, or from hub:org/name, to be trained further."""
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    peft = _peft()
    folder = _downloaded(name) if is_hub_id(name) else Path(name)
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise UnknownAdapter(f"{name!r} is no adapter: there is no {file} in it")
    config = peft.PeftConfig.from_pretrained(str(folder))
    _require_whole(config, name)
    _require_start(repr(name), getattr(config, "init_lora_weights", True))
    config.inference_mode = False
    made = graft(model, config)
    answer = peft.set_peft_model_state_dict(made, load_file(folder / WEIGHTS))
    wrong = sorted({*answer.unexpected_keys} - {_PROMPTS}) + _missing(made, answer.missing_keys)
    if wrong:
        raise UnknownAdapter(f"the adapter {name!r} does not fit this model: see {wrong[0]!r}")
    return made


def _downloaded(name: str) -> Path:
    import huggingface_hub

    fetch = cast("Any", huggingface_hub).snapshot_download
    return Path(fetch(bare(name), allow_patterns=[CONFIG, WEIGHTS]))


def _require_whole(config: Any, name: str) -> None:
    """Refuse a file that holds what an adapter gives, and not what it is made of."""
    family = str(config.peft_type.value).lower()
    if family not in FAMILIES:
        raise UnknownAdapter(
            f"fedplan does not train adapters by peft's {family}, as {name!r} is: use one of "
            f"{', '.join(FAMILIES)}"
        )
    if family == "p_tuning" or (family == "prefix_tuning" and config.prefix_projection):
        raise UnknownAdapter(
            f"{name!r} is saved as the prompts that its {family} gave, without the encoder that "
            "made them: it cannot be trained further; take prompt_tuning, or prefix_tuning without "
            "prefix_projection"
        )


def _missing(made: nn.Module, lacking: Iterable[str]) -> list[str]:
    """The adapter's tensors that a file has by none of their names; prompts came by another way."""
    modules, lacks = dict(made.named_modules()), set(lacking)
    found = dict[Tensor, list[str]]()
    for name, tensor in made.named_parameters(remove_duplicate=False):
        graft = graft_of(modules, name) if tensor.requires_grad else None
        if graft is not None and graft.kind is not Kind.PROMPT:
            found.setdefault(tensor, []).append(name)
    return [names[0] for names in found.values() if lacks.issuperset(names)]


def save_adapter(model: nn.Module, folder: Path, moved: Iterable[str] = ()) -> None:
    """Write an adapter alone, as peft loads it.

    `moved` are the tensors that are not what the model started with: all must be the adapter's.
    """
    if not families_in(model):
        raise UnknownAdapter("the model has no adapter: export the whole model")
    modules = dict(model.named_modules())
    for name in moved:
        if graft_of(modules, name) is None and "modules_to_save" not in name.split("."):
            raise UnknownAdapter(
                f"{name!r} was trained too and is none of the adapter's: export the whole model; "
                "or, in another run, freeze it, or name its layer in model.adapter.modules_to_save"
            )
    cast("Any", model).save_pretrained(folder)


def whole(model: nn.Module) -> nn.Module:
    """The model by itself in floats: dequantised if it was packed, its adapters merged into it.

    It is unpacked first: to merge into packed weights would round them once more.
    """
    if not is_quantised(model):
        return merged(model)
    if not families_in(model):
        return dequantised(model)
    peft, held = _peft(), cast("Any", model)
    config = held.peft_config[held.active_adapter]
    values = peft.get_peft_model_state_dict(held)
    alone = graft(dequantised(held.unload()), config)
    peft.set_peft_model_state_dict(alone, values)
    return merged(alone)


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise UnknownAdapter("adapters are peft's: pip install fedplan[lora]") from error
    return peft
