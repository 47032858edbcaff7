# SPDX-License-Identifier: Apache-2.0
"""Canonical text of settings and functions: one line, the same in every process."""

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
"""Whole floats below this magnitude are written as integers."""


def with_text(text: str) -> Callable[[F], F]:
    """Decorator that sets the attribute `text`, the canonical text of a function, on it.

    >>> canonical_text(with_text("halved(2)")(lambda: None))
    'halved(2)'
    """

    def set_text(function: F) -> F:
        function.text = text  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return set_text


def format_call(name: str, /, *values: object, **settings: object) -> str:
    """The canonical text of a call: a name with positional values and keyword settings.

    >>> format_call("attention", to="first", rows=64.0)
    'attention(to="first", rows=64)'
    """
    texts = {key: canonical_text(each) for key, each in settings.items()}
    return _call_text(name, map(canonical_text, values), texts)


def format_dataclass(name: str, record: Any) -> str:
    """The canonical text of a dataclass instance: `name` in place of its class, and all fields."""
    return format_call(name, **{f.name: getattr(record, f.name) for f in fields(record)})


def canonical_text(value: object) -> str:
    """One line of text that identifies a value or a function, the same in every process.

    A value with a string attribute `text` is that text. Numbers, strings, lists, mappings and
    frozen dataclasses are written out; equal numbers are written alike. A function is its module
    and name, a digest of its source, its defaults, the arguments of a `partial`, and the immutable
    values that it captured. A lambda, or a function without source, has a digest of its bytecode
    instead, which depends on the version of Python.

    Not covered: globals and functions that it calls, values captured by methods of a class,
    captured mutable values (only their class is named), and files edited after they were loaded.
    To cover those, set a `text` that contains them: see `with_text`.
    """
    return _text(value, ())


def _text(value: object, parents: tuple[object, ...]) -> str:
    """Canonical text of a value inside `parents`, the values that contain it (for recursion)."""
    if isinstance(value, str | bool | int | float | Enum | None):
        return _scalar_text(value)
    if isinstance(value, bytes):
        return f"bytes {value.hex()}"
    if isinstance(value, Number | range | slice | PurePath) or _is_torch_constant(value):
        return f"{type(value).__name__} {value!r}"
    if (text := _own_text(value)) is not None:
        return text
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


def _is_torch_constant(value: object) -> bool:
    """Whether a value is a torch dtype, device or layout; does not import torch."""
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ in ("dtype", "device", "layout")


def _scalar_text(value: str | bool | int | float | Enum | None) -> str:
    """Text of a scalar: JSON for strings, booleans and None; whole floats below EXACT as ints."""
    if isinstance(value, Enum):
        return _text(value.value, ())
    if isinstance(value, str):
        return json.dumps(str(value))
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, float) and not (value.is_integer() and abs(value) < EXACT):
        return repr(float(value))
    return str(int(value))


def _own_text(value: object) -> str | None:
    """The attribute `text` of a value, if it is a string; None for classes and wrappers.

    A wrapper (`__wrapped__`) may show the `text` of the function inside it.
    """
    if isinstance(value, type) or "__wrapped__" in getattr(value, "__dict__", {}):
        return None
    text = getattr(value, "text", None)
    if not isinstance(text, str):
        return None
    return text if text.isprintable() else json.dumps(text)


def _object_text(value: object, parents: tuple[object, ...]) -> str:
    """Text of a function, a class, or an instance; "itself" for a value inside itself."""
    if any(value is each for each in parents):
        return "itself"
    parents = (*parents, value)
    if isinstance(value, functools.partial):
        part = cast("functools.partial[Any]", value)
        args, kwargs = [_text(v, parents) for v in part.args], _texts(part.keywords, parents)
        return _call_text(_text(part.func, parents), args, kwargs)
    if isinstance(value, MethodType):
        return f"{_text(value.__func__, parents)} of {_captured_text(value.__self__, parents)}"
    if isinstance(value, FunctionType):
        return _function_text(value, parents)
    if (inside := getattr(value, "__wrapped__", None)) is not None:
        return f"{_qualified_name(type(value))} of {_text(inside, parents)}"
    if isinstance(getattr(value, "__qualname__", None), str):
        return _qualified_name(value)
    if is_dataclass(value) and cast("Any", value).__dataclass_params__.frozen:
        settings = {f.name: getattr(value, f.name) for f in fields(value)}
        return _call_text(_qualified_name(type(value)), (), _texts(settings, parents))
    return _qualified_name(type(value))


def _function_text(value: FunctionType, parents: tuple[object, ...]) -> str:
    """Text of a function: its qualified name with digest, defaults and captured variables."""
    cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
    captured = {name: _cell_text(cell, parents) for name, cell in cells}
    defaults = [_captured_text(each, parents) for each in value.__defaults__ or ()]
    keyword_defaults = {
        key: _captured_text(each, parents) for key, each in (value.__kwdefaults__ or {}).items()
    }
    return _call_text(_qualified_name(value), defaults, captured | keyword_defaults)


def _cell_text(cell: CellType, parents: tuple[object, ...]) -> str:
    try:
        return _captured_text(cell.cell_contents, parents)
    except ValueError:
        return "nothing"  # a name that is bound later


def _captured_text(value: object, parents: tuple[object, ...]) -> str:
    """Text of a value that a function captured; only the class of a mutable one."""
    mutable = isinstance(value, list | dict | set | bytearray)
    return f"a {type(value).__name__}" if mutable else _text(value, parents)


def _texts(values: Mapping[str, object], parents: tuple[object, ...]) -> dict[str, str]:
    return {key: _text(each, parents) for key, each in values.items()}


def _call_text(name: str, values: Iterable[str], settings: Mapping[str, str]) -> str:
    return f"{name}({', '.join([*values, *(f'{k}={v}' for k, v in settings.items())])})"


def _qualified_name(value: Any) -> str:
    """Module and qualified name of a function or class, with a digest of its source, if any."""
    source = _source(value)
    digest = f"#{hashlib.sha256(source).hexdigest()[:16]}" if source else ""
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}{digest}"


def _source(value: Any) -> bytes:
    """Source of a function, or of a class and its bases; bytecode for lambdas; empty if neither."""
    code = getattr(value, "__code__", None)
    bytecode = _bytecode(code) if isinstance(code, CodeType) else b""
    # Two lambdas in one line would have the same source: that line.
    if value.__qualname__.endswith("<lambda>"):
        return bytecode
    # The code object, because getsource(function) gives the source of a wrapped function.
    sources = [code] if isinstance(code, CodeType) else _class_and_bases(value)
    try:
        return b"".join(inspect.cleandoc(inspect.getsource(each)).encode() for each in sources)
    except (OSError, TypeError, SyntaxError, TokenError):  # no file, or a file edited since
        return bytecode


def _class_and_bases(value: Any) -> list[Any]:
    """A class with its bases, builtins left out; for another value, the value alone."""
    classes = value.__mro__ if isinstance(value, type) else (value,)
    return [each for each in classes if getattr(each, "__module__", "") != "builtins"]


def _bytecode(code: CodeType) -> bytes:
    """Bytecode, names and constants of a code object, as JSON."""
    constants = [
        _bytecode(each).hex() if isinstance(each, CodeType) else _constant_text(each)
        for each in code.co_consts
    ]
    return json.dumps([code.co_code.hex(), code.co_names, code.co_varnames, constants]).encode()


def _constant_text(value: object) -> str:
    """Text of a constant in bytecode; the elements of a frozenset are sorted."""
    if isinstance(value, tuple | frozenset):
        elements = [_constant_text(each) for each in cast("tuple[object, ...]", value)]
        return str(elements if isinstance(value, tuple) else sorted(elements))
    return repr(value)
