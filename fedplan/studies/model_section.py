# SPDX-License-Identifier: Apache-2.0
"""Model section: what a study says of its model: its weights, how they are held, its adapter."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

from fedplan.models.grafting import family_named
from fedplan.models.quantised import QUANTISED
from fedplan.studies.words import STRICT, as_fault, one_of

Packing = Annotated[str, AfterValidator(one_of("packing", ("", *QUANTISED)))]

CODE = frozenset(
    (
        *("auto_map", "trust_remote_code", "code_revision", "use_kernels", "kernel_config"),
        *("use_safetensors", "gguf_file", "cache_dir", "offload_folder"),
        *("force_download", "token", "proxies"),
    )
)
"""Settings by which transformers would run code, read other files, or write and fetch some."""
DEEPEST, LARGEST = 1000, 2**31
"""Of a number of layers, and of any other setting: a model is outlined before it is approved."""
DEPTH = re.compile("layer|depth|block|group|stage|expert")
ATTENTION = re.compile("_?(attn|experts)_implementation.*")


def _settings(said: dict[str, Any]) -> dict[str, Any]:
    """Settings of a model alone: a study comes from others, and brings no code."""
    for name, value in said.items():
        if name in CODE:
            raise ValueError(f"{name} is none of a model's settings: leave it out")
        if ATTENTION.fullmatch(name) and any(sign in str(value) for sign in "/|@"):
            raise ValueError(
                f"{name} = {str(value)[:60]!r} would fetch code: say one of transformers' own, "
                "such as 'eager' or 'sdpa'"
            )
        most = DEEPEST if DEPTH.search(name) else LARGEST
        numbers = cast("list[Any]", value) if isinstance(value, list) else [value]
        if any(isinstance(each, int) and each > most for each in numbers):
            raise ValueError(f"{name} = {str(value)[:60]}: {most} is the most")
        if isinstance(value, dict):
            _settings(cast("dict[str, Any]", value))
    return said


def _adapter(name: str) -> str:
    with as_fault():
        _ = name and family_named(name)
    return name


class AdapterSection(BaseModel):
    """An adapter of peft: a `type` with the settings of its own configuration, or a saved one.

    `target` is the part on whose layers it is put, as in "query | value"; peft's own
    `target_modules` is for layers that no part tells. `path` is a folder or hub:org/name to start
    from. The plan says what of it is trained.
    """

    model_config = STRICT | ConfigDict(extra="allow")

    type: Annotated[str, AfterValidator(_adapter)] = ""
    path: str = ""
    target: str = ""

    @property
    def settings(self) -> dict[str, Any]:
        """What is said beside our own words: all of it is for peft's configuration."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _one(self) -> AdapterSection:
        if bool(self.type) == bool(self.path):
            raise ValueError("say one of type (a new adapter) and path (a saved one)")
        if self.path and (self.target or self.settings):
            said = ", ".join(["target"] * bool(self.target) + sorted(self.settings))
            raise ValueError(f"a saved adapter has its own settings: leave out {said}")
        if self.target and "target_modules" in self.settings:
            raise ValueError("say one of target (a part) and target_modules (names of layers)")
        return self


class ModelSection(BaseModel):
    """The model: a folder or hub:org/name with weights, or a type and settings to start from.

    A model of two towers may also be made of two: `vision` and `text`, joined by a `bridge`.
    `digest` pins it: every end refuses a model whose `fedplan digest` is another. `still` has batch
    norms use the statistics that they have: a run moves params, and nothing else. For a type that
    fedplan does not know, `like` names the row of one that it does, or `anatomy` says its own.
    `given` is the class of a model that came from Python.

    `dtype` is that of its weights; `quantised` packs those of its layers, which then rest, and
    `adapter` is put on it before the method adds one of its own.
    """

    model_config = STRICT

    path: str = ""
    type: str = ""
    settings: Annotated[dict[str, Any], AfterValidator(_settings)] = {}
    vision: str = ""
    text: str = ""
    bridge: str = ""
    digest: str = ""
    still: bool = False
    like: str = ""
    anatomy: dict[str, Any] = {}
    given: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    quantised: Packing = ""
    adapter: AdapterSection | None = None

    @model_validator(mode="after")
    def _one(self) -> ModelSection:
        if bool(self.vision) != bool(self.text) or (self.bridge and not self.vision):
            raise ValueError("two towers are both vision and text, and a bridge is between them")
        if sum(map(bool, (self.path, self.type, self.vision, self.given))) != 1:
            raise ValueError("say one of path (pretrained), type (from scratch), vision and text")
        if (self.like or self.anatomy) and (self.vision or (self.like and self.anatomy)):
            raise ValueError("say like, or an anatomy (which may say like), of a model of one type")
        if self.quantised and not self.path:
            raise ValueError("quantised is of weights that are loaded: say path")
        return self

    @property
    def plain(self) -> bool:
        """Whether its weights are held as they are, and nothing is put on it."""
        return self.dtype == "float32" and not self.quantised and self.adapter is None
