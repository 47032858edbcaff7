# SPDX-License-Identifier: Apache-2.0
"""Laws of messages: bit for bit there and back, and whatever else comes is a MessageError."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from safetensors.torch import load, save
from torch import Tensor, nn

from fedplan.tensors.serialization import (
    DTYPES,
    MAX_DEPTH,
    MAX_HEADER_BYTES,
    METADATA_KEY,
    SerializationError,
    pack,
    pack_message,
    parse_entries,
    tensor_view,
    unpack,
    unpack_message,
)

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)
NAMES = st.text(max_size=12).filter(lambda name: name != "__metadata__")
SINGLE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=10)
)
JSONS = st.recursive(
    SINGLE,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
HEADERS = st.dictionaries(st.text(max_size=8), JSONS, max_size=4)


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits in any dtype and shape, every other one not contiguous."""
    dtype = draw(st.sampled_from(sorted(DTYPES, key=str)))
    shape = draw(SHAPES)
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    size = math.prod(shape) * dtype.itemsize
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (size,), generator=seed, dtype=torch.uint8)
    made = raw.view(dtype).reshape(shape)
    return made.movedim(0, -1) if draw(st.booleans()) and made.dim() > 1 else made


MESSAGES = st.tuples(st.dictionaries(NAMES, tensors(), max_size=4), HEADERS)


@given(MESSAGES)
def test_every_message_comes_back_bit_for_bit(message: tuple[dict[str, Tensor], Any]) -> None:
    held, header = message
    data = pack(held, header)
    found, said = unpack(data, limit=len(data))
    assert json.dumps(said, sort_keys=True) == json.dumps(header, sort_keys=True)
    assert found.keys() == held.keys()
    for name, tensor in held.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert bits(found[name]) == bits(tensor)


@given(MESSAGES, st.randoms(use_true_random=False))
def test_the_same_message_is_the_same_bytes(
    message: tuple[dict[str, Tensor], dict[str, Any]], order: Any
) -> None:
    held, header = ([*each.items()] for each in message)
    order.shuffle(held)
    order.shuffle(header)
    assert pack(dict(held), dict(header)) == pack(*message)
    assert pack(*unpack(pack(*message))) == pack(*message)


def test_a_message_is_safetensors() -> None:
    data = pack({"b": torch.ones(2), "a": torch.zeros(())}, {"round": 3})
    assert load(data).keys() == {"a", "b"}
    found, said = unpack(save({"a": torch.ones(3)}, metadata={METADATA_KEY: '{"x": [1]}'}))
    assert found["a"].tolist() == [1, 1, 1]
    assert said == {"x": [1]}


def test_views_parameters_and_tied_tensors_can_be_sent() -> None:
    weight = nn.Parameter(torch.arange(6.0).reshape(2, 3))
    held = {"a": weight, "b": weight, "rows": weight[1:], "turned": weight.T}
    found, _ = unpack(pack(held, {}))
    for name, tensor in held.items():
        assert torch.equal(found[name], tensor)
    found["a"].zero_()
    assert torch.equal(found["b"], weight), "what comes back shares no memory"


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.zeros(0, 10**18), "leave it out"),
        (torch.zeros((1,) * 65), "65 dimensions"),
    ],
)
def test_what_no_message_holds_is_refused(tensor: Tensor, words: str) -> None:
    with pytest.raises(SerializationError, match=words):
        pack({"weight": tensor}, {})


def deep(levels: int) -> Any:
    return [] if levels == 0 else [deep(levels - 1)]


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, (1,), {1: 2}, b"", {3}, 10**30, 10**5000, (10**5000,), "\ud800"),
        *(deep(MAX_DEPTH), {"\ud800": 1}, object()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_no_header_holds_is_refused(value: Any) -> None:
    with pytest.raises(SerializationError):
        pack({}, {"x": value})


def test_names_that_cannot_be_sent_are_refused() -> None:
    for name in ("__metadata__", "\ud800"):
        with pytest.raises(SerializationError):
            pack({name: torch.zeros(1)}, {})
    with pytest.raises(SerializationError, match="shorter header"):
        pack({}, {"x": "y" * MAX_HEADER_BYTES})


def forged(head: Any, tail: bytes = b"", size: int | None = None) -> bytes:
    """A message by hand."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return (len(text) if size is None else size).to_bytes(8, "little") + text + tail


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


SAID = {"__metadata__": {METADATA_KEY: "{}"}}
A, B = entry("F32", [2], 0, 8), entry("F32", [2], 8, 16)
FORGERIES = {
    "nothing": b"",
    "seven bytes": b"1234567",
    "no head": bytes(8),
    "a head of 2**64 bytes": forged(SAID, size=2**64 - 1),
    "a head of 2**63 bytes": forged(SAID, size=2**63),
    "a head that ends later": forged(SAID, size=1000),
    "10**11 numbers": forged(SAID | {"a": entry("F32", [10**11], 0, 4 * 10**11)}),
    "10**11 numbers in 8 bytes": forged(SAID | {"a": entry("F32", [10**11], 0, 8)}, bytes(8)),
    "2**64 numbers": forged(SAID | {"a": entry("F32", [2**32, 2**32], 0, 0)}),
    "2**70 numbers": forged(SAID | {"a": entry("F32", [2**70], 0, 0)}),
    "a wide empty": forged(SAID | {"a": entry("F32", [0, 10**18], 0, 0)}),
    "a very wide empty": forged(SAID | {"a": entry("F32", [0, 2**40, 2**40], 0, 0)}),
    "many dimensions": forged(SAID | {"a": entry("F32", [1] * 10_000, 0, 4)}, bytes(4)),
    "a shape below zero": forged(SAID | {"a": entry("F32", [-2, -1], 0, 8)}, bytes(8)),
    "a shape of floats": forged(SAID | {"a": entry("F32", [2.0], 0, 8)}, bytes(8)),
    "a shape of bools": forged(SAID | {"a": entry("F32", [True], 0, 4)}, bytes(4)),
    "no shape": forged(SAID | {"a": {"dtype": "F32", "data_offsets": [0, 4]}}, bytes(4)),
    "overlap": forged(SAID | {"a": A, "b": entry("F32", [2], 4, 12)}, bytes(12)),
    "the same bytes twice": forged(SAID | {"a": A, "b": A}, bytes(8)),
    "a gap": forged(SAID | {"a": A, "b": entry("F32", [2], 12, 20)}, bytes(20)),
    "offsets that go back": forged(SAID | {"a": entry("F32", [2], 8, 0)}, bytes(8)),
    "offsets below zero": forged(SAID | {"a": entry("F32", [2], -8, 0)}, bytes(8)),
    "one offset": forged(SAID | {"a": entry("F32", [2], 0)}, bytes(8)),
    "beyond the end": forged(SAID | {"a": A, "b": B}, bytes(12)),
    "bytes left over": forged(SAID | {"a": A}, bytes(9)),
    "a wrong dtype": forged(SAID | {"a": entry("F33", [2], 0, 8)}, bytes(8)),
    "a dtype of half bytes": forged(SAID | {"a": entry("F4", [16], 0, 8)}, bytes(8)),
    "an unusual dtype": forged(SAID | {"a": entry("F8_E4M3FNUZ", [8], 0, 8)}, bytes(8)),
    "a dtype of no name": forged(SAID | {"a": entry(7, [2], 0, 8)}, bytes(8)),
    "bools of 7": forged(SAID | {"a": entry("BOOL", [2], 0, 2)}, b"\x01\x07"),
    "a list for an entry": forged(SAID | {"a": [1]}),
    "one name twice": forged(
        b'{"__metadata__":{"fedplan":"{}"},"a":%s,"a":%s}'
        % (json.dumps(A).encode(), json.dumps(B).encode()),
        bytes(16),
    ),
    "half a letter": forged(b'{"__metadata__":{"fedplan":"{}"},"\\ud800":%s}' % b"{}"),
    "no metadata": forged({}),
    "metadata of others": forged({"__metadata__": {"format": "pt"}}),
    "metadata of others too": forged({"__metadata__": {METADATA_KEY: "{}", "format": "pt"}}),
    "a list for metadata": forged({"__metadata__": [METADATA_KEY]}),
    "a header that is no text": forged({"__metadata__": {METADATA_KEY: {}}}),
    "a list for a head": forged([]),
    "utf-16": forged(json.dumps(SAID).encode("utf-16")),
    "a deep head": forged(b"[" * 100_000 + b"]" * 100_000),
    "a deep object": forged(b'{"a":' * 100_000),
    "a long number": forged(b'{"a":' + b"9" * 10_000 + b"}"),
    "a pickle in a head": forged(pickle.dumps({"a": 1})),
}
for _text in (
    *("", "[]", "3", "null", '"x"', "{", "{'a': 1}", '{"a": NaN}', '{"a": Infinity}'),
    *('{"a": -Infinity}', '{"a": 1e999}', '{"a": 1, "a": 2}', '{"a": "\\ud800"}', "{} {}"),
    *('{"a": ' + "9" * 5000 + "}", '{"a": 99999999999999999999999}', "\ufeff{}"),
    *('{"a": ' + "[" * depth + "]" * depth + "}" for depth in (33, 500, 5000, 100_000)),
):
    FORGERIES[f"the header {_text[:20]}, {len(_text)}"] = forged(
        {"__metadata__": {METADATA_KEY: _text}}
    )


@pytest.mark.parametrize("data", FORGERIES.values(), ids=FORGERIES.keys())
def test_forgeries_are_refused_before_anything_large_is_made(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(SerializationError) as caught:
            unpack(data)
        assert tracemalloc.get_traced_memory()[1] < 2**20 + 50 * len(data)
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 400


def test_a_message_over_the_limit_is_refused() -> None:
    data = pack({"a": torch.zeros(100)}, {})
    with pytest.raises(SerializationError, match=f"limit of {len(data) - 1}"):
        unpack(data, limit=len(data) - 1)
    with pytest.raises(SerializationError, match="the head of the message takes"):
        unpack(forged(b" " * (MAX_HEADER_BYTES + 1)))


VALID = pack({"a": torch.ones(2, 3), "b#scale": torch.tensor(2)}, {"round": 3})


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A message with a piece cut out, doubled, replaced or turned over."""
    data = bytearray(VALID)
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 12)))
        data[start:end] = draw(
            st.binary(max_size=8)
            | st.sampled_from([b"", data[start:end] * 2, b"9", b"[", b"}", b"-1", b"\xff" * 8])
        )
    return bytes(data)


@st.composite
def forgeries(draw: st.DrawFn) -> bytes:
    """A head of plausible words in the wrong places."""
    sizes = st.sampled_from([-1, 0, 1, 2, 3, 4, 8, 2**31, 2**63, 10**18, 1.5, None, "2", True])
    dtypes = st.sampled_from(["F32", "BF16", "I8", "BOOL", "F64", "F4", "F8_E8M0", "C64", "", 3])
    made = st.builds(
        lambda dtype, shape, offsets: entry(dtype, shape, *offsets),
        dtypes,
        st.lists(sizes, max_size=4) | sizes,
        st.lists(sizes, min_size=1, max_size=3),
    )
    names = st.sampled_from(["a", "b", "__metadata__", ""])
    head = SAID | draw(st.dictionaries(names, made | SINGLE, max_size=2))
    return forged(head, bytes(draw(st.integers(0, 24))))


@settings(max_examples=often(20_000))
@given(st.one_of(st.binary(max_size=80), mutated(), forgeries(), st.binary().map(forged)))
def test_any_bytes_are_a_message_or_a_message_error(data: bytes) -> None:
    try:
        found, said = unpack(data)
    except SerializationError as error:
        assert str(error)
    else:
        again, header = unpack(pack(found, said))
        assert {name: bits(t) for name, t in again.items()} == {
            n: bits(t) for n, t in found.items()
        }
        assert header == said


class Trap:
    """An object that acts when it is unpickled."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def traps(marker: Path) -> list[bytes]:
    """Twenty-five pickles that each leave the marker when they are read, and things around them."""
    acts = (Trap(os.system, f"touch {marker}"), Trap(open, str(marker), "w"))
    payloads = [pickle.dumps(act, protocol) for act in acts for protocol in range(6)]
    payloads += [pickle.dumps({"weight": act}) for act in acts]
    payloads += [torch_file(act) for act in acts]
    payloads += [numpy_file(act) for act in acts]
    payloads += [forged(pickle.dumps(act)) for act in acts]
    payloads += [forged(SAID | {"a": A}, pickle.dumps(act)) for act in acts]
    payloads += [pack({}, {})[:-2] + pickle.dumps(act) for act in acts]
    return [*payloads, forged({"__metadata__": {METADATA_KEY: pickle.dumps(acts[0], 0).decode()}})]


def torch_file(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save({"weight": value}, file)
    return file.getvalue()


def numpy_file(value: Any) -> bytes:
    file = io.BytesIO()
    numpy.savez(file, weight=numpy.array([value], dtype=object))
    return file.getvalue()


def test_no_pickle_is_ever_run(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    payloads = traps(marker)
    assert len(payloads) == 25
    for payload in payloads:
        with pytest.raises(SerializationError):
            unpack(payload)
        assert not marker.exists()
    pickle.loads(payloads[0])
    assert marker.exists(), "the trap itself works"


@given(st.data())
@settings(max_examples=often(400))
def test_a_layout_is_taken_where_the_library_takes_it_and_lies_in_the_bytes(data: Any) -> None:
    """Heads that were changed in one place: what safetensors refuses is refused, and else read."""
    whole = {"a": torch.arange(6).reshape(2, 3), "b": torch.ones(4).bfloat16(), "c": torch.empty(0)}
    entries = json.loads(_head(save(whole)))
    name, field = data.draw(st.sampled_from([(n, f) for n in whole for f in entries[n]]))
    change = data.draw(
        st.sampled_from([None, -1, 0, 1, 2**63, [], [1], [0, 48], [48, 56], "U8", "X"])
    )
    entries[name][field] = entries[name][field] if change is None else change
    body = save(whole)[8 + len(_head(save(whole))) :]
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    blob = len(text).to_bytes(8, "little") + text + body
    try:
        wanted = load(blob)
    except Exception:
        with pytest.raises(ValueError):
            parse_entries(entries, len(body))
        return
    found = {p.name: tensor_view(blob, 8 + len(text), p) for p in parse_entries(entries, len(body))}
    assert found.keys() == wanted.keys()
    for each, tensor in wanted.items():
        same = found[each].view(torch.uint8), tensor.view(torch.uint8)
        assert tensor.dtype == found[each].dtype and torch.equal(*same)


def _head(data: bytes) -> bytes:
    return data[8 : 8 + int.from_bytes(data[:8], "little")]


def test_what_is_unpacked_lies_in_the_message() -> None:
    message = pack_message({"a": torch.ones(1000), "b": torch.zeros(7).half()}, {})
    (blob,) = message.blobs
    first = torch.frombuffer(blob, dtype=torch.uint8).data_ptr()
    for tensor in unpack_message(message)[0].values():
        assert first < tensor.data_ptr() < first + len(blob)
