# SPDX-License-Identifier: Apache-2.0
"""Serialization of tensors and a small JSON header as safetensors bytes, never pickle."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from safetensors.torch import save
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.tensors.message import Message
from fedplan.tensors.named import nbytes

DTYPE_BY_CODE = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8},
    **{"BOOL": torch.bool, "C64": torch.complex64},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""Torch dtype by safetensors dtype name."""

with warnings.catch_warnings():
    # Torch warns once that bytes are read-only. Nobody writes to tensors of a message.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class TensorEntry(NamedTuple):
    """Header entry of one tensor: name, dtype, shape, and the range of its bytes.

    `start` and `stop` count from the first byte after the header.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_entries(entries: Mapping[str, Any], size: int) -> list[TensorEntry]:
    """Parse the header's `entries` (JSON by tensor name); return them in the order of their bytes.

    Raises ValueError if an entry has other fields than dtype, shape and data_offsets, an invalid
    value, or a size that does not match, or if the tensors do not cover `size` bytes exactly,
    without gaps or overlaps.
    """
    parsed = list[TensorEntry]()
    for name, entry in entries.items():
        fields = cast("dict[str, Any]", entry) if isinstance(entry, dict) else {}
        if fields.keys() != {"dtype", "shape", "data_offsets"}:
            raise ValueError(f"{name!r} has {', '.join(map(str, fields))}")
        dtype = DTYPE_BY_CODE.get(fields["dtype"]) if isinstance(fields["dtype"], str) else None
        shape, offsets = _parse_uints(fields["shape"]), _parse_uints(fields["data_offsets"])
        if dtype is None or shape is None or offsets is None or len(offsets) != 2:
            raise ValueError(f"{name!r} is {str(fields)[:60]}")
        if (nbytes := offsets[1] - offsets[0]) != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name!r} is {dtype} {shape}, and has {nbytes} bytes")
        parsed.append(TensorEntry(name, dtype, shape, *offsets))
    parsed.sort(key=lambda entry: (entry.start, entry.stop))
    offset = 0
    for entry in parsed:
        if entry.start != offset:
            raise ValueError(f"{entry.name!r} starts at {entry.start} and not at {offset}")
        offset = entry.stop
    if offset != size:
        raise ValueError(f"tensors end at {offset} of {size} bytes")
    return parsed


def _parse_uints(value: Any) -> tuple[int, ...] | None:
    """Return a list of unsigned 64-bit ints as a tuple; None if the value is anything else."""
    items: list[Any] = cast("list[Any]", value) if isinstance(value, list) else [None]
    return tuple(items) if all(type(n) is int and 0 <= n < 2**64 for n in items) else None


def tensor_view(data: bytes | bytearray, header_size: int, entry: TensorEntry) -> Tensor:
    """Return the tensor of `entry`, sharing memory with `data`; a copy if its bytes are unaligned.

    `header_size` is the number of bytes before the first tensor. Does not check the entry's range.
    """
    count = (entry.stop - entry.start) // entry.dtype.itemsize
    if not count:
        return torch.empty(entry.shape, dtype=entry.dtype)
    start = header_size + entry.start
    tensor = torch.frombuffer(data, dtype=entry.dtype, count=count, offset=start)
    if tensor.data_ptr() % entry.dtype.itemsize:  # as other programs may write it
        copied = bytearray(memoryview(data)[start : header_size + entry.stop])
        tensor = torch.frombuffer(copied, dtype=entry.dtype)
    return tensor.view(entry.shape)


BLOB_BYTES = 2**25
"""Most bytes of tensors that share a blob; a larger tensor has a blob of its own."""

JSON: TypeAlias = "bool | int | float | str | list[JSON] | dict[str, JSON] | None"
"""A JSON value."""

METADATA_KEY = "fedplan"
"""The one key of the safetensors metadata; its value is the header as JSON."""

MAX_HEADER_BYTES = 2**22
"""Most bytes of names, shapes and header: parsed JSON takes more memory than its text."""

MAX_DEPTH = 32
"""Most levels of nesting of a header."""

MAX_DIMENSIONS, MAX_EMPTY_NUMEL = 64, 2**31
"""Limits of a shape: an empty tensor takes no bytes, so nothing else bounds its dimensions."""

DTYPES = frozenset(DTYPE_BY_CODE.values())
"""Dtypes of tensors in a message."""


class SerializationError(FedplanError):
    """Invalid bytes, or values that a message cannot contain."""

    code = "message"


def pack(tensors: Mapping[str, Tensor], header: Mapping[str, JSON]) -> bytes:
    """Return tensors and header as safetensors bytes; equal input gives equal bytes.

    Copies the tensors, which may be on any device. Raises SerializationError for a header that a
    JSON round trip would change, a sparse or meta tensor, an unsupported dtype, name or shape, or
    names, shapes and header of more than MAX_HEADER_BYTES.

    >>> unpack(pack({"weight": torch.ones(2)}, {"round": 3}))
    ({'weight': tensor([1., 1.])}, {'round': 3})
    """
    header = dict(header)
    _require_json(header)
    dense = dict[str, Tensor]()
    for name in sorted(tensors, key=_require_text):
        tensor = tensors[name]
        if name == "__metadata__":
            raise SerializationError("a tensor cannot be called '__metadata__': rename it")
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided or tensor.is_meta:
            raise SerializationError(
                f"{name!r} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}: a "
                "message holds dense tensors with values, of the usual dtypes; convert it first"
            )
        _require_shape(name, tensor.shape)
        resolved = tensor.detach().resolve_conj().resolve_neg()
        # A copy, because safetensors takes no views.
        dense[name] = resolved.to("cpu").clone(memory_format=torch.contiguous_format)
    text = json.dumps(header, sort_keys=True, separators=(",", ":"))
    data = save(dense, metadata={METADATA_KEY: text})
    _head_bytes(data)  # raises if the head is too large
    return data


def unpack(data: bytes, *, limit: int | None = None) -> tuple[dict[str, Tensor], dict[str, JSON]]:
    """Return (tensors sorted by name, header) of bytes that `pack` wrote.

    The tensors are CPU views of `data` (copies if unaligned); do not write to them. Raises
    SerializationError, and nothing else, for invalid bytes or more than `limit` bytes. The bytes
    may come from an attacker: sizes are checked before memory is allocated.
    """
    if limit is not None and len(data) > limit:
        raise SerializationError(
            f"a message of {len(data)} bytes is larger than the limit of {limit}"
        )
    head = _head_bytes(data)
    entries = _parse_object(head, "the head of the message")
    header = _parse_header(entries.pop("__metadata__", None))
    for name, entry in entries.items():
        _require_text(name)
        shape: Any = cast("dict[str, Any]", entry).get("shape") if isinstance(entry, dict) else None
        sizes: list[Any] = cast("list[Any]", shape) if isinstance(shape, list) else [None]
        if not all(type(size) is int and size >= 0 for size in sizes):
            raise SerializationError(f"{_short(name)} has no shape but {_short(shape)}")
        _require_shape(name, sizes)
    try:
        parsed = parse_entries(entries, len(data) - 8 - len(head))
    except ValueError as error:
        raise SerializationError(
            f"the tensors of the message cannot be read: {_short(error)}"
        ) from error
    tensors = {entry.name: tensor_view(data, 8 + len(head), entry) for entry in parsed}
    for name, tensor in tensors.items():
        # Any other byte in a bool is undefined behaviour in torch.
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise SerializationError(f"{_short(name)} holds bools that are neither 0 nor 1")
    return {name: tensors[name] for name in sorted(tensors)}, header


def _head_bytes(data: bytes) -> bytes:
    """Return the JSON head of safetensors bytes; the first eight bytes of `data` are its length.

    Raises SerializationError if the head is incomplete or larger than MAX_HEADER_BYTES.
    """
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        raise SerializationError(
            f"these {len(data)} bytes are not a message, or only its beginning"
        )
    if size > MAX_HEADER_BYTES:
        raise SerializationError(
            f"the head of the message takes {size} bytes, more than {MAX_HEADER_BYTES}: send fewer "
            "tensors at once, or a shorter header"
        )
    return data[8 : 8 + size]


def _parse_object(text: bytes | str, subject: str) -> dict[str, Any]:
    """Return the dict of a JSON object.

    Raises SerializationError if `text` is not UTF-8 or JSON, is not an object, or has a duplicate
    name at any depth. `subject` names the text in the message.
    """

    def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Two readers could pick different values of a duplicate.
        unique = dict(pairs)
        if len(unique) < len(pairs):
            raise ValueError("a name appears twice")
        return unique

    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=unique_pairs)
    except (ValueError, RecursionError) as error:
        raise SerializationError(f"{subject} is not JSON: {_short(error)}") from error
    if not isinstance(value, dict):
        raise SerializationError(f"{subject} is not a JSON object but {_short(value)}")
    return cast("dict[str, Any]", value)


def _parse_header(metadata: Any) -> dict[str, JSON]:
    """Return the header, which is JSON text under METADATA_KEY of the safetensors metadata.

    Raises SerializationError if there is another key, or if the text is not a valid header.
    """
    fields = cast("dict[str, Any]", metadata) if isinstance(metadata, dict) else {}
    if fields.keys() != {METADATA_KEY}:
        raise SerializationError(
            f"the metadata of the message does not hold {METADATA_KEY!r} alone"
        )
    text = fields[METADATA_KEY]
    if not isinstance(text, str):
        raise SerializationError(f"the header is not text but {_short(text)}")
    header = _parse_object(text, "the header")
    _require_json(header)
    return header


def _require_json(value: Any, depth: int = 0) -> None:
    """Raise SerializationError for a value that would not survive a round trip through JSON.

    Allowed are None, bools, valid Unicode strings, finite floats, ints of at most 64 bits, and
    lists and dicts of these, nested up to MAX_DEPTH. `depth` counts the levels above `value`.
    """
    if depth > MAX_DEPTH:
        raise SerializationError(f"the header nests more than {MAX_DEPTH} deep: make it flatter")
    if type(value) in (dict, list):
        inner = cast("list[Any]", value)
        if type(value) is dict:
            for name in inner:
                _require_text(name)
            inner = cast("dict[Any, Any]", value).values()
        for each in inner:
            # Most values are short texts: they need no call.
            if not (type(each) is str and each.isascii() and depth < MAX_DEPTH):
                _require_json(each, depth + 1)
    elif type(value) is str:
        _require_text(value)
    elif not (
        value is None
        or type(value) is bool
        or (type(value) is float and math.isfinite(value))
        or (type(value) is int and value.bit_length() <= 64)
    ):
        raise SerializationError(
            f"the header holds {_short(value)}: it takes None, bools, strings, finite numbers of "
            "at most 64 bits, and lists and dicts of them"
        )


def _require_text(value: Any) -> str:
    """Return the value; raise SerializationError unless it is a string that UTF-8 can encode."""
    try:
        if type(value) is str:
            if not value.isascii():
                value.encode("utf-8")
            return value
    except UnicodeEncodeError:
        pass  # half of a surrogate pair
    raise SerializationError(
        f"a name or text of a message is a string of Unicode, not {_short(value)}"
    )


def _require_shape(name: str, shape: Sequence[int]) -> None:
    """Raise SerializationError, with the tensor's name, for a shape that a message cannot have.

    That is a shape of more than MAX_DIMENSIONS dimensions, or a shape with a 0 of which the other
    dimensions multiply to more than MAX_EMPTY_NUMEL.
    """
    if len(shape) > MAX_DIMENSIONS:
        raise SerializationError(
            f"{_short(name)} has {len(shape)} dimensions, over {MAX_DIMENSIONS}"
        )
    if 0 in shape and math.prod(size or 1 for size in shape) > MAX_EMPTY_NUMEL:
        raise SerializationError(
            f"{_short(name)} is empty, and yet has the shape {_short(tuple(shape))}: leave it out"
        )


def _short(value: Any) -> str:
    """Return at most 80 characters: the repr of a value, or the message of an exception."""
    # A forged value must not fill a log.
    try:
        text = str(value) if isinstance(value, Exception) else repr(value)
    except ValueError:  # Python converts no int of more than 4300 digits
        text = f"a {type(value).__name__} with a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def pack_message(tensors: Mapping[str, Tensor], header: Mapping[str, JSON]) -> Message:
    """Return a message with this header, and the tensors packed in blobs, sorted by name.

    A blob has at most BLOB_BYTES of tensors, or one larger tensor. Raises SerializationError as
    `pack` does.
    """
    buckets = list[dict[str, Tensor]]()
    for name, tensor in sorted(tensors.items()):
        if not buckets or nbytes(buckets[-1]) + tensor.nbytes > BLOB_BYTES:
            buckets.append({})
        buckets[-1][name] = tensor
    packed_header = pack({}, header)
    return Message(packed_header, tuple(pack(bucket, {}) for bucket in buckets))


def unpack_message(
    message: Message, *, limit: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return (tensors, header) of a message that `pack_message` made, as `unpack` does.

    Raises SerializationError if the message exceeds `limit` bytes, is invalid, or has a tensor in
    two blobs.
    """
    if limit is not None and message.nbytes > limit:
        raise SerializationError(
            f"a message of {message.nbytes} bytes is larger than the limit, {limit}"
        )
    header_tensors, header = unpack(message.header)
    if header_tensors:
        raise SerializationError("the header of a message holds tensors")
    tensors = dict[str, Tensor]()
    for blob in message.blobs:
        blob_tensors, _ = unpack(blob)
        if duplicates := tensors.keys() & blob_tensors.keys():
            raise SerializationError(f"{min(duplicates)!r} is in two blobs of one message")
        tensors |= blob_tensors
    return tensors, header
