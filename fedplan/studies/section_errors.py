# SPDX-License-Identifier: Apache-2.0
"""Messages for files and sections that pydantic has rejected: line, field, reason and remedy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from fedplan.naming import UnknownName
from fedplan.studies.field_types import missing_field_message, unknown_field_message
from fedplan.studies.section import ConfigError

FILES = {
    "Study": "study file",
    "Site": "site file",
    "Policy": "policy",
    "ServerFile": "server file",
}
"""Classes of whole files, with the words for these files in messages."""


def config_error(
    schema: type[BaseModel],
    error: ValidationError,
    lines: Mapping[tuple[str, ...], int] = {},
) -> ConfigError:
    """Return the ConfigError for a file or section (`schema`) that pydantic has rejected.

    `lines`: the `field_lines` of the file.
    """
    faults = _merge_choices(_fault_line(schema, details, lines) for details in error.errors())
    causes = [details.get("ctx", {}).get("error") for details in error.errors()]
    unknown = any(isinstance(getattr(c, "__cause__", None), UnknownName) for c in causes)
    code = UnknownName.code if unknown else ConfigError.code
    kind = FILES.get(schema.__name__, schema.__name__)
    return ConfigError(f"invalid {kind}:\n  " + "\n  ".join(faults)).with_code(code)


UNION_CHOICE = re.compile(r"\.[^.:]*\[[^:]*\](?=: )|\.(str|int|float|bool)(?=: )")
"""The end of a field's name that pydantic adds for each choice of a union."""
CHOICE = re.compile(r"(.*?: Input should be )(.*)(, not '.*')")
FIELD_WORD = re.compile(r"[a-z]\w*(?:\.\w+)*")
"""What may be a field in a message, such as data.group."""


def _merge_choices(lines: Iterable[str]) -> list[str]:
    """Return lines on fields with the choices of one field in one line: `a or b, not 'c'`."""
    merged = dict[tuple[str, str], list[str]]()
    for line in lines:
        parts = CHOICE.fullmatch(UNION_CHOICE.sub("", line))
        head, choice, end = parts.groups() if parts else (line, "", "")
        merged.setdefault((head, end), []).append(choice)
    lists = merged.items()
    return [f"{head}{' or '.join(dict.fromkeys(some))}{end}" for (head, end), some in lists]


def _fault_line(
    schema: type[BaseModel], details: Mapping[str, Any], lines: Mapping[tuple[str, ...], int]
) -> str:
    """Return line, dotted field and message of an entry of `ValidationError.errors()`."""
    path = tuple(str(name) for name in details["loc"] if name != "[key]")
    message = str(details["msg"]) if details["type"] == "value_error" else ""
    return line_prefix(lines, path, message) + _field_fault(schema, details)


def line_prefix(
    lines: Mapping[tuple[str, ...], int], path: tuple[str, ...], message: str = ""
) -> str:
    """Return "line 7: " for a fault of the field or section at `path`; "" if it is on no line.

    A rule for several fields is rejected at their section: its `message` names the fields, and the
    first of them that is in the file has the line.
    """
    words = [path + tuple(word.split(".")) for word in FIELD_WORD.findall(message)]
    words.sort(key=len, reverse=True)  # sections may be named beside their fields
    above = [path[:length] for length in range(len(path), 0, -1)]
    number = next((lines[p] for p in [*words, *above] if p in lines), 0)
    return f"line {number}: " if number else ""


def _field_fault(schema: type[BaseModel], details: Mapping[str, Any]) -> str:
    """Return the dotted field and the message of an entry of `ValidationError.errors()`."""
    names = [str(name) for name in details["loc"] if name != "[key]"]
    is_plain = [name.isprintable() and name and " " not in name for name in names]
    shown = (n if plain else repr(n) for n, plain in zip(names, is_plain, strict=True))
    field = ".".join(shown) or schema.__name__.lower()
    if details["type"] == "extra_forbidden":
        return f"{field}: {unknown_field_message(schema, details['loc'])}"
    if details["type"] == "missing":
        return f"{field}: {missing_field_message(schema, details['loc'])}"
    if details["type"] == "value_error":
        message = str(details["msg"]).removeprefix("Value error, ")
        return f"{field}: {message}".replace("\n", "\n    ")  # below the names of fields
    return f"{field}: {details['msg']}, not {str(details['input'])[:60]!r}"
