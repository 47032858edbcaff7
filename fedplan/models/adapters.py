# SPDX-License-Identifier: Apache-2.0
"""Adapters: what peft adds to a model, told by the classes that hold it; the rest is refused.

A family is whitelisted by name, with the places in which it keeps its numbers, after the laws of
`tests/models/test_adapters.py` held for it. peft's classes are known by where they are defined, so
that a family that is not listed is refused and never taken for its host.
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
"""The families of peft that are checked, by the folder of their classes, and their places."""
PROMPTS = frozenset({"prompt_tuning", "p_tuning", "prefix_tuning"})
"""Families that put learned prompts before a model instead of changing its layers."""
UNMERGED = PROMPTS | {"lily"}
"""Families that cannot become part of the model's own numbers."""
TAGS = {
    "lora_A": "lora_a",
    "lora_B": "lora_b",
    "lora_embedding_A": "lora_a",
    "lora_embedding_B": "lora_b",
    "lora_magnitude_vector": "lora_m",
    "ln_tuning_layers": "adapter",
}
"""Further words for what stands in a place."""
ROWED = frozenset({"lora_b", "lora_m"})
"""What has a row for each row of its host."""
WRAPPED = "base_layer"
KINDS = {"ranknum": Kind.SCALE, "ln_tuning_layers": Kind.NORM}
"""What is no adapter by itself: AdaLoRA's count of ranks is not trained; a tuned norm is one."""

_CARRIERS = frozenset(
    {"peft.peft_model", "peft.mixed_model", "peft.tuners.mixed.model", "peft.utils.other"}
)
_REASONS = {
    **dict.fromkeys(
        ("adamss", "frod", "osf", "psoft", "tinylora"),
        "each machine would decompose the model for itself, and mean something else by a number",
    ),
    **dict.fromkeys(("multitask_prompt_tuning", "poly"), "it asks for a task with each row"),
    **dict.fromkeys(("cartridge", "cpt"), "a part of its prompt must stay as it is"),
}
_SAVED, _PROMPTED, _DORMANT = "modules_to_save", "prompt_encoder", "original_module"
_ROUTES = frozenset({"base_model", "model", WRAPPED, "token_adapter", _SAVED, _PROMPTED})


@dataclass(frozen=True)
class Graft:
    """Where a tensor that peft added stands: in which layer, of which family, at which place."""

    family: str
    layer: str
    place: str

    @property
    def kind(self) -> Kind:
        """What it is by itself; an adapter acts on its host besides."""
        known = KINDS.get(self.place, Kind.ADAPTER)
        return Kind.PROMPT if self.family in PROMPTS else known

    @property
    def inner(self) -> str:
        """The path of the host's own module within the layer."""
        return f"{self.layer}.{WRAPPED}" if self.layer else WRAPPED


def graft_of(modules: Mapping[str, nn.Module], name: str) -> Graft | None:
    """The graft that a tensor of a model is; None where it is the model's own.

    An adapter that is not active, and a copy that peft put aside, are no graft and not the
    model's: see `is_dormant`.
    """
    for layer, family, place, _ in _passed(modules, name):
        if family and place not in _ROUTES:
            if place not in FAMILIES[family].split():
                raise _refused(f"{family} with {place}", name)
            _require_awake(modules[layer], layer)
            return Graft(family, layer, place)
    return None


def is_dormant(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether nobody runs a tensor: an adapter that is not active, or what an active one replaced.

    >>> is_dormant({"": nn.Linear(1, 1)}, "weight")
    False
    """
    for layer, family, place, below in _passed(modules, name):
        if place == _DORMANT or (family == "ln_tuning" and place == WRAPPED):
            return True
        active = getattr(modules[layer], "active_adapters", None)
        named = place in (_SAVED, _PROMPTED) or (family and place not in _ROUTES)
        if named and below and active is not None and below not in active:
            return True
    return False


def families_in(model: nn.Module) -> list[str]:
    """The families of the adapters that a model has."""
    origins = {_origin(module) for module in model.modules()}
    folders = {each.split(".")[2] for each in origins if each.startswith("peft.tuners.")}
    return sorted(folders & FAMILIES.keys())


def scales_in(model: nn.Module) -> set[float]:
    """What LoRA's layers multiply the product of their sides by."""
    held = [getattr(module, "scaling", None) for module in model.modules()]
    each = [cast("dict[str, float]", scaling) for scaling in held if isinstance(scaling, dict)]
    return {float(scale) for scaling in each for scale in scaling.values()}


def merged(model: nn.Module) -> nn.Module:
    """The model by itself, its adapters merged into its own numbers; a plain model as it is."""
    families = families_in(model)
    if not families:
        return model
    kept = sorted(UNMERGED.intersection(families))
    if kept or _origin(model) not in _CARRIERS:
        raise UnknownAdapter(
            f"adapters by peft's {', '.join(kept or families)} cannot be merged into this "
            "model: save it as it is, with the model's own save_pretrained"
        )
    return cast("Any", model).merge_and_unload()


def without_wrappers(name: str) -> tuple[str, ...]:
    """A name's segments as they would be without peft: no base_layer, no modules_to_save."""
    segments = [s for s in name.split(".") if s not in (WRAPPED, "token_adapter", _DORMANT)]
    if _SAVED in segments:
        at = segments.index(_SAVED)
        del segments[at : at + 2]
    return tuple(segments)


def _passed(modules: Mapping[str, nn.Module], name: str) -> Iterator[tuple[str, str, str, str]]:
    """peft's modules on the way to a tensor: path, family, and the two next steps of the way."""
    segments = name.split(".")
    for i in range(len(segments)):
        layer = ".".join(segments[:i])
        origin = _origin(modules[layer]) if layer in modules else ""
        if origin:
            family = "" if origin in _CARRIERS else _family(origin, name)
            yield layer, family, segments[i], segments[i + 1] if i + 1 < len(segments) else ""
            if family and segments[i] not in _ROUTES:
                return


def _origin(module: nn.Module) -> str:
    """Where peft defines the module's class; empty where it is none of peft's."""
    places = (each.__module__ for each in type(module).__mro__)
    return next((each for each in places if each.startswith("peft.")), "")


def _family(origin: str, name: str) -> str:
    family = origin.split(".")[2] if origin.startswith("peft.tuners.") else origin
    if family not in FAMILIES:
        raise _refused(family, name)
    return family


def _refused(what: str, name: str) -> UnknownAdapter:
    reason = _REASONS.get(what, "nothing says what its numbers are")
    return UnknownAdapter(
        f"fedplan does not train adapters by peft's {what}, which has {name!r}: {reason}. Merge it "
        f"into the model first (merge_and_unload), or use one of {', '.join(FAMILIES)}"
    )


def _require_awake(layer: nn.Module, name: str) -> None:
    # A tuner answers for the model within it, which may have methods of these names.
    if getattr(layer, "merged", False) is True:
        raise UnknownAdapter(f"the adapter of {name!r} is merged: call unmerge_adapter first")
    if getattr(layer, "disable_adapters", False) is True:
        raise UnknownAdapter(f"the adapter of {name!r} is disabled: enable the adapters first")
