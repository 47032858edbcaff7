# SPDX-License-Identifier: Apache-2.0
"""Serialization: tensors and a small JSON header as bytes. Safetensors, never pickle."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import torch
from safetensors.torch import save
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.tensors import layout
from fedplan.tensors.layout import places_in, viewed
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes

BUCKET = 2**25
"""Bytes of tensors in one blob: enough to save requests, little enough to hold."""

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"

KEY = "fedplan"
"""The one key of the safetensors metadata: the header is its value, as JSON."""

LARGEST_HEADER = 2**22
"""Bytes that the names, shapes and header of a message may take: JSON grows when it is read."""

DEEPEST = 32
"""How deep a header may nest."""

MOST_DIMENSIONS, LARGEST_EMPTY = 64, 2**31
"""Limits of a shape: an empty tensor takes no bytes, so its other dimensions could be any size."""

DTYPES = frozenset(layout.DTYPES.values())
"""What a tensor of a message may hold."""


class SerializationError(FedplanError):
    """Bytes that are not a message, or something that no message can hold."""

    code = "message"


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, JSON]) -> bytes:
    """The bytes of a message. The same tensors and header always give the same bytes.

    >>> unpack(pack({"weight": torch.ones(2)}, {"round": 3}))
    ({'weight': tensor([1., 1.])}, {'round': 3})
    """
    said = dict(header)
    _require_json(said)
    dense = {name: _dense(name, tensors[name]) for name in sorted(tensors, key=_text)}
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    data = save(dense, metadata={KEY: text})
    _header_bytes(data)
    return data


def unpack(data: bytes, *, limit: int | None = None) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """The tensors and the header of a message of at most `limit` bytes.

    Whatever the bytes are, the only error is a MessageError, and memory stays in proportion to
    what was sent: every size is checked before anything of that size is made.
    """
    if limit is not None and len(data) > limit:
        raise SerializationError(
            f"a message of {len(data)} bytes is larger than the limit of {limit}"
        )
    entries = _object(_header_bytes(data), "the head of the message")
    header = _header(entries.pop("__metadata__", None))
    for name, entry in entries.items():
        _require_entry(name, entry)
    return _tensors(data, entries), header


def _dense(name: str, tensor: Tensor) -> Tensor:
    """A copy in memory of its own, because safetensors takes no views."""
    if name == "__metadata__":
        raise SerializationError("a tensor cannot be called '__metadata__': rename it")
    if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
        raise SerializationError(
            f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}: a message "
            "holds dense tensors with values, of the usual dtypes; convert it first"
        )
    _require_shape(name, tensor.shape)
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.to("cpu").clone(memory_format=torch.contiguous_format)


def _header_bytes(data: bytes) -> bytes:
    """The JSON at the start of safetensors bytes, by its length in the first eight bytes."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise SerializationError(
            f"these {len(data)} bytes are not a message, or only its beginning"
        )
    if size > LARGEST_HEADER:
        raise SerializationError(
            f"the head of the message takes {size} bytes, more than {LARGEST_HEADER}: send fewer "
            "tensors at once, or a shorter header"
        )
    return data[8 : 8 + size]


def _object(text: bytes | str, what: str) -> dict[str, Any]:
    """The JSON object in a text."""
    try:
        words = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(words, object_pairs_hook=_without_twins)
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"{what} is not JSON: {_short(error)}") from error
    if not isinstance(value, dict):
        raise SerializationError(f"{what} is not a JSON object but {_short(value)}")
    return cast("dict[str, Any]", value)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: of two with one name, each reader would take another."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands in it twice")
    return found


def _header(metadata: Any) -> dict[str, JSON]:
    """The header within the safetensors metadata."""
    found = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    if found.keys() != {KEY}:
        raise SerializationError(f"the metadata of the message does not hold {KEY!r} alone")
    text = found[KEY]
    if not isinstance(text, str):
        raise SerializationError(f"the header is not text but {_short(text)}")
    header = _object(text, "the header")
    _require_json(header)
    return header


def _require_json(value: Any, depth: int = 0) -> None:
    """Refuse what would not come back from JSON as it is."""
    if depth > DEEPEST:
        raise SerializationError(f"the header nests more than {DEEPEST} deep: make it flatter")
    if type(value) is dict:
        for name, each in cast("dict[Any, Any]", value).items():
            _text(name)
            _require_json(each, depth + 1)
    elif type(value) is list:
        for each in cast("list[Any]", value):
            _require_json(each, depth + 1)
    else:
        _require_single(value)


def _require_single(value: Any) -> None:
    fits = True
    if type(value) is str:
        _text(value)
    elif type(value) is float:
        fits = math.isfinite(value)
    elif type(value) is int:
        fits = value.bit_length() <= 64
    else:
        fits = value is None or type(value) is bool
    if not fits:
        raise SerializationError(
            f"the header holds {_short(value)}: it takes None, bools, strings, finite numbers of "
            "at most 64 bits, and lists and dicts of them"
        )


def _text(value: Any) -> str:
    """The value, if it is a string that can be written as UTF-8."""
    try:
        if type(value) is str:
            value.encode("utf-8")
            return value
    except UnicodeEncodeError:
        pass  # a half of a pair of surrogates
    raise SerializationError(
        f"a name or text of a message is a string of Unicode, not {_short(value)}"
    )


def _require_entry(name: str, entry: Any) -> None:
    """Refuse an entry without a shape; safetensors checks the rest of it against the bytes."""
    _text(name)
    said: Any = cast("dict[str, Any]", entry).get("shape") if isinstance(entry, dict) else None
    sizes: list[Any] = cast("list[Any]", said) if isinstance(said, list) else [None]
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise SerializationError(f"{_short(name)} has no shape but {_short(said)}")
    _require_shape(name, sizes)


def _require_shape(name: str, shape: Sequence[int]) -> None:
    if len(shape) > MOST_DIMENSIONS:
        raise SerializationError(
            f"{_short(name)} has {len(shape)} dimensions, over {MOST_DIMENSIONS}"
        )
    if 0 in shape and math.prod(size or 1 for size in shape) > LARGEST_EMPTY:
        raise SerializationError(
            f"{_short(name)} is empty, and yet has the shape {_short(tuple(shape))}: leave it out"
        )


def _tensors(data: bytes, entries: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors, where they lie in the bytes, once the head of the message is known to be sound.

    They are not to be written to: whoever has the bytes has them too.
    """
    head = 8 + int.from_bytes(data[:8], "little")
    try:
        places = places_in(entries, len(data) - head)
    except ValueError as error:
        raise SerializationError(
            f"the tensors of the message cannot be read: {_short(error)}"
        ) from error
    found = {place.name: viewed(data, head, place) for place in places}
    for name, tensor in found.items():
        # A bool of any other byte is undefined behaviour in torch.
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise SerializationError(f"{_short(name)} holds bools that are neither 0 nor 1")
    return {name: found[name] for name in sorted(found)}


def _short(value: Any) -> str:
    """The beginning of a value, so that a forged one cannot fill a log."""
    try:
        said = str(value) if isinstance(value, Exception) else repr(value)
    except ValueError:  # Python writes out no number of more than 4300 digits
        said = f"a {type(value).__name__} with a number of thousands of digits"
    return said if len(said) <= 80 else f"{said[:77]}..."


def packed(tensors: Mapping[str, Tensor], said: Mapping[str, JSON]) -> Message:
    """Tensors and what is said of them."""
    blobs = (pack(bucket, {}) for bucket in _buckets(tensors))
    return Message(pack({}, said), tuple(blobs))


def unpacked(
    message: Message, *, limit: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a message of at most `limit` bytes, and what is said of them."""
    if limit is not None and message.nbytes > limit:
        raise SerializationError(
            f"a message of {message.nbytes} bytes is larger than the limit, {limit}"
        )
    strays, said = unpack(message.header)
    if strays:
        raise SerializationError("the header of a message holds tensors")
    found = dict[str, Tensor]()
    for blob in message.blobs:
        tensors, _ = unpack(blob)
        if again := found.keys() & tensors.keys():
            raise SerializationError(f"{min(again)!r} is in two blobs of one message")
        found |= tensors
    return found, said


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    bucket = dict[str, Tensor]()
    for name, tensor in sorted(tensors.items()):
        if bucket and nbytes(bucket) + nbytes({name: tensor}) > BUCKET:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket
