# SPDX-License-Identifier: Apache-2.0
"""Section, the base class of all settings that are read from a file; files of TOML."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, dataclass_transform

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
SITE_ADDRESS = "https://fedplan.example"
"""Address of the documentation site, as in pyproject.toml; `.ci/version` refuses a placeholder."""
SCHEMA_LINE = f"#:schema {SITE_ADDRESS}/reference/{{}}.schema.json"
"""First line of a study, site, policy or server file, by which editors find its schema."""

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
                from fedplan.studies.section_errors import config_error

                raise config_error(cls, error) from error


SectionType = TypeVar("SectionType", bound="Section")


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


def validate_section(
    schema: type[SectionType], values: Mapping[str, Any], lines: Mapping[tuple[str, ...], int] = {}
) -> SectionType:
    """Return the section of nested dicts; ConfigError has a line for each invalid field.

    `lines`: the `field_lines` of the file that the values come from, for the error.
    """
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        from fedplan.studies.section_errors import config_error  # loads torch

        raise config_error(schema, error, lines) from error


def parse_section(schema: type[SectionType], text: str) -> SectionType:
    """Return the section in a TOML text; ConfigError names each invalid field and its line.

    Raises ValueError for invalid TOML, as `parse_toml` does.
    """
    values = parse_toml(text)
    try:
        return validate_section(schema, values)
    except ConfigError:
        return validate_section(schema, values, field_lines(text))  # slow for long lists


def field_lines(text: str) -> dict[tuple[str, ...], int]:
    """Return the number of the line on which each section and field of a valid TOML text begins.

    >>> field_lines("seed = 1\\n[model]\\nconfig = { depth = 3 }")
    {('seed',): 1, ('model',): 2, ('model', 'config'): 3, ('model', 'config', 'depth'): 3}
    """
    lines, header, statement, start = dict[tuple[str, ...], int](), "", "", 1
    for number, line in enumerate(text.split("\n"), 1):
        statement += line + "\n"
        try:
            values = parse_toml(header + statement)
        except ValueError:
            continue  # a value goes on in the next line
        if statement.lstrip().startswith("["):
            header = statement
        for path in _paths(values):
            lines.setdefault(path, start)
        statement, start = "", number + 1
    return lines


def _paths(values: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each section and field of nested dicts."""
    for name, value in values.items():
        yield (path := (*prefix, name))
        if isinstance(value, dict):
            yield from _paths(cast("dict[str, Any]", value), path)


def _check_device(name: str) -> str:
    from fedplan.tensors.devices import check_device_name  # loads torch

    return check_device_name(name)


DeviceName = Annotated[str, found_by(_check_device)]


def apply_overrides(values: dict[str, Any], overrides: list[str] | None) -> dict[str, Any]:
    """Set fields of nested dicts in place, by texts such as "train.rounds=5"; return the dicts.

    A value is parsed as TOML, or taken as string. Raises ConfigError for a text without "=" or a
    section that is no dict.
    """
    for override in overrides or ():
        field, separator, text = override.partition("=")
        if not separator or not field:
            raise ConfigError(f"an override has the form section.field=value, not {override!r}")
        set_field(values, field.strip(), parse_toml_value(text.strip()))
    return values


def set_field(values: dict[str, Any], field: str, value: Any) -> None:
    """Set a field of nested dicts in place, by dotted name; ConfigError if a section is a value."""
    *sections, name = field.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if type(values) is not dict:
            raise ConfigError(f"{field}: {section} is a value, not a section")
    values[name] = value


def parse_toml_value(text: str) -> Any:
    """Parse one TOML value; a text that is not valid TOML is returned as a string."""
    try:
        return parse_toml(f"value = {text}")["value"]
    except (ValueError, KeyError):
        return text
