# SPDX-License-Identifier: Apache-2.0
"""Laws of the exact sum: one result for every order and tree, judged by fractions."""

from __future__ import annotations

import json
import math
import os
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from often import often
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.tensors import accumulator, chunks, ring, sums
from fedplan.tensors.sums import MAX_WEIGHT, ExactSum, SumError

Update = tuple[dict[str, Tensor], int]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (1,), (5,), (2, 3), (0, 4), (3, 1, 2))
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
EXACT_FROM = 2.0**-24
WEIGHTS = st.integers(1, 10**6)


@pytest.fixture(params=[2**17, 4])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator, "_CHUNK", request.param)
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", request.param)


def bits(tensor: Tensor) -> tuple[object, ...]:
    words = tensor.contiguous().view(-1).view(WORDS[tensor.element_size()])
    return (tensor.dtype, tuple(tensor.shape), *words.tolist())


def content(total: ExactSum) -> object:
    """All that a sum says, bit by bit."""
    tensors, facts = total.to_tensors()
    means = {name: bits(mean) for name, mean in total.mean().items()}
    return [(name, bits(tensor)) for name, tensor in tensors.items()], json.dumps(facts), means


def values(dice: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    top = 4.7 if dtype is torch.float16 else 6
    centre = dice.uniform(-12, top)
    sizes = [
        10 ** (dice.uniform(-12, top) if dice.random() < 0.5 else centre)
        for _ in range(math.prod(shape))
    ]
    found = torch.tensor([dice.choice((-1, 1)) * size for size in sizes], dtype=dtype)
    return found.view(shape)


def updates(dice: random.Random, count: int) -> list[Update]:
    """Updates with partly overlapping names, each name with one dtype and shape."""
    kinds = {name: (dice.choice(SHAPES), dice.choice(DTYPES)) for name in "abcd"}
    made: list[Update] = []
    for _ in range(count):
        names = dice.sample(sorted(kinds), dice.randint(0, 4))
        weight = int(10 ** dice.uniform(0, 6))
        made.append(({name: values(dice, *kinds[name]) for name in names}, weight))
    return made


def total_of(arrivals: list[Update]) -> ExactSum:
    total = ExactSum()
    for each, weight in arrivals:
        total.add(each, weight)
    return total


def tree_of(dice: random.Random, arrivals: list[Update]) -> ExactSum:
    """Partial sums over random groups, merged in a random tree."""
    workers = [ExactSum() for _ in range(dice.randint(1, len(arrivals) + 1))]
    for each, weight in arrivals:
        dice.choice(workers).add(each, weight)
    while len(workers) > 1:
        left, right = (workers.pop(dice.randrange(len(workers))) for _ in "lr")
        left.merge(right)
        workers.append(left)
    return workers[0]


def unit(value: Fraction, dtype: torch.dtype) -> Fraction:
    """The distance of neighbours in a dtype around a value."""
    facts = torch.finfo(dtype)
    exponent = math.frexp(float(abs(value)))[1] - 1 if value else -1000
    return Fraction(facts.eps) * Fraction(2) ** max(exponent, math.frexp(facts.tiny)[1] - 1)


def true_mean(arrivals: list[Update], name: str) -> list[Fraction]:
    held = [(each[name], weight) for each, weight in arrivals if name in each]
    columns = zip(*(tensor.flatten().tolist() for tensor, _ in held), strict=True)
    weights = [weight for _, weight in held]
    return [
        sum((Fraction(x) * w for x, w in zip(column, weights, strict=True)), Fraction(0))
        / sum(weights)
        for column in columns
    ]


def on_grid(tensor: Tensor) -> Tensor:
    return tensor.where(tensor.abs() >= EXACT_FROM, torch.zeros_like(tensor))


@given(st.integers(0, 2**32), st.integers(1, 8))
@settings(max_examples=often(500))
def test_order_and_tree_do_not_matter(seed: int, count: int) -> None:
    dice = random.Random(seed)
    arrivals = updates(dice, count)
    expected = content(total_of(arrivals))
    dice.shuffle(arrivals)
    assert content(total_of(arrivals)) == expected
    assert content(tree_of(dice, arrivals)) == expected


def test_a_thousand_orders_and_trees(chunk: None) -> None:
    dice = random.Random(1)
    arrivals = updates(dice, 16)
    expected = content(total_of(arrivals))
    for _ in range(often(500)):
        dice.shuffle(arrivals)
        assert content(total_of(arrivals)) == expected
        assert content(tree_of(dice, arrivals)) == expected


@given(st.integers(0, 2**32), st.integers(1, 6), st.booleans())
@settings(max_examples=often(1000))
def test_mean_against_fractions(seed: int, count: int, tiny: bool) -> None:
    arrivals = updates(random.Random(seed), count)
    if not tiny:
        arrivals = [({n: on_grid(t) for n, t in each.items()}, w) for each, w in arrivals]
    for name, mean in total_of(arrivals).mean().items():
        exact = not tiny and mean.dtype is not torch.float64
        slack = Fraction(0) if exact else Fraction(2) ** -48
        for got, true in zip(mean.flatten().tolist(), true_mean(arrivals, name), strict=True):
            coarse = torch.float32 if mean.dtype is torch.float64 else mean.dtype
            assert abs(Fraction(got) - true) <= unit(true, coarse) * Fraction(51, 100) + slack


FLOATS = st.floats(-16, 16, width=32) | st.floats(-(2.0**30), 2.0**30, width=32)


@given(st.lists(st.tuples(FLOATS, WEIGHTS), min_size=1, max_size=8))
@example([(16.0, 10**6)] * 8)
@example([(16.0, 2**11), (-16.0, 2**11), (16.000001907348633, 1)])
@example([(2.0**30, 10**5), (-(2.0**30), 10**5), (2.0**-24, 1)])
def test_every_float32_counts_as_its_nearest_step(pairs: list[tuple[float, int]]) -> None:
    total = total_of([({"x": torch.tensor(value)}, weight) for value, weight in pairs])
    steps = sum(round(Fraction(value) * 2**47) * weight for value, weight in pairs)
    tensors, _ = total.to_tensors()
    assert int(tensors["x.upper"]) * 2**sums.CARRY_BITS + int(tensors["x.lower"]) == steps


@given(st.floats(EXACT_FROM, 2.0**30, width=32), st.floats(EXACT_FROM, 1, width=32), WEIGHTS)
def test_what_cancels_leaves_the_rest_exact(large: float, small: float, weight: int) -> None:
    arrivals = [({"x": torch.tensor([each])}, weight) for each in (large, small, -large)]
    for order in (arrivals, arrivals[::-1], arrivals[1:] + arrivals[:1]):
        assert total_of(order).mean({"x": weight})["x"].item() == small


def test_a_weight_is_that_many_senders(chunk: None) -> None:
    update = {"x": values(random.Random(2), (37,), torch.float32)}
    once, often = total_of([(update, 12)]), total_of([(update, 1)] * 12)
    assert bits(once.mean()["x"]) == bits(often.mean()["x"])
    assert (once.weights(), once.senders()) == ({"x": 12}, {"x": 1})
    assert (often.weights(), often.senders()) == ({"x": 12}, {"x": 12})


def test_each_name_is_divided_by_its_own_senders() -> None:
    one, three = torch.ones(2), torch.full((2,), 3.0)
    total = total_of([({"a": one, "b": one}, 1), ({"a": three}, 3), ({}, 5)])
    assert {n: m.tolist() for n, m in total.mean().items()} == {"a": [2.5, 2.5], "b": [1.0, 1.0]}
    assert total.mean({"a": 20, "b": 4, "c": 1})["a"].tolist() == [0.5, 0.5]
    assert (total.weights(), total.senders()) == ({"a": 4, "b": 1}, {"a": 2, "b": 1})
    assert ExactSum().mean() == {}


def test_any_layout_and_gradients_are_welcome_and_untouched() -> None:
    wide = torch.randn(300, 700).requires_grad_()
    before = wide.detach().clone()
    total = total_of([({"x": wide.t()[::3], "y": wide.expand(2, 300, 700)}, 1)])
    assert torch.equal(total.mean()["x"], before.t()[::3])
    assert torch.equal(total.mean()["y"], before.expand(2, 300, 700))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_and_large_tensors_change_nothing(threads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    large = [torch.randn(300_001, generator=generator) * 10**k for k in range(-3, 3)]
    torch.set_num_threads(threads)
    try:
        total = total_of([({"x": each}, 1000) for each in large])
        total.add({"x": sum(large[1:], large[0]).neg()}, 1000)
    finally:
        torch.set_num_threads(1)
    steps = [each.double().mul(2.0**47).round() for each in large]
    steps.append(sum(large[1:], large[0]).neg().double().mul(2.0**47).round())
    places = range(0, 300_001, 997)
    expected = [sum(int(each[at]) for each in steps) * 1000 for at in places]
    tensors, _ = total.to_tensors()
    upper, lower = tensors["x.upper"].tolist(), tensors["x.lower"].tolist()
    assert [upper[at] * 2**sums.CARRY_BITS + lower[at] for at in places] == expected


GOOD = torch.tensor([1.0, -2.0])
REFUSED: dict[str, tuple[object, object, str]] = {
    "nan": (torch.tensor([float("nan"), 1.0]), 1, "b holds nan"),
    "late nan": (torch.tensor([1.0, float("nan")]), 1, "b holds nan"),
    "infinity": (torch.tensor([1.0, float("inf")]), 1, "b holds inf"),
    "minus infinity": (torch.tensor([float("-inf"), 1.0]), 1, "b holds -inf"),
    "huge": (torch.tensor([1.0, 2.0**41]), 1, "b holds 2199023255552.0"),
    "shape": (torch.ones(3), 1, r"b is float32 \(3,\), but was float32 \(2,\)"),
    "as many, other shape": (torch.ones(2, 1), 1, r"b is float32 \(2, 1\)"),
    "dtype": (torch.ones(2).double(), 1, "b is float64"),
    "whole numbers": (torch.ones(2).long(), 1, "b is int64: send one of"),
    "no weight": (GOOD, 0, "weight 0 is not"),
    "negative weight": (GOOD, -1, "weight -1 is not"),
    "real weight": (GOOD, 1.0, "weight 1.0 is not"),
    "true weight": (GOOD, True, "weight True is not"),
    "overflow": (torch.tensor([2.0**40, 0.0]), 2**11, "the sum of b could pass 2251799813685248"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_update_leaves_the_sum_as_it_was(case: str) -> None:
    tensor, weight, message = REFUSED[case]
    total = total_of([({"a": GOOD, "b": GOOD}, 3)])
    before = content(total)
    with pytest.raises(SumError, match=message):
        total.add({"a": GOOD, "new": GOOD, "b": tensor}, weight)  # pyright: ignore
    assert content(total) == before
    assert issubclass(SumError, FedplanError)


@given(st.floats(1, 2.0**40), st.integers(1, MAX_WEIGHT))
@settings(max_examples=often(100))
def test_a_sum_is_exact_up_to_the_moment_it_refuses(value: float, weight: int) -> None:
    total, tensor, count = ExactSum(), torch.tensor(value, dtype=torch.float64), 0
    try:
        for count in range(100):  # noqa: B007
            total.add({"x": tensor}, weight)
    except SumError:
        assert (count + 1) * weight * (Fraction(value) + Fraction(2) ** -47) >= 2**51
    if count:
        assert abs(total.mean()["x"].item() - value) <= value * 2.0**-51 + 2.0**-48


def test_no_weight_above_the_limit_is_added_or_read() -> None:
    total = total_of([({"a": GOOD}, MAX_WEIGHT)])
    with pytest.raises(SumError, match="weight 134217729 is not an int from 1 to 134217728"):
        total.add({"a": GOOD}, MAX_WEIGHT + 1)
    tensors, facts = total.to_tensors()
    facts["a"] |= {"weight": MAX_WEIGHT + 1}  # pyright: ignore
    with pytest.raises(SumError, match="a is not part of a sum"):
        ExactSum.from_tensors(tensors, facts)


def test_a_peak_bounds_a_value_that_is_rounded_up_to_a_step() -> None:
    values = {"a": torch.tensor([1.75], dtype=torch.float64) * sums.GRID}
    tensors, facts = total_of([(values, 1)]).to_tensors()
    assert int(tensors["a.lower"]) == 2 == facts["a"]["reach"]  # pyright: ignore


def test_a_refused_merge_leaves_both_as_they_were() -> None:
    near = ({"a": GOOD, "b": torch.full((2,), 2.0**40)}, 1500)
    for first, second in (
        (near, near),
        (near, ({"c": GOOD, "b": GOOD.double()}, 1)),
        (near, ({"a": GOOD, "b": torch.ones(3)}, 1)),
    ):
        mine, theirs = total_of([first]), total_of([second])
        before = content(mine), content(theirs)
        with pytest.raises(SumError):
            mine.merge(theirs)
        assert (content(mine), content(theirs)) == before


def test_merged_sums_carry_before_their_lower_counts_overflow() -> None:
    quarter = ({"x": torch.tensor([16.0])}, 2**10)  # 2**61 steps, and the lower counts hold 2**63
    total = ExactSum()
    for _ in range(5):
        total.merge(total_of([quarter]))
    assert content(total) == content(total_of([quarter] * 5))


def test_a_sum_carries_before_its_lower_counts_reach_their_end() -> None:
    total = total_of([({"x": torch.tensor([16.0])}, 2**11)] * 2)  # 2**63 steps
    assert total.mean()["x"].tolist() == [16.0]


def test_a_merged_sum_is_a_copy() -> None:
    mine, theirs = ExactSum(), total_of([({"a": GOOD}, 1)])
    mine.merge(theirs)
    mine.add({"a": GOOD * 20}, 5000)
    mine.merge(mine)
    assert content(theirs) == content(total_of([({"a": GOOD}, 1)]))
    assert content(mine) == content(total_of([({"a": GOOD}, 1), ({"a": GOOD * 20}, 5000)] * 2))


@pytest.mark.parametrize("over", [{}, {"a": 0}, {"a": 1.5}, {"a": True}])
def test_a_mean_needs_a_divisor(over: dict[str, int]) -> None:
    with pytest.raises(SumError, match="a cannot be divided by"):
        total_of([({"a": GOOD}, 1)]).mean(over)


def test_a_mean_that_its_dtype_cannot_hold_is_refused() -> None:
    total = total_of([({"a": torch.full((2,), 60000.0, dtype=torch.float16)}, 2)])
    assert total.mean()["a"].tolist() == [60000.0, 60000.0]
    with pytest.raises(SumError, match="mean of a is too large"):
        total.mean({"a": 1})


@given(st.integers(0, 2**32), st.integers(1, 6))
@settings(max_examples=often(200))
def test_written_and_read_it_is_the_same_sum(seed: int, count: int) -> None:
    dice = random.Random(seed)
    arrivals = updates(dice, 2 * count)
    first, second = total_of(arrivals[:count]), total_of(arrivals[count:])
    tensors, facts = first.to_tensors()
    again = ExactSum.from_tensors(tensors, json.loads(json.dumps(facts)))
    assert content(again) == content(first)
    again.merge(second)
    assert content(again) == content(total_of(arrivals))
    assert content(ExactSum.from_tensors(tensors, facts)) == content(first)


SPOILED: dict[str, Callable[[dict[str, Tensor], dict[str, object]], object]] = {
    "no tensor": lambda t, f: t.pop("a.upper"),
    "no fact": lambda t, f: f.pop("reach"),
    "more facts": lambda t, f: f.update(load=1),
    "other dtype": lambda t, f: f.update(dtype="int8"),
    "weight as text": lambda t, f: f.update(weight="3"),
    "reach as text": lambda t, f: f.update(reach="3"),
    "weight 0": lambda t, f: f.update(weight=0),
    "negative reach": lambda t, f: f.update(reach=-1),
    "too far": lambda t, f: f.update(reach=2**98),
    "more senders than weight": lambda t, f: f.update(senders=4),
    "float counts": lambda t, f: t.update({"a.lower": t["a.lower"].float()}),
    "other shape": lambda t, f: t.update({"a.lower": t["a.lower"].repeat(2)}),
    "lower too large": lambda t, f: t.update({"a.lower": t["a.lower"] + 2**36}),
    "least upper": lambda t, f: t.update({"a.upper": t["a.upper"] * 0 - 2**63}),
    "negative lower": lambda t, f: t.update({"a.lower": t["a.lower"] - 2**36}),
    "upper beyond reach": lambda t, f: t.update({"a.upper": t["a.upper"] + 2**40}),
}


@pytest.mark.parametrize("case", SPOILED)
def test_what_is_not_a_sum_is_not_read(case: str) -> None:
    tensors, facts = total_of([({"a": GOOD}, 3)]).to_tensors()
    SPOILED[case](tensors, facts["a"])  # pyright: ignore
    with pytest.raises(SumError, match="a is not part of a sum"):
        ExactSum.from_tensors(tensors, facts)


@given(st.integers(-(2**127), 2**127 - 1), st.integers(-(2**127), 2**127 - 1))
@example(2**64, 2**64)
@example(2**64, 1)
@example(2**64 - 1, 1)
def test_words_are_added_and_subtracted_as_integers_that_wrap_around(one: int, other: int) -> None:
    for change, exact in ((ring.add_words, one + other), (ring.subtract_words, one - other)):
        words = ring.words_from_ints([one])
        change(words, ring.words_from_ints([other]))
        assert (ring.ints_from_words(words)[0] - exact) % 2**128 == 0


def test_memory_does_not_grow_with_updates() -> None:
    small = {"a": torch.rand(1000), "b": torch.rand(10, 10)}
    ten, thousand = (total_of([(small, 3)] * count) for count in (10, 1000))
    assert ten.nbytes == thousand.nbytes == 8 * 1100
    for _ in range(1000):
        thousand.add({"a": small["a"] * 2**20}, MAX_WEIGHT // 2**20)
    assert thousand.nbytes == 8 * 1100 + 8 * 1000


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.nightly
def test_a_thousand_updates_of_100_megabytes_stream_through() -> None:
    buffer, total = torch.rand(25_000_000), ExactSum()
    peaks: list[int] = []
    for turn in range(1000):
        buffer[turn] += 1
        total.add({"x": buffer}, 1 + turn % 7)
        peaks.append(resident())
    assert max(peaks[10:]) - max(peaks[:10]) < 8e6, (peaks[9], max(peaks))
    assert total.nbytes == 8 * 25_000_000
