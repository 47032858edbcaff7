# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft: recognizing their tensors in a model; adding, loading, saving and merging them.

A family is listed, with the names of its tensors, once it passes `tests/models/test_adapters.py`.
peft's classes are recognized by the module that defines them, so an unlisted family is rejected and
never mistaken for its host layer. Weights are read from safetensors only; peft itself would also
read pickles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from fedplan.errors import UnknownAdapter, import_extra
from fedplan.models.catalog import is_hub_id, strip_hub_prefix
from fedplan.models.params import Kind
from fedplan.models.values import dequantize, is_quantized

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

    `layer`: the path of the peft layer. `attribute`: the layer's attribute that holds the tensor,
    as `lora_A`. `adapter_name`: peft's name of the adapter, as `default`.
    """

    family: str
    layer: str
    attribute: str
    adapter_name: str

    @property
    def kind(self) -> Kind:
        """PROMPT for prompt families, else ADAPTER, with the exceptions of KINDS."""
        kind = KINDS.get(self.attribute, Kind.ADAPTER)
        return Kind.PROMPT if self.family in PROMPTS else kind

    @property
    def tags(self) -> frozenset[str]:
        """The tag of the attribute by TAGS; and the adapter's name if it is "common" or "own"."""
        words = {TAGS.get(self.attribute, ""), *({"common", "own"} & {self.adapter_name})}
        return frozenset(words - {""})

    @property
    def inner(self) -> str:
        """The path of the host layer inside the peft layer."""
        return f"{self.layer}.{BASE_LAYER}" if self.layer else BASE_LAYER


def find_adapter_tensor(modules: Mapping[str, nn.Module], name: str) -> AdapterTensor | None:
    """The adapter tensor with a parameter's name, or None for a tensor of the model itself.

    Only for names of which `is_inactive` is False. Raises UnknownAdapter for an unsupported family
    or tensor, and a merged or disabled adapter.
    """
    for path, family, attribute, adapter_name in _peft_steps(modules, name):
        if not family or attribute in _ROUTES:
            continue
        if attribute not in FAMILIES[family].split():
            raise _unsupported(f"{family} with {attribute}", name)
        # `is True`, because a tuner forwards attributes to its model, which may have such methods.
        if getattr(modules[path], "merged", False) is True:
            raise UnknownAdapter(f"the adapter of {path!r} is merged: call unmerge_adapter first")
        if getattr(modules[path], "disable_adapters", False) is True:
            raise UnknownAdapter(f"the adapter of {path!r} is disabled: enable the adapters first")
        return AdapterTensor(family, path, attribute, adapter_name)
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
    """Merge the adapters into the weights, in place; UnknownAdapter if that is impossible."""
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

    Each as (path of the module, family, the next two segments of `name`). The family is "" for
    peft's wrappers. Stops at the peft layer that holds the parameter. Raises UnknownAdapter for an
    unsupported family.
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
    """Return (family, preset settings) of an adapter name; UnknownAdapter with similar ones."""
    names = {**{family: (family, dict[str, Any]()) for family in FAMILIES}, **ALIASES}
    if name not in names:
        close = get_close_matches(name.lower(), names, n=2, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UnknownAdapter(
            f"there is no adapter {name!r}: {hint}There are {', '.join(sorted(names))}"
        )
    return names[name]


def make_peft_config(name: str, settings: Mapping[str, Any], loader: str = "") -> Any:
    """The config object of peft for an adapter name, as "lora"; `settings` are its fields.

    `loader` names the transformers class that loads the model, for peft's task type. Raises
    UnknownAdapter for an unknown name or setting, and if init_lora_weights would change the model's
    own weights.
    """
    family, preset = adapter_family(name)
    classes = {
        k.value.lower(): each for k, each in import_peft().PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
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
    """Wrap a model with a new adapter, in place; UnknownAdapter if it has one already."""
    if families := adapter_families(model):
        raise UnknownAdapter(f"the model already has an adapter, of peft's {', '.join(families)}")
    return import_peft().get_peft_model(model, config)


def load_adapter(model: nn.Module, name: str) -> nn.Module:
    """Wrap a model, in place, with a saved adapter to train further, and return the PeftModel.

    `name` is a folder or a hub id (may download). Raises UnknownAdapter if the adapter is
    incomplete, unsupported or does not fit the model.
    """
    from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

    peft = import_peft()
    folder = Path(name)
    if is_hub_id(name):
        import huggingface_hub

        download = cast("Any", huggingface_hub).snapshot_download
        folder = Path(download(strip_hub_prefix(name), allow_patterns=[CONFIG, WEIGHTS]))
    for file in (CONFIG, WEIGHTS):
        if not (folder / file).is_file():
            raise UnknownAdapter(f"{name!r} is no adapter: there is no {file} in it")
    config = read_adapter_config(folder)
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
    adapted = add_adapter(model, config)
    keys = peft.set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
    unexpected = sorted({*keys.unexpected_keys} - {"prompt_embeddings"})
    if wrong := unexpected + _missing_tensors(adapted, keys.missing_keys):
        raise UnknownAdapter(f"the adapter {name!r} does not fit this model: see {wrong[0]!r}")
    return adapted


def _missing_tensors(model: nn.Module, missing_keys: Iterable[str]) -> list[str]:
    """The first name of each trainable adapter tensor of a model that was not loaded."""
    modules, missing = dict(model.named_modules()), set(missing_keys)
    names = dict[Tensor, list[str]]()
    for name, tensor in model.named_parameters(remove_duplicate=False):
        adapter = find_adapter_tensor(modules, name) if tensor.requires_grad else None
        if adapter is not None and adapter.kind is not Kind.PROMPT:
            names.setdefault(tensor, []).append(name)
    return [each[0] for each in names.values() if missing.issuperset(each)]


def save_adapter(model: nn.Module, folder: Path, trained: Iterable[str] = ()) -> None:
    """Save the adapter alone into a folder; UnknownAdapter if a trained tensor is not in it.

    Several active LoRA adapters are saved as one, and the model keeps them.
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
    adapted, names = cast("Any", model), list(cast("Any", model).active_adapters)
    if len(names) < 2:
        return adapted.save_pretrained(folder)
    _add_joined(adapted, names)
    adapted.save_pretrained(folder, selected_adapters=["default"])
    adapted.base_model.set_adapter(names)
    adapted.delete_adapter("default")


def join_adapters(model: nn.Module) -> Any:
    """Join the active LoRA adapters of a PeftModel into one, in place, and return the model.

    The rank of the joined adapter is the sum of theirs, and the outputs are the same. Raises
    UnknownAdapter for several adapters that are no plain LoRA.
    """
    adapted, names = cast("Any", model), list(cast("Any", model).active_adapters)
    if len(names) < 2:
        return adapted
    _add_joined(adapted, names)
    adapted.set_adapter("default")
    for name in names:
        adapted.delete_adapter(name)
    return adapted


def _add_joined(adapted: Any, names: list[str]) -> None:
    """Add the sum of some LoRA adapters to a PeftModel, as the adapter "default"."""
    try:
        adapted.add_weighted_adapter(names, [1.0] * len(names), "default", combination_type="cat")
    except ValueError as error:
        raise UnknownAdapter(
            f"the adapters {', '.join(names)} cannot be joined into one: {error}; export the whole "
            "model"
        ) from error


def merge_and_dequantize(model: nn.Module) -> nn.Module:
    """The model with float weights and without adapters; may change it in place."""
    # Merging into packed weights would round them once more.
    if not is_quantized(model):
        return merge_adapters(model)
    if not adapter_families(model):
        return dequantize(model)
    peft, adapted = import_peft(), join_adapters(model)
    config = adapted.peft_config[adapted.active_adapter]
    values = peft.get_peft_model_state_dict(adapted)
    float_model = add_adapter(dequantize(adapted.unload()), config)
    peft.set_peft_model_state_dict(float_model, values)
    return merge_adapters(float_model)


def read_adapter_config(folder: Path) -> Any:
    """Return the peft configuration in a folder, for an adapter that is to be trained."""
    peft = import_peft()
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    return config


def import_peft() -> Any:
    """Return the module peft; raises MissingExtra, with the install line, if it is missing."""
    return import_extra("peft", "an adapter")
