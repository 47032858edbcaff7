# SPDX-License-Identifier: Apache-2.0
"""Canonical text of settings and functions: one line, the same in every process."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from numbers import Number
from pathlib import PurePath
from tokenize import TokenError
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

EXACT = 2**53
"""Whole floats below this magnitude are written as integers."""


def with_text(text: str) -> Callable[[F], F]:
    """Return a decorator that sets the attribute `text` (canonical text) of a function.

    The decorated function is returned itself, not wrapped.

    >>> canonical_text(with_text("halved(2)")(lambda: None))
    'halved(2)'
    """

    def set_text(function: F) -> F:
        function.text = text  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return set_text


def format_call(name: str, /, *values: object, **settings: object) -> str:
    """Return the canonical text of a call: `name` with positional values and keyword settings.

    >>> format_call("attention", to="first", examples=64.0)
    'attention(to="first", examples=64)'
    """
    texts = {key: canonical_text(each) for key, each in settings.items()}
    return _call_text(name, map(canonical_text, values), texts)


def format_dataclass(name: str, record: Any) -> str:
    """Return the canonical text of a dataclass instance: `name` for the class, and all fields."""
    return format_call(name, **{f.name: getattr(record, f.name) for f in fields(record)})


def canonical_text(value: object) -> str:
    """Return one line of text that identifies a value or a function, the same in every process.

    A value with a string attribute `text` gives that text. Numbers, strings, lists, mappings and
    frozen dataclasses are written out; equal numbers give equal texts. A function gives module and
    name, a digest of the source, defaults, arguments of a `partial`, and captured immutable values.
    A lambda, or a function without source, gives a digest of the bytecode instead, which depends on
    the version of Python. Never raises for an unknown value: the class name is used.

    Not covered: globals and functions that a function calls, values captured by methods of a class,
    captured mutable values (only the class is named), and files edited after loading. To cover
    these, set a `text` by hand: see `with_text`.
    """
    return _text(value, ())


def _text(value: object, parents: tuple[object, ...]) -> str:
    """Return the canonical text of a value; see `canonical_text`.

    `parents`: the values that contain this one, outermost first, to detect recursion.
    """
    if isinstance(value, Enum):
        return _text(value.value, ())
    if isinstance(value, str):
        return json.dumps(str(value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        whole = isinstance(value, int) or (value.is_integer() and abs(value) < EXACT)
        return str(int(value)) if whole else repr(float(value))
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    kind = type(value)
    # By name: torch is not imported here.
    is_torch = kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout")
    if is_torch or isinstance(value, Number | range | slice | PurePath):
        return f"{kind.__name__} {value!r}"
    # A wrapper may show the `text` of the function inside.
    if not isinstance(value, type) and "__wrapped__" not in getattr(value, "__dict__", {}):
        text = getattr(value, "text", None)
        if isinstance(text, str):
            return text if text.isprintable() else json.dumps(text)
    if isinstance(value, Mapping):
        pairs = cast("Mapping[object, object]", value).items()
        items = sorted(f"{_text(k, parents)}: {_text(v, parents)}" for k, v in pairs)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(v, parents) for v in cast('list[object]', value))}]"
    if isinstance(value, AbstractSet):
        elements = (_text(v, parents) for v in cast("AbstractSet[object]", value))
        return f"set({', '.join(sorted(elements))})"
    return _object_text(value, parents)


def _object_text(value: object, parents: tuple[object, ...]) -> str:
    """Return the text of a function, class, or instance; the word "itself" for one of `parents`."""
    if any(value is each for each in parents):
        return "itself"
    parents = (*parents, value)
    if isinstance(value, functools.partial):
        part = cast("functools.partial[Any]", value)
        kwargs = {key: _text(each, parents) for key, each in part.keywords.items()}
        return _call_text(_text(part.func, parents), [_text(v, parents) for v in part.args], kwargs)
    if isinstance(value, MethodType):
        return f"{_text(value.__func__, parents)} of {_captured_text(value.__self__, parents)}"
    if isinstance(value, FunctionType):
        settings = dict[str, str]()
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            try:
                settings[name] = _captured_text(cell.cell_contents, parents)
            except ValueError:
                settings[name] = "nothing"  # a name that is bound later
        for name, default in (value.__kwdefaults__ or {}).items():
            settings[name] = _captured_text(default, parents)
        defaults = [_captured_text(each, parents) for each in value.__defaults__ or ()]
        return _call_text(_qualified_name(value), defaults, settings)
    if (inside := getattr(value, "__wrapped__", None)) is not None:
        return f"{_qualified_name(type(value))} of {_text(inside, parents)}"
    if isinstance(getattr(value, "__qualname__", None), str):
        return _qualified_name(value)
    if is_dataclass(value) and cast("Any", value).__dataclass_params__.frozen:
        settings = {f.name: _text(getattr(value, f.name), parents) for f in fields(value)}
        return _call_text(_qualified_name(type(value)), (), settings)
    return _qualified_name(type(value))


def _captured_text(value: object, parents: tuple[object, ...]) -> str:
    """Return the text of a value that a function captured; only the class of a mutable one."""
    mutable = isinstance(value, list | dict | set | bytearray)
    return f"a {type(value).__name__}" if mutable else _text(value, parents)


def _call_text(name: str, values: Iterable[str], settings: Mapping[str, str]) -> str:
    return f"{name}({', '.join([*values, *(f'{k}={v}' for k, v in settings.items())])})"


def _qualified_name(value: Any) -> str:
    """Return "module.qualname#digest" of a function or class `value`.

    The digest is of the source (for a class: of the class and all its base classes), or of the
    bytecode for a lambda or a function without source. "#digest" is left out without both.
    """
    code = getattr(value, "__code__", None)
    source = _bytecode(code) if isinstance(code, CodeType) else b""
    # Two lambdas in one line would have the same source: that line.
    if not value.__qualname__.endswith("<lambda>"):
        # The code object, because getsource(function) gives the source of a wrapped function.
        sources = [code] if isinstance(code, CodeType) else [value]
        if isinstance(value, type):
            sources = value.__mro__
        own = [each for each in sources if getattr(each, "__module__", "") != "builtins"]
        with suppress(OSError, TypeError, SyntaxError, TokenError):  # no file, or edited since
            source = b"".join(inspect.cleandoc(inspect.getsource(x)).encode() for x in own)
    digest = f"#{hashlib.sha256(source).hexdigest()[:16]}" if source else ""
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}{digest}"


def _bytecode(code: CodeType) -> bytes:
    """Return bytecode, names and constants of a code object, nested ones included, as JSON."""
    constants = [
        _bytecode(each).hex() if isinstance(each, CodeType) else _constant_text(each)
        for each in code.co_consts
    ]
    return json.dumps([code.co_code.hex(), code.co_names, code.co_varnames, constants]).encode()


def _constant_text(value: object) -> str:
    """Return the repr of a constant in bytecode; elements of a frozenset are sorted."""
    if isinstance(value, tuple | frozenset):
        elements = [_constant_text(each) for each in cast("tuple[object, ...]", value)]
        return str(elements if isinstance(value, tuple) else sorted(elements))
    return repr(value)
