# SPDX-License-Identifier: Apache-2.0
"""Section, the base class of all settings that are read from a file; files of TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, dataclass_transform

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass

from fedplan.errors import FedplanError

STRICT = ConfigDict(
    extra="forbid",
    strict=True,
    frozen=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)
"""Configuration of all sections: no unknown fields, no type conversion, no NaN or infinity."""
MAX_DEPTH = 32
"""Maximum nesting depth of values."""

_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"' + r"|'[^'\n]*'")
_KEY_SEPARATOR = re.compile(r"[,=\[\]{}\n]")


class ConfigError(FedplanError):
    """An invalid study, or a folder that does not fit the study; the message names the field."""

    code = "settings"


@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class _SectionType(ModelMetaclass):
    """Type of sections, whose constructors raise ConfigError in place of a ValidationError."""

    if not TYPE_CHECKING:  # the constructor keeps its signature for editors

        def __call__(cls, *values: object, **fields: object) -> Section:
            if values:
                name = next(iter(cls.model_fields))
                raise ConfigError(
                    f"{cls.__name__}({values[0]!r}): give each field by its name, as in "
                    f"{cls.__name__}({name}={values[0]!r})"
                )
            try:
                return super().__call__(**fields)
            except ValidationError as error:
                from fedplan.studies.schema import config_error

                raise config_error(cls, error) from error


class Section(BaseModel, metaclass=_SectionType):
    """Base class of all sections of a study; rejects unknown fields and values of another type.

    The constructor raises ConfigError, with the field that an unknown word may mean;
    `model_validate` raises pydantic's ValidationError.
    """

    model_config = STRICT


@contextmanager
def as_value_error() -> Generator[None]:
    """Re-raise a FedplanError of the body as ValueError, which pydantic reports with the field."""
    try:
        yield
    except FedplanError as error:
        raise ValueError(str(error)) from error


def found_by(find: Callable[[str], object], *, optional: bool = False) -> AfterValidator:
    """Return a validator of names for which `find(name)` succeeds, or "" if `optional` is set."""

    def check(name: str) -> str:
        with as_value_error():
            _ = (optional and not name) or find(name)
        return name

    return AfterValidator(check)


def parse_toml(text: str) -> dict[str, Any]:
    """Parse a TOML text to nested dicts.

    Raises ValueError for invalid TOML, for values nested too deep, or a key with too many dots.
    """
    # tomllib needs quadratic time for a long dotted key, so these are rejected first.
    without_strings = _STRING.sub("", text)
    if any(piece.count(".") > 2 * MAX_DEPTH for piece in _KEY_SEPARATOR.split(without_strings)):
        raise ValueError(f"a key has more than {2 * MAX_DEPTH} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def _check_device(name: str) -> str:
    from fedplan.tensors.devices import check_device_name  # loads torch

    return check_device_name(name)


DeviceName = Annotated[str, found_by(_check_device)]
