# SPDX-License-Identifier: Apache-2.0
"""Wording: settings and functions as one line of text, the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from pathlib import PurePath
from tokenize import TokenError
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

EXACT = 2**53
"""Below it a whole float is written as the whole number that it equals."""


def stated(text: str) -> Callable[[F], F]:
    """Have a function's text be this: its name among us, with its settings.

    >>> text_of(stated("halved(2)")(lambda: None))
    'halved(2)'
    """

    def say(call: F) -> F:
        call.text = text  # pyright: ignore[reportFunctionMemberAccess]
        return call

    return say


def phrase(name: str, /, *values: object, **settings: object) -> str:
    """A name with values and settings.

    >>> phrase("attention", to="first", rows=64.0)
    'attention(to="first", rows=64)'
    """
    said = {key: text_of(each) for key, each in settings.items()}
    return _phrase(name, map(text_of, values), said)


def spelled_out(name: str, record: Any) -> str:
    """A dataclass by a name that is given, with all of its fields; its class is not named."""
    return phrase(name, **{f.name: getattr(record, f.name) for f in fields(record)})


def text_of(value: object) -> str:
    """One line that tells two values apart, or two functions, in whatever process it is made.

    What has a `text` says it itself. Numbers, strings, lists, mappings and frozen dataclasses are
    written out; equal numbers alike. A function is its module and name with a digest of its source,
    with its defaults, the arguments of a `partial`, and what it captured, as far as that cannot
    change. A lambda, and what has no source, is told by its bytecode: of one version of Python.

    Not seen are globals and other functions that it uses, what a method of a class captured, what
    it captured in lists, dicts, tensors or objects that can change (they are told by their class),
    and a file edited since it was loaded. Who relies on these says a `text` that has them in it:
    see `stated`.
    """
    return _text(value, ())


def _text(value: object, above: tuple[object, ...]) -> str:
    if isinstance(value, str | bool | int | float | Enum | None):
        return _plain(value)
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    if isinstance(value, Number | range | slice | PurePath) or _is_word_of_torch(value):
        return f"{type(value).__name__} {value!r}"
    if (said := _said(value)) is not None:
        return said
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        return f"{{{', '.join(sorted(f'{_text(k, above)}: {_text(v, above)}' for k, v in pairs))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(v, above) for v in cast('list[object]', value))}]"
    if isinstance(value, AbstractSet):
        each = (_text(v, above) for v in cast("AbstractSet[object]", value))
        return f"set({', '.join(sorted(each))})"
    return _called(value, above)


def _is_word_of_torch(value: object) -> bool:
    """Whether a value is one of torch's own constants, such as a dtype; torch is not needed."""
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout")


def _plain(value: str | bool | int | float | Enum | None) -> str:
    if isinstance(value, Enum):
        return _text(value.value, ())
    if isinstance(value, str):
        return json.dumps(str(value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and not (value.is_integer() and abs(value) < EXACT):
        return repr(float(value))
    return str(int(value))


def _said(value: object) -> str | None:
    """The text that a value has for itself; that of a wrapped function is not its wrapper's."""
    if isinstance(value, type) or "__wrapped__" in getattr(value, "__dict__", {}):
        return None
    text = getattr(value, "text", None)
    if not isinstance(text, str):
        return None
    return text if text.isprintable() else json.dumps(text)


def _called(value: object, above: tuple[object, ...]) -> str:
    """A function, a class, or a value of one."""
    if any(value is each for each in above):
        return "itself"
    above = (*above, value)
    if isinstance(value, functools.partial):
        part = cast("functools.partial[Any]", value)
        given, named = [_text(v, above) for v in part.args], _texts(part.keywords, above)
        return _phrase(_text(part.func, above), given, named)
    if isinstance(value, MethodType):
        return f"{_text(value.__func__, above)} of {_kept(value.__self__, above)}"
    if isinstance(value, FunctionType):
        return _function(value, above)
    if (inside := getattr(value, "__wrapped__", None)) is not None:
        return f"{_named(type(value))} of {_text(inside, above)}"
    if isinstance(getattr(value, "__qualname__", None), str):
        return _named(value)
    if is_dataclass(value) and cast("Any", value).__dataclass_params__.frozen:
        settings = {f.name: getattr(value, f.name) for f in fields(value)}
        return _phrase(_named(type(value)), (), _texts(settings, above))
    return _named(type(value))


def _function(value: FunctionType, above: tuple[object, ...]) -> str:
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    captured = {name: _cell(cell, above) for name, cell in cells}
    given = [_kept(each, above) for each in value.__defaults__ or ()]
    named = {key: _kept(each, above) for key, each in (value.__kwdefaults__ or {}).items()}
    return _phrase(_named(value), given, captured | named)


def _cell(cell: CellType, above: tuple[object, ...]) -> str:
    try:
        return _kept(cell.cell_contents, above)
    except ValueError:
        return "nothing"  # a name that is bound later


def _kept(value: object, above: tuple[object, ...]) -> str:
    """What a function holds on to: in full, unless it may change while nobody looks."""
    changing = isinstance(value, list | dict | set | bytearray)
    return f"a {type(value).__name__}" if changing else _text(value, above)


def _texts(values: Mapping[str, object], above: tuple[object, ...]) -> dict[str, str]:
    return {key: _text(each, above) for key, each in values.items()}


def _phrase(name: str, values: Iterable[str], settings: Mapping[str, str]) -> str:
    return f"{name}({', '.join([*values, *(f'{k}={v}' for k, v in settings.items())])})"


def _named(value: Any) -> str:
    """Where a function or a class stands, and a digest of what it does."""
    content = _source(value)
    mark = f"#{hashlib.sha256(content).hexdigest()[:16]}" if content else ""
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}{mark}"


def _source(value: Any) -> bytes:
    code = getattr(value, "__code__", None)
    compiled = _compiled(code) if isinstance(code, CodeType) else b""
    # Two lambdas may stand in one line, and their sources are that line.
    if value.__qualname__.endswith("<lambda>"):
        return compiled
    # Of a function its own lines, not those of a function that it wraps.
    held = [code] if isinstance(code, CodeType) else _line(value)
    try:
        return b"".join(inspect.cleandoc(inspect.getsource(each)).encode() for each in held)
    except (OSError, TypeError, SyntaxError, TokenError):  # no file, or one that is another by now
        return compiled


def _line(value: Any) -> list[Any]:
    """A class with those that it is made from."""
    made_from = value.__mro__ if isinstance(value, type) else (value,)
    return [each for each in made_from if getattr(each, "__module__", "") != "builtins"]


def _compiled(code: CodeType) -> bytes:
    """What a function is without its source: its steps, and the constants and names in them."""
    constants = [
        _compiled(each).hex() if isinstance(each, CodeType) else _constant(each)
        for each in code.co_consts
    ]
    return json.dumps([code.co_code.hex(), code.co_names, code.co_varnames, constants]).encode()


def _constant(value: object) -> str:
    if isinstance(value, tuple | frozenset):
        each = [_constant(one) for one in cast("tuple[object, ...]", value)]
        return str(each if isinstance(value, tuple) else sorted(each))
    return repr(value)
