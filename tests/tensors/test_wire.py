# SPDX-License-Identifier: Apache-2.0
"""Laws of codecs: the error, the bytes and the text are what the codec says beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from torch import Tensor

from fedplan.reader import MAX_DEPTH
from fedplan.tensors.codecs import Codec, CodecError, TensorSpec
from fedplan.tensors.compression import (
    CODECS,
    bf16,
    delta,
    int4,
    int8,
    parse_codec,
    pipe,
    plain,
    prune,
    topk,
)
from fedplan.tensors.positions import pack_positions, packed_size, unpack_positions
from fedplan.tensors.serialization import pack, unpack

FRACTIONS = st.sampled_from([0.01, 0.1, 1 / 3, 0.5, 1.0]) | st.floats(1e-9, 1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def made(codec: Callable[..., Codec], fraction: float) -> Codec:
    """A codec, with a fraction if it takes one."""
    return codec(fraction) if signature(codec).parameters else codec()


def sends_floats(codec: Callable[..., Codec]) -> bool:
    """Whether another codec may follow in a pipe."""
    specs = made(codec, 0.3).coded_specs(TensorSpec((2, 2), torch.float32))
    return specs[""].dtype.is_floating_point


MIDDLE = [make for name, make in CODECS.items() if name not in ("plain", "delta", "pipe")]
LAST = [make for make in MIDDLE if not sends_floats(make)]
INNER = [make for make in MIDDLE if make not in LAST]
"""The codecs that may stand anywhere in a pipe; a new one is tried in every order."""


def orders() -> list[Codec]:
    """Every pipe of different codecs in every order that a pipe allows."""
    middle, sizes = [made(codec, 0.3) for codec in INNER], range(len(INNER) + 1)
    inner = [each for size in sizes for each in permutations(middle, size) if allowed(each)]
    lasts = [(), *((made(codec, 0.3),) for codec in LAST)]
    ends = [(a, b) for a in ((), (delta(),)) for b in lasts]
    return [pipe(*first, *each, *last) for each in inner for first, last in ends]


def allowed(inner: Sequence[Codec]) -> bool:
    """Topk leaves no rows, so prune may not come after it."""
    words = [codec.text[:4] for codec in inner]
    return not {"topk", "prun"} <= {*words} or words.index("prun") < words.index("topk")


EVERY = orders()


@st.composite
def codecs(draw: st.DrawFn) -> Codec:
    """A pipe in any order that a pipe allows, with fractions of its own."""
    middle = [made(codec, draw(FRACTIONS)) for codec in INNER]
    inner = draw(st.lists(st.sampled_from(middle), max_size=4, unique=True).filter(allowed))
    first = [delta()] if draw(st.booleans()) else []
    last = [made(draw(st.sampled_from(LAST)), draw(FRACTIONS))] if draw(st.booleans()) else []
    return pipe(*first, *inner, *last)


@st.composite
def values(draw: st.DrawFn, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Numbers of one or of every magnitude, zeros, equal numbers, or the ends of the range."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    info = torch.finfo(dtype)
    reach = int(math.log2(info.max)) - 8
    noise = torch.randn(shape, generator=seed, dtype=torch.float64).clamp(-8, 8)
    kind = draw(st.sampled_from(["usual", "scaled", "mixed", "zeros", "equal", "ends"]))
    if kind == "usual":
        return noise.to(dtype)
    if kind == "scaled":
        return (noise * 2.0 ** draw(st.integers(-reach - 20, reach))).to(dtype)
    if kind == "mixed":
        powers = torch.randint(-reach - 20, reach, shape, generator=seed)
        return (noise * torch.pow(2.0, powers.double())).to(dtype)
    if kind == "ends":
        ends = [info.max, info.smallest_normal * info.eps, info.smallest_normal, 0.0]
        return torch.full(shape, draw(st.sampled_from(ends)), dtype=dtype).copysign(noise.to(dtype))
    fill = 0.0 if kind == "zeros" else draw(st.floats(-100, 100))
    return torch.full(shape, fill, dtype=dtype)


SHAPES = st.sampled_from([(), (0,), (1,), (7,), (3, 0), (0, 3), (1, 1), (5, 3), (4, 2, 3), (40,)])


@st.composite
def pairs(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values and a base of the same names, shapes and dtypes."""
    sent, base = dict[str, Tensor](), dict[str, Tensor]()
    for name in draw(st.lists(st.sampled_from(["b", "a.weight", "a"]), unique=True, max_size=2)):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(SHAPES)
        sent[name] = draw(values(dtype, shape))
        near = sent[name].double() * draw(st.sampled_from([1.0, 0.5, 1.001]))
        most = torch.finfo(dtype).max
        near = near.clamp(-most, most).to(dtype)
        base[name] = near if draw(st.booleans()) else draw(values(dtype, shape))
    return sent, base


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sizes(coded: dict[str, Tensor], name: str) -> int:
    """The bytes of the coded parts of a name."""
    return sum(
        t.numel() * t.element_size() for key, t in coded.items() if key.split("#")[0] == name
    )


def check_laws(codec: Codec, sent: dict[str, Tensor], base: dict[str, Tensor], seed: int) -> None:
    coded = codec.encode(sent, base, seeded(seed))
    bound = codec.error_bounds(sent, base)
    found = codec.decode(unpack(pack(coded, {}))[0], base)
    assert found.keys() == sent.keys() == bound.keys()
    for name, value in sent.items():
        assert found[name].dtype == value.dtype
        assert found[name].shape == value.shape
        error = (found[name].double() - value.double()).abs()
        assert (error <= bound[name]).all(), (codec.text, error.max(), bound[name])
        assert sizes(coded, name) == codec.nbytes(value.shape, value.element_size())


@given(codecs(), pairs(), st.integers(0, 2**32))
def test_no_error_is_larger_than_the_bound_and_the_bytes_are_those_stated(
    codec: Codec, pair: tuple[dict[str, Tensor], dict[str, Tensor]], seed: int
) -> None:
    try:
        codec.encode(*pair, seeded(seed))
    except CodecError as error:
        # The difference of two numbers at opposite ends of the range is beyond it.
        assert "delta" in codec.text and "not finite" in str(error)
    else:
        check_laws(codec, *pair, seed)


@pytest.mark.parametrize("codec", EVERY, ids=str)
def test_every_order_of_codecs_keeps_the_laws(codec: Codec) -> None:
    noise = seeded(5)
    for dtype in DTYPES:
        base = {"w": torch.randn(9, 6, generator=noise).to(dtype), "b": torch.zeros(9).to(dtype)}
        steps = {name: t + 0.01 * torch.randn(t.shape, generator=noise) for name, t in base.items()}
        check_laws(codec, {name: t.to(dtype) for name, t in steps.items()}, base, 1)


def test_the_bound_is_not_idle() -> None:
    """A bound of infinity would keep the law too: it stays within what the codecs promise."""
    base = {"w": torch.randn(64, 8, generator=seeded(1))}
    sent = {"w": base["w"] + 0.01 * torch.randn(64, 8, generator=seeded(2))}
    for codec in EVERY:
        coded = sent["w"] - base["w"] if "delta" in codec.text else sent["w"]
        kept = "topk" in codec.text or "prune" in codec.text
        most = coded.abs().max().item() * (1.05 if kept else 0.17 if "int4" in codec.text else 0.03)
        assert codec.error_bounds(sent, base)["w"] <= most + 1e-6, codec.text


def test_plain_is_exact_and_passes_what_is_not_finite() -> None:
    sent = {"w": torch.tensor([math.nan, math.inf, -0.0])}
    found = plain().decode(plain().encode(sent, sent, seeded()), sent)
    assert found["w"].view(torch.int32).tolist() == sent["w"].view(torch.int32).tolist()
    for codec in EVERY[1:]:
        for asked in (
            lambda w: w.encode(sent, sent, seeded()),
            lambda w: w.error_bounds(sent, sent),
        ):
            with pytest.raises(CodecError, match=r"'w'.*only plain"):
                asked(codec)


def test_what_is_not_float_is_sent_as_it_is() -> None:
    sent = {"step": torch.tensor(3), "mask": torch.tensor([True, False])}
    for codec in EVERY:
        coded = codec.encode(sent, sent, seeded())
        for found in (coded, codec.decode(coded, sent)):
            assert pack(found, {}) == pack(sent, {})
        assert codec.error_bounds(sent, sent) == {"step": 0.0, "mask": 0.0}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", [int8(), int4()], ids=str)
def test_quantized_numbers_are_right_on_average(codec: Codec, dtype: torch.dtype) -> None:
    count = 200_000
    for wanted in (0.3, -0.3, 0.001, 0.5, 1.0):
        sent = {"w": torch.full((count + 1,), wanted, dtype=dtype)}
        sent["w"][-1] = 1.0
        coded = codec.encode(sent, sent, seeded(7))
        scale = coded["w#scale"].double()
        steps = codec.decode(coded, sent)["w"][:-1].double() / scale
        exact = sent["w"][0].double() / scale
        if dtype.itemsize < 4:  # decoding rounds, too: compare whole steps
            steps = steps.round()
        spread = max(math.sqrt((exact % 1 * (1 - exact % 1)).item() / count), 1e-6)
        assert abs(steps.mean() - exact) < 5 * spread, wanted


def test_with_four_bits_each_row_has_its_own_scale() -> None:
    """So that small rows keep their numbers beside a large one; an odd count has a last half."""
    rows = torch.tensor([[7.0, -7, 3], [0.07, 0.01, -0.02], [0, 0, 0]])
    coded = int4().encode({"w": rows}, {"w": rows}, seeded())
    assert coded["w"].nbytes == 5 and coded["w#scale"].shape == (3,)
    assert torch.allclose(int4().decode(coded, {"w": rows})["w"], rows, rtol=1e-6)


@given(st.sets(st.integers(0, 40)), st.integers(1, 3000))
@settings(max_examples=often(300))
def test_positions_come_back_and_fit_their_size(chosen: set[int], room: int) -> None:
    positions, total = (
        torch.tensor(sorted(chosen), dtype=torch.int64),
        max(chosen, default=0) + room,
    )
    packed = pack_positions(positions, total)
    assert len(packed) == packed_size(len(chosen), total)
    assert torch.equal(unpack_positions(packed, len(chosen), total), positions)
    packed[total % len(packed)] ^= 1 + total % 255
    try:
        other = unpack_positions(packed, len(chosen), total)
    except ValueError:
        return
    assert torch.equal(pack_positions(other, total), packed)  # no position has two forms


def test_a_set_bit_behind_the_last_number_is_refused() -> None:
    packed = pack_positions(torch.tensor([1, 4]), 13)
    packed[1] |= 1
    with pytest.raises(ValueError, match="behind the last position"):
        unpack_positions(packed, 2, 13)
    base = {"w": torch.ones(3)}
    coded = int4().encode(base, base, seeded())
    coded["w"][-1] |= 16
    with pytest.raises(CodecError, match="behind the last step"):
        int4().decode(coded, base)


@pytest.mark.parametrize(
    ("fraction", "bits"), [(0.5, 1.0), (0.1, 0.53), (0.01, 0.09), (0.001, 0.013)]
)
def test_positions_take_few_bits(fraction: float, bits: float) -> None:
    assert 8 * packed_size(int(1e6 * fraction), 1_000_000) <= bits * 1e6


def test_topk_keeps_the_largest_and_of_equal_ones_the_first() -> None:
    sent = {"w": torch.tensor([[1.0, -3.0, 0.5], [1.0, 2.0, 1.0]])}
    coded = topk(0.5).encode(sent, sent, seeded())
    assert unpack_positions(coded["w#index"], 3, 6).tolist() == [0, 1, 4]
    assert topk(0.5).decode(coded, sent)["w"].tolist() == [[1, -3, 0], [0, 2, 0]]
    assert topk(0.5).error_bounds(sent, sent) == {"w": 1.0}


def test_prune_keeps_the_rows_of_the_largest_norm() -> None:
    sent = {"w": torch.tensor([[1.0, 1.0], [0.0, 3.0], [2.0, 2.0]]), "b": torch.ones(3)}
    coded = prune(0.5).encode(sent, sent, seeded())
    assert unpack_positions(coded["w#rows"], 2, 3).tolist() == [1, 2]
    found = prune(0.5).decode(coded, sent)
    assert found["w"].tolist() == [[0, 0], [0, 3], [2, 2]]
    assert found["b"].tolist() == [1, 1, 1]
    assert prune(0.5).error_bounds(sent, sent) == {"w": 1.0, "b": 0.0}


@pytest.mark.parametrize("size", [1e200, 1e-200, 5e-324, 0.0])
def test_prune_finds_the_largest_rows_of_any_magnitude(size: float) -> None:
    rows = torch.tensor([[1.0, 1.0], [0.0, 3.0], [2.0, 2.0]], dtype=torch.float64) * size
    coded = prune(0.5).encode({"w": rows}, {"w": rows}, seeded())
    chosen = unpack_positions(coded["w#rows"], 2, 3).tolist()
    assert chosen == ([1, 2] if size else [0, 1])


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_too_many_items_are_refused(fraction: float) -> None:
    sent = {"w": torch.zeros(2**31, 0)}
    with pytest.raises(CodecError, match="'w': 2147483648 items are too many"):
        prune(fraction).encode(sent, sent, seeded())


@given(codecs(), pairs(), st.integers(0, 2**32))
@settings(max_examples=often(300))
def test_the_same_seed_gives_the_same_bytes_in_any_order_of_names(
    codec: Codec, pair: tuple[dict[str, Tensor], dict[str, Tensor]], seed: int
) -> None:
    try:
        coded = codec.encode(*pair, seeded(seed))
    except CodecError:
        return
    turned = dict(reversed(pair[0].items()))
    assert pack(codec.encode(turned, pair[1], seeded(seed)), {}) == pack(coded, {})


def test_another_seed_gives_other_bytes() -> None:
    sent = {"w": torch.randn(1000, generator=seeded())}
    first, second = (int8().encode(sent, sent, seeded(seed))["w"] for seed in (1, 2))
    assert not torch.equal(first, second)


def test_the_sender_keeps_its_values_and_no_graph_is_sent() -> None:
    sent = {"w": torch.randn(8, 4, generator=seeded()).requires_grad_()}
    kept = sent["w"].detach().clone()
    for codec in EVERY:
        coded = codec.encode(sent, sent, seeded())
        found = codec.decode(coded, sent)["w"]
        assert not found.requires_grad
        assert not any(t.requires_grad for t in coded.values())
        assert torch.equal(sent["w"], kept)


WEIRD = (math.nan, math.inf, -1, -128, 0, 7, 2**31 - 1)


def damage(draw: st.DrawFn, coded: dict[str, Tensor]) -> dict[str, Tensor]:
    """The coded tensors with one of them left out, added, renamed, reshaped, recast or changed."""
    made = dict(coded)
    key = draw(st.sampled_from(sorted(made)))
    tensor = made.pop(key)
    kind = draw(st.sampled_from(["left out", "renamed", "reshaped", "recast", "changed", "added"]))
    if kind == "renamed":
        made[draw(st.sampled_from(["x", key + "#", key + "#scale", "w#index", "w#rows"]))] = tensor
    elif kind == "reshaped":
        made[key] = draw(st.sampled_from([tensor[None], tensor.flatten()[:-1], tensor.flatten()]))
    elif kind == "recast":
        made[key] = tensor.to(draw(st.sampled_from([*DTYPES, torch.int8, torch.int64, torch.bool])))
    elif kind == "changed":
        flat = tensor.clone().flatten()
        flat[draw(st.integers(0, len(flat) - 1))] = fitting(draw(st.sampled_from(WEIRD)), flat)
        made[key] = flat.reshape(tensor.shape)
    elif kind == "added":
        made |= {key: tensor, draw(st.sampled_from(["x", "w#scale", "w#index", "#"])): tensor}
    return made


def fitting(value: float, like: Tensor) -> float:
    """The value, or the nearest that the dtype holds."""
    if like.dtype.is_floating_point:
        return value
    info = torch.iinfo(like.dtype)
    return int(max(info.min, min(info.max, value))) if math.isfinite(value) else info.min


@given(codecs(), st.data())
def test_damaged_tensors_decode_to_finite_values_or_a_codec_error(codec: Codec, data: Any) -> None:
    base = {"w": torch.randn(6, 4, generator=seeded(1)), "b": torch.ones(3)}
    coded = codec.encode({name: t * 2 for name, t in base.items()}, base, seeded())
    bad = damage(data.draw, coded)
    try:
        found = codec.decode(bad, base)
    except CodecError as error:
        assert str(error)
    else:
        assert {key: (t.shape, t.dtype) for key, t in bad.items()} == {
            key: (t.shape, t.dtype) for key, t in coded.items()
        }
        assert codec == plain() or all(t.isfinite().all() for t in found.values())


@pytest.mark.parametrize(
    ("codec", "key", "value"),
    [
        (int8(), "w#scale", math.nan),
        (int8(), "w#scale", math.inf),
        (int8(), "w#scale", 0.0),
        (int8(), "w#scale", -1.0),
        (int8(), "w", -128),
        (int4(), "w#scale", math.nan),
        (int4(), "w#scale", 0.0),
        (int4(), "w", 0),
        (topk(0.5), "w#index", 255),
        (topk(0.5), "w#index", 0),
        (topk(0.1), "w#index", 255),
        (topk(0.1), "w#index", 0),
        (prune(0.5), "w#rows", 255),
        (delta(), "w", math.nan),
        (bf16(), "w", math.inf),
    ],
)
def test_what_encode_cannot_have_made_is_refused(codec: Codec, key: str, value: float) -> None:
    base = {"w": torch.ones(3, 4)}
    coded = codec.encode(base, base, seeded())
    coded[key] = torch.full_like(coded[key], value)
    with pytest.raises(CodecError, match="'w'"):
        codec.decode(coded, base)


def test_names_and_forms_that_differ_from_the_base_are_refused() -> None:
    one, two = {"w": torch.ones(2)}, {"w": torch.ones(3)}
    for sent, base in ((one, two), (one, {}), ({}, one), (one, {"w": torch.ones(2).half()})):
        with pytest.raises(CodecError, match="'w'"):
            delta().encode(sent, base, seeded())
        with pytest.raises(CodecError, match="'w'"):
            delta().error_bounds(sent, base)
    with pytest.raises(CodecError, match="rename it"):
        plain().encode({"w#scale": torch.ones(2)}, {"w#scale": torch.ones(2)}, seeded())
    with pytest.raises(CodecError, match="itemsize is 3"):
        plain().nbytes((2,), 3)


@given(codecs())
def test_reading_the_text_gives_the_codec(codec: Codec) -> None:
    assert parse_codec(codec.text) == codec
    assert parse_codec(codec.text.replace(" ", "\n\t")).text == codec.text
    assert eval(codec.text, {"__builtins__": {}}, CODECS) == codec
    assert hash(parse_codec(codec.text)) == hash(codec)


def test_pipes_are_flat_and_plain_adds_nothing() -> None:
    assert pipe() == plain() == pipe(plain(), pipe())
    assert pipe(bf16()) == bf16() == pipe(plain(), bf16())
    nested = pipe(pipe(delta(), topk(0.5)), int8())
    assert nested == pipe(delta(), pipe(topk(0.5), int8())) == pipe(delta(), topk(0.5), int8())
    assert topk(1) == topk(1.0)


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("", 0, "the text ends here"),
        ("delta", 0, "write delta(...)"),
        ("pipe(delta(), bf61())", 14, "did you mean bf16"),
        ("Topk(0.1)", 0, "did you mean topk"),
        ("gzip()", 0, "it has bf16, delta"),
        ("pipe(delta()", 4, "never closed"),
        ("pipe(delta(),", 13, "the text ends here"),
        ("pipe(delta() bf16())", 13, "a comma or ')' is missing"),
        ("pipe(delta() | bf16())", 13, "a comma or ')' is missing"),
        ("pipe(,)", 5, "',' cannot stand"),
        ("~delta()", 0, "'~' cannot stand"),
        ("delta())", 7, "nothing may follow"),
        ("delta(3)", 0, "does not take 1 arguments"),
        ("topk()", 0, "does not take 0 arguments"),
        ("topk(0)", 0, "over 0 and up to 1"),
        ("pipe(topk(-0.5))", 5, "over 0 and up to 1"),
        ("topk(1.5)", 0, "over 0 and up to 1"),
        ("topk(1e999)", 0, "over 0 and up to 1"),
        ("topk('1')", 0, "over 0 and up to 1"),
        ("topk(0.1.2)", 5, "'0.1.2' is not a number"),
        ("topk(delta())", 0, "over 0 and up to 1"),
        ("pipe(0.5)", 0, "takes codecs such as"),
        ("0.5", 0, "takes codecs such as"),
        ("topk(__import__('os'))", 5, "no '__import__' in the codec language"),
        ("pipe(bf16(), delta())", 0, "put it first"),
        ("pipe(int8(), bf16())", 0, "put it last"),
        ("pipe(topk(0.1), bf16(), prune(0.2))", 0, "no rows: put prune first"),
        ("pipe(topk(0.1), topk(0.2))", 0, "appears twice"),
        ("pipe(" * 100, 5 * MAX_DEPTH, "nested more than"),
        ("x" * 2000, 0, "longer than 1000"),
    ],
)
def test_errors_point_at_the_character_and_name_the_remedy(
    text: str, position: int, words: str
) -> None:
    with pytest.raises(CodecError) as caught:
        parse_codec(text)
    assert (caught.value.position, words in str(caught.value)) == (position, True)


SOUP = st.lists(
    st.sampled_from([*CODECS, *"(),.-e ", "0.1", "1e-3", "\n", "é", "\x00", "²", "topk(0.5)"]),
    max_size=20,
).map("".join)


@settings(max_examples=often(5000))
@given(st.one_of(st.text(max_size=60), SOUP))
def test_any_string_is_a_codec_or_a_codec_error(text: str) -> None:
    try:
        codec = parse_codec(text)
    except CodecError as error:
        assert error.position is not None and 0 <= error.position <= len(text)
    else:
        assert parse_codec(codec.text) == codec
