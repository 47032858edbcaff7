# SPDX-License-Identifier: Apache-2.0
"""Laws of chunks: cut and joined, what is worked out over tensors is what each of them gives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from torch import Tensor

from fedplan.tensors import chunks
from fedplan.tensors.chunks import (
    chunk_tensors,
    make_chunks,
    max_magnitudes,
    peaks_and_squared_distances,
    squared_distances,
)
from fedplan.tensors.sums import ExactSum

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SHAPES = ((), (1,), (5,), (2, 3), (0, 4), (3, 1, 2), (11,), (4, 7))


def drawn(seed: int, count: int = 9) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = dict[str, Tensor]()
    for number in range(count):
        at = torch.randint(len(SHAPES), (2,), generator=generator).tolist()
        value = torch.randn(SHAPES[at[0]], generator=generator).to(DTYPES[at[1] % len(DTYPES)])
        found[f"p{number}"] = value
    return found


@pytest.fixture(params=[2**16, 8, 1], autouse=True)
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_NUMEL", request.param)


@pytest.mark.parametrize("seed", range(6))
def test_chunks_hold_every_number_once_in_order(seed: int) -> None:
    values = drawn(seed)
    found, ends = make_chunks(values), 0
    for chunk in found:
        assert (
            chunk.start == ends and chunk.gather(values).numel() == chunk.size <= chunks.CHUNK_NUMEL
        )
        assert len({values[piece.name].dtype for piece in chunk.slices}) == 1
        ends += chunk.size
    pieces = [piece for chunk in found for piece in chunk.slices]
    held = [f"{p.name} {at}" for p in pieces for at in range(p.start, p.stop)]
    assert held == [f"{name} {at}" for name, value in values.items() for at in range(value.numel())]


@pytest.mark.parametrize("seed", range(6))
def test_peaks_and_distances_are_those_of_each_tensor(seed: int) -> None:
    values = drawn(seed)
    base = {
        name: value.flip(0) * 0.5 if value.dim() else value * 2 for name, value in values.items()
    }
    chunked = chunk_tensors(values)
    peaks, squares = peaks_and_squared_distances(chunked, chunk_tensors(base, chunked))
    assert (peaks, squares) == (max_magnitudes(chunked), squared_distances(values, base))
    for name, value in values.items():
        assert peaks[name] == (float(value.abs().max()) if value.numel() else 0.0)
        plain = float((value - base[name]).flatten().square().sum(dtype=torch.float64))
        assert math.isclose(squares[name], plain, rel_tol=1e-13, abs_tol=0)


@pytest.mark.parametrize("place", range(5))
def test_a_nan_is_seen_wherever_it_is(place: int) -> None:
    values = {"a": torch.ones(4), "b": torch.ones(5), "c": torch.ones(2)}
    values["b"][place] = math.nan
    peaks = max_magnitudes(chunk_tensors(values))
    assert math.isnan(peaks["b"]) and [peaks[name] for name in "ac"] == [1.0, 1.0]


@given(st.integers(0, 2**32))
@settings(max_examples=often(60))
def test_joined_names_are_summed_as_each_alone(seed: int) -> None:
    """Updates of all names, of some of them, and of values that need the upper counts."""
    whole = drawn(seed)
    some = {name: value for name, value in whole.items() if hash((name, seed)) % 3}
    large = {name: value * 40 for name, value in whole.items()}
    arrivals = [(whole, 3), (some, 10**6), (large, 7), (whole, 10**7)]
    total = ExactSum()
    for values, weight in arrivals:
        total.add(values, weight)
    means = total.mean()
    for name in whole:
        alone = ExactSum()
        for values, weight in arrivals:
            if name in values:
                alone.add({name: values[name]}, weight)
        assert means[name].dtype == whole[name].dtype
        assert torch.equal(means[name], alone.mean()[name])
        (tensors, facts), (own, said) = total.to_tensors(), alone.to_tensors()
        assert facts[name] == said[name]
        assert all(torch.equal(tensors[key], value) for key, value in own.items())


def test_to_add_changes_no_update() -> None:
    values = {f"p{at}": torch.full((3,), 0.1, dtype=dtype) for at, dtype in enumerate(DTYPES)}
    before = {name: value.clone() for name, value in values.items()}
    ExactSum().add(values, 5)
    squared_distances(values, {name: value * 0 for name, value in values.items()})
    max_magnitudes(chunk_tensors(values))
    assert all(torch.equal(value, before[name]) for name, value in values.items())
