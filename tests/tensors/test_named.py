# SPDX-License-Identifier: Apache-2.0
"""Laws of digests: they tell every change of a tensor, and are worked out once."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor

from fedplan.tensors import named
from fedplan.tensors.compression import parse_codec
from fedplan.tensors.named import DigestCache, all_finite, digest, same_bits

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)


def test_a_digest_tells_bytes_shape_and_dtype_apart() -> None:
    tensor = torch.arange(6, dtype=torch.float32)
    found = [tensor, tensor.view(2, 3), tensor.view(torch.int32), tensor + 1, -tensor.abs() * 0]
    assert len({digest(each) for each in found}) == len(found)
    assert digest(tensor) == digest(tensor.clone()) and len(digest(tensor)) == 16
    assert digest(tensor[::2]) == digest(tensor[::2].clone()), "a view is what it shows"


def test_it_is_worked_out_once_until_somebody_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Tensor]()
    whole = named.full_digest
    monkeypatch.setattr(
        named, "full_digest", lambda tensor: (seen.append(tensor), whole(tensor))[1]
    )
    known, tensor = DigestCache(), torch.zeros(4)
    first = known.short_digest(tensor)
    assert (known.short_digest(tensor), len(seen)) == (first, 1)
    tensor.add_(1)
    assert known.short_digest(tensor) == digest(tensor) != first
    tensor.view(2, 2)[0].mul_(3)
    assert known.short_digest(tensor) == digest(tensor)
    seen.clear()
    other = tensor.clone()
    assert known.short_digest(other) == known.short_digest(tensor) and len(seen) == 1
    seen.clear()
    del tensor, other
    gc.collect()
    assert not known._entries, "what nobody holds is forgotten"  # pyright: ignore


def test_the_plain_wire_hands_on_the_tensors_themselves() -> None:
    """So that at a server in the same process their digests are known."""
    values, wire = {"b": torch.ones(2), "a": torch.zeros(3)}, parse_codec("plain()")
    base = {name: value * 0 for name, value in values.items()}
    coded = wire.encode(values, base, torch.Generator())
    assert list(coded) == ["a", "b"]
    assert all(each is values[name] for name, each in wire.decode(coded, base).items())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 24])
def test_the_same_bits_are_told_for_any_length(dtype: torch.dtype, count: int) -> None:
    one = torch.ones(count + 1).to(dtype)
    assert same_bits(one, one.clone()) and same_bits(one[1:], one[1:].clone())
    other = one.clone()
    other[count] = 0
    assert not same_bits(one, other) and not same_bits(one, one.double())
    assert not same_bits(one, one.unsqueeze(0))


def test_bits_are_compared_not_values() -> None:
    nan, zero = torch.tensor([math.nan] * 2), torch.zeros(2)
    assert same_bits(nan, nan.clone()) and not same_bits(zero, -zero)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_found(bad: float) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.ones(5, dtype=dtype)
        assert all_finite(tensor)
        tensor[3] = bad
        assert not all_finite(tensor)
    assert all_finite(torch.zeros(0))
