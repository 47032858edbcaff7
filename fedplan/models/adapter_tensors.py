# SPDX-License-Identifier: Apache-2.0
"""Recognizes the tensors that peft adds to a model; unsupported adapters are rejected.

A family is listed, with the names of its tensors, once it passes `tests/models/test_adapters.py`.
peft's classes are recognized by the module that defines them, so an unlisted family is rejected and
never mistaken for its host layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from fedplan.errors import UnknownAdapter
from fedplan.models.params import Kind

FAMILIES: dict[str, str] = {
    "adalora": "lora_A lora_B lora_E lora_embedding_A lora_embedding_B ranknum",
    "beft": "beft_bias",
    "boft": "boft_R boft_s",
    "c3a": "c3a_kernel",
    "deft": "deft_P deft_R",
    "delora": "delora_A delora_B delora_lambda",
    "fourierft": "fourierft_spectrum",
    "glora": "glora_A glora_B glora_C glora_D glora_E",
    "gralora": "gralora_A gralora_B gralora_A_general gralora_B_general",
    "hira": "hira_A hira_B hira_embedding_A hira_embedding_B",
    "hra": "hra_u",
    "ia3": "ia3_l",
    "lily": "lily_A lily_B lily_router",
    "ln_tuning": "ln_tuning_layers",
    "loha": "hada_w1_a hada_w1_b hada_w2_a hada_w2_b hada_t1 hada_t2",
    "lokr": "lokr_w1 lokr_w1_a lokr_w1_b lokr_w2 lokr_w2_a lokr_w2_b lokr_t2",
    "lora": "lora_A lora_B lora_embedding_A lora_embedding_B lora_magnitude_vector",
    "miss": "miss_block",
    "oft": "oft_R oft_embedding_R",
    "p_tuning": "embedding lstm_head mlp_head",
    "peanut": "peanut_A peanut_B peanut_encoders peanut_decoders",
    "prefix_tuning": "embedding transform",
    "prompt_tuning": "embedding",
    "pvera": "pvera_lambda_b pvera_lambda_d",
    "randlora": "randlora_lambda randlora_gamma",
    "road": "road_theta road_alpha",
    "shira": "shira_weight",
    "supertuning": "supertuning_values supertuning_lora_A supertuning_lora_B",
    "trainable_tokens": "trainable_tokens_delta",
    "unilora": "unilora_theta_d",
    "vblora": "vblora_logits_A vblora_logits_B vblora_vector_bank",
    "vera": "vera_lambda_b vera_lambda_d",
    "waveft": "waveft_spectrum",
}
"""The supported families, by their folder in peft.tuners, with the attributes of their tensors."""
PROMPTS = frozenset({"prompt_tuning", "p_tuning", "prefix_tuning"})
"""Families that learn prompts instead of changing layers."""
UNMERGEABLE = PROMPTS | {"lily"}
"""Families that cannot be merged into the model's weights."""
TAGS = {
    "lora_A": "lora_a",
    "lora_B": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "lora_m",
    "ln_tuning_layers": "adapter",
}
"""Tags of params, by the attribute that holds their tensor."""
PER_OUTPUT_TAGS = frozenset({"lora_b", "lora_m"})
"""Tags of tensors with one row for each output of the host layer."""
BASE_LAYER = "base_layer"
"""The attribute of peft layers that holds the host layer."""
KINDS = {"ranknum": Kind.SCALE, "ln_tuning_layers": Kind.NORM}
"""Attributes whose tensors are not of kind ADAPTER: AdaLoRA's rank counts, and tuned norms."""

_WRAPPER_MODULES = frozenset(
    {"peft.peft_model", "peft.mixed_model", "peft.tuners.mixed.model", "peft.utils.other"}
)
_REASONS = {
    **dict.fromkeys(
        ("adamss", "frod", "osf", "psoft", "tinylora"),
        "each machine would decompose the model itself, and the factors would differ",
    ),
    **dict.fromkeys(("multitask_prompt_tuning", "poly"), "it needs a task id with each example"),
    **dict.fromkeys(("cartridge", "cpt"), "a part of its prompt must not be trained"),
}
_SAVED, _PROMPT_ENCODER, _REPLACED = "modules_to_save", "prompt_encoder", "original_module"
_ROUTES = frozenset({"base_model", "model", BASE_LAYER, "token_adapter", _SAVED, _PROMPT_ENCODER})


@dataclass(frozen=True)
class AdapterTensor:
    """A tensor added by peft, of a family in FAMILIES.

    `layer`: the path of the peft layer in the model. `attribute`: the layer's attribute that holds
    the tensor, as `lora_A`.
    """

    family: str
    layer: str
    attribute: str

    @property
    def kind(self) -> Kind:
        """PROMPT for prompt families, else ADAPTER, with the exceptions of KINDS."""
        kind = KINDS.get(self.attribute, Kind.ADAPTER)
        return Kind.PROMPT if self.family in PROMPTS else kind

    @property
    def inner(self) -> str:
        """The path of the host layer inside the peft layer."""
        return f"{self.layer}.{BASE_LAYER}" if self.layer else BASE_LAYER


def find_adapter_tensor(modules: Mapping[str, nn.Module], name: str) -> AdapterTensor | None:
    """The adapter tensor with a parameter's name, or None for a tensor of the model itself.

    `modules` are all modules of the model by path. Only for names of which `is_inactive` is False.
    Raises UnknownAdapter for an unsupported family or tensor, and for a merged or disabled adapter.
    """
    for path, family, attribute, _ in _peft_steps(modules, name):
        if not family or attribute in _ROUTES:
            continue
        if attribute not in FAMILIES[family].split():
            raise _unsupported(f"{family} with {attribute}", name)
        # `is True`, because a tuner forwards attributes to its model, which may have such methods.
        if getattr(modules[path], "merged", False) is True:
            raise UnknownAdapter(f"the adapter of {path!r} is merged: call unmerge_adapter first")
        if getattr(modules[path], "disable_adapters", False) is True:
            raise UnknownAdapter(f"the adapter of {path!r} is disabled: enable the adapters first")
        return AdapterTensor(family, path, attribute)
    return None


def is_inactive(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether the forward pass ignores the parameter `name`.

    True for tensors of an inactive adapter, and of a module that peft replaced by a trained copy.
    `modules` are all modules of the model by path. Raises UnknownAdapter for an unsupported family.

    >>> is_inactive({"": nn.Linear(1, 1)}, "weight")
    False
    """
    for path, family, attribute, adapter_name in _peft_steps(modules, name):
        if attribute == _REPLACED or (family == "ln_tuning" and attribute == BASE_LAYER):
            return True
        active = getattr(modules[path], "active_adapters", None)
        is_adapter = attribute in (_SAVED, _PROMPT_ENCODER) or (family and attribute not in _ROUTES)
        if is_adapter and adapter_name and active is not None and adapter_name not in active:
            return True
    return False


def adapter_families(model: nn.Module) -> list[str]:
    """The supported adapter families in a model, sorted; empty for a model without adapters."""
    origins = {_origin(module) for module in model.modules()}
    folders = {each.split(".")[2] for each in origins if each.startswith("peft.tuners.")}
    return sorted(folders & FAMILIES.keys())


def lora_scales(model: nn.Module) -> set[float]:
    """All LoRA scales (alpha / r) in a model."""
    scalings = [getattr(module, "scaling", None) for module in model.modules()]
    tables = [cast("dict[str, float]", each) for each in scalings if isinstance(each, dict)]
    return {float(scale) for table in tables for scale in table.values()}


def merge_adapters(model: nn.Module) -> nn.Module:
    """Merge the adapters into the model's weights, in place, and return the model without peft.

    A model without adapters is returned unchanged. Raises UnknownAdapter for a family that cannot
    be merged, and for adapters that were injected without a PeftModel around the model.
    """
    families = adapter_families(model)
    if not families:
        return model
    unmergeable = sorted(UNMERGEABLE.intersection(families))
    if unmergeable or _origin(model) not in _WRAPPER_MODULES:
        raise UnknownAdapter(
            f"adapters of peft's {', '.join(unmergeable or families)} cannot be merged into this "
            "model: save it with its own save_pretrained"
        )
    return cast("Any", model).merge_and_unload()


def strip_peft_segments(name: str) -> tuple[str, ...]:
    """The segments of a parameter's name without those that peft adds, such as base_layer."""
    segments = [s for s in name.split(".") if s not in (BASE_LAYER, "token_adapter", _REPLACED)]
    if _SAVED in segments:
        start = segments.index(_SAVED)
        del segments[start : start + 2]
    return tuple(segments)


def _peft_steps(modules: Mapping[str, nn.Module], name: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the peft modules on the path to the parameter `name`, outermost first.

    Each as (path of the module, family, the segment of `name` after the path, the segment after
    that one). The family is "" for peft's wrappers, the last item is "" where `name` ends. Stops at
    the peft layer that holds the parameter. Raises UnknownAdapter for an unsupported family.
    """
    segments = [*name.split("."), ""]
    for i in range(len(segments) - 1):
        path = ".".join(segments[:i])
        origin = _origin(modules[path]) if path in modules else ""
        if not origin:
            continue
        family = origin.split(".")[2] if origin.startswith("peft.tuners.") else origin
        if origin in _WRAPPER_MODULES:
            family = ""
        elif family not in FAMILIES:
            raise _unsupported(family, name)
        yield path, family, segments[i], segments[i + 1]
        if family and segments[i] not in _ROUTES:
            return


def _origin(module: nn.Module) -> str:
    """The module of peft that defines a module's class, or the empty string."""
    origins = (base.__module__ for base in type(module).__mro__)
    return next((each for each in origins if each.startswith("peft.")), "")


def _unsupported(family: str, name: str) -> UnknownAdapter:
    """The error for a parameter `name` of an unsupported family: reason and alternatives."""
    reason = _REASONS.get(family, "the meaning of its tensors is unknown")
    return UnknownAdapter(
        f"fedplan does not train adapters of peft's {family}, which has {name!r}: {reason}. "
        f"Merge it into the model first (merge_and_unload), or use one of {', '.join(FAMILIES)}"
    )
