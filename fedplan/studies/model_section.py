# SPDX-License-Identifier: Apache-2.0
"""The [model] section of a study: weights, configuration, quantization and peft adapter."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from fedplan.models.values import QUANTIZATIONS
from fedplan.studies.field_types import STRICT, AdapterName, one_of_validator

QuantizationName = Annotated[
    str, AfterValidator(one_of_validator("quantization", ("", *QUANTIZATIONS)))
]

FORBIDDEN_SETTINGS = frozenset(
    (
        *("auto_map", "trust_remote_code", "code_revision", "use_kernels", "kernel_config"),
        *("use_safetensors", "gguf_file", "cache_dir", "offload_folder"),
        *("force_download", "token", "proxies"),
    )
)
"""Settings that make transformers run code, or read, write or download other files."""
MAX_LAYERS, MAX_SETTING = 1000, 2**31
"""Limits of layer counts and of other integers: a site builds an outline of unapproved models."""
LAYER_COUNT_NAME = re.compile("layer|depth|block|group|stage|expert")
"""Names of settings that count layers."""
IMPLEMENTATION_NAME = re.compile("_?(attn|experts)_implementation.*")
"""Settings that choose an implementation by name."""


def _validate_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings unchanged; raise ValueError for one that could load code or is too large.

    Also checks nested dicts.
    """
    for name, value in settings.items():
        if name in FORBIDDEN_SETTINGS:
            raise ValueError(f"{name} is not a setting of the model: leave it out")
        if IMPLEMENTATION_NAME.fullmatch(name) and any(sign in str(value) for sign in "/|@"):
            raise ValueError(
                f"{name} = {str(value)[:60]!r} would download code: use one of transformers' own, "
                "such as 'eager' or 'sdpa'"
            )
        limit = MAX_LAYERS if LAYER_COUNT_NAME.search(name) else MAX_SETTING
        numbers = cast("list[Any]", value) if isinstance(value, list) else [value]
        if any(isinstance(number, int) and number > limit for number in numbers):
            raise ValueError(f"{name} = {str(value)[:60]} is above the limit of {limit}")
        if isinstance(value, dict):
            _validate_settings(cast("dict[str, Any]", value))
    return settings


class AdapterSection(BaseModel):
    """A peft adapter to add to the model: a new one by its `type`, or a saved one by its `path`.

    `target`: the part of the model that gets the adapter. All other fields are settings of peft's
    configuration, such as `r` and `lora_alpha` (see `settings`).
    """

    model_config = STRICT | ConfigDict(extra="allow")

    type: AdapterName = ""
    """Adapter type of peft, such as "lora"; other fields of this section are its peft settings."""
    path: str = ""
    """Saved adapter to start from, instead of a type: a folder or hub:org/name."""
    target: str = ""
    """Part whose layers get the adapter, such as "query | value"; default: peft's own choice."""

    @property
    def settings(self) -> dict[str, Any]:
        """The fields that are passed to peft's configuration."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _validate_choice(self) -> AdapterSection:
        """Raise ValueError unless either type or path is set, with fields that fit the choice.

        A path allows neither target nor settings; target and target_modules exclude each other.
        """
        if bool(self.type) == bool(self.path):
            raise ValueError("set either type (a new adapter) or path (a saved one)")
        if self.path and (self.target or self.settings):
            extra_fields = ", ".join(["target"] * bool(self.target) + sorted(self.settings))
            raise ValueError(f"a saved adapter has its own settings: leave out {extra_fields}")
        if self.target and "target_modules" in self.settings:
            raise ValueError("set either target (a part) or target_modules (names of layers)")
        return self


class ModelSection(BaseModel):
    """The initial model: pretrained weights (`path`), or a `type` with new weights.

    A dual encoder can also be built of two models: `vision` and `text`, joined by `bridge`.
    `config` changes the transformers configuration; `dtype` and `quantization` are of the loaded
    weights; `adapter` adds a peft adapter; `freeze_batch_norm` freezes running means and variances
    of batch norms. `digest` pins the initial model. `layer_map_like` or `layer_map` explains a
    model type that fedplan does not know. `from_python` is set by fedplan.simulate.
    """

    model_config = STRICT

    path: str = ""
    """Pretrained model: a folder or hub:org/name."""
    type: str = ""
    """Model type of transformers, such as "vit", for new weights drawn from the seed; instead of
    path."""
    config: Annotated[dict[str, Any], AfterValidator(_validate_settings)] = {}
    """Changes to the model's transformers configuration, such as { hidden_size = 64 }."""
    vision: str = ""
    """Dual encoder: folder or hub:org/name of the image encoder."""
    text: str = ""
    """Dual encoder: folder or hub:org/name of the text encoder."""
    bridge: str = ""
    """Dual encoder: safetensors file with the projections that join both encoders."""
    digest: str = ""
    """Expected digest of the initial model, from `fedplan digest`; another model is rejected."""
    freeze_batch_norm: bool = False
    """Freeze batch-norm statistics, so that training changes nothing but parameters."""
    layer_map_like: str = ""
    """For a model type that fedplan does not know: a known type with the same layers."""
    layer_map: dict[str, Any] = {}
    """For a model type that fedplan does not know: its layer map, as `fedplan propose` prints
    it."""
    from_python: str = ""
    """Set by fedplan.simulate: class of an in-memory model. Leave empty in files."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Dtype of the loaded weights."""
    quantization: QuantizationName = ""
    """Quantize linear layers, which are then frozen: "nf4", "fp4" or "int8"; default: no."""
    adapter: AdapterSection | None = None
    """Adapter of peft to add to the model."""

    @model_validator(mode="after")
    def _validate_choice(self) -> ModelSection:
        """Raise ValueError unless exactly one kind of model is given, with fields of that kind."""
        if bool(self.vision) != bool(self.text) or (self.bridge and not self.vision):
            raise ValueError("a dual encoder needs both vision and text; bridge joins them")
        if sum(map(bool, (self.path, self.type, self.vision, self.from_python))) != 1:
            raise ValueError(
                "set exactly one of: path (pretrained), type (new weights), vision and text"
            )
        if (self.layer_map_like or self.layer_map) and (
            self.vision or (self.layer_map_like and self.layer_map)
        ):
            raise ValueError(
                "set layer_map_like or layer_map, not both, and not for a dual encoder"
            )
        if self.quantization and not self.path:
            raise ValueError("quantization needs pretrained weights: set path")
        return self

    @property
    def is_plain(self) -> bool:
        """Whether the weights are float32, not quantized, and without an adapter."""
        return self.dtype == "float32" and not self.quantization and self.adapter is None
