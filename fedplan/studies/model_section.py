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

    peft's own `target_modules` is for layers that no part tells. The plan says what is trained.
    """

    model_config = STRICT | ConfigDict(extra="allow")

    type: Annotated[str, AfterValidator(_adapter)] = ""
    """A family of peft by its own name, such as lora; all other fields are its settings."""
    path: str = ""
    """In place of a type: a saved adapter to start from, a folder or hub:org/name."""
    target: str = ""
    """The part on whose layers the adapter is put, as in "query | value"."""

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
    """

    model_config = STRICT

    path: str = ""
    """A folder or hub:org/name with weights to start from."""
    type: str = ""
    """In place of a path: a model type of transformers, started from the seed."""
    settings: Annotated[dict[str, Any], AfterValidator(_settings)] = {}
    """What the model's configuration says otherwise than its type does by itself."""
    vision: str = ""
    """Of a model of two towers: the folder or hub:org/name of the one for pictures."""
    text: str = ""
    """Of a model of two towers: the folder or hub:org/name of the one for texts."""
    bridge: str = ""
    """A safetensors file with what joins the two towers."""
    digest: str = ""
    """What `fedplan digest` prints: every end refuses a model with another."""
    still: bool = False
    """Whether batch norms use the statistics that they have, so that nothing but params moves."""
    like: str = ""
    """For a type that fedplan does not know: the known type whose row fits it."""
    anatomy: dict[str, Any] = {}
    """For a type that fedplan does not know: its row, as `fedplan propose` prints it."""
    given: str = ""
    """The class of a model that came from Python; not for a file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of the weights as they are loaded."""
    quantised: Packing = ""
    """How linear layers are packed, which then rest: nf4, fp4 or int8."""
    adapter: AdapterSection | None = None
    """An adapter of peft that is put on the model before the method adds one."""

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
