# SPDX-License-Identifier: Apache-2.0
"""What an example adds to a private step is at most the clip long, as it is really added.

Layers are asked for a weighted sum of their outputs, so that a test chooses both the inputs and the
slopes: tokens that cancel, numbers as large or as small as floats get, layers wide and long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from fedplan.models.params import Kind, Param
from fedplan.models.params import Rows as Rows_
from fedplan.privacy.dpsgd.factors import DenseFactor, EmbeddingFactor, squared_norm_bounds
from fedplan.privacy.dpsgd.ghost_clipping import add_ghost_clipped
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    TrainedTensor,
    add_clipped_one_by_one,
)

HEIGHT = 6
WORDS = 5


class Tied(nn.Module):
    """A table whose rows are looked up, and which is the weight of a dense layer after that."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        # The head hears what the test says, and the table's rows count by themselves.
        return torch.cat([self.head(x), self.table(ids)], -1)


class Scaled(nn.Module):
    """A layer that nobody knows, which runs again for each example."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "dense": lambda width: nn.Linear(width, HEIGHT),
    "dense, other way": lambda width: Conv1D(HEIGHT, width),
    "dense, some rows": lambda width: nn.Linear(width, HEIGHT, bias=False),
    "table": lambda width: nn.Embedding(WORDS, width),
    "tied": Tied,
    "norm": nn.LayerNorm,
    "unknown": Scaled,
}
PATTERNS = ("free", "cancels", "cancels all", "one huge", "denormal", "overflows", "nan", "zero")


class One(nn.Module):
    """One layer, and what it is asked: the sum of its outputs, weighted by `slopes`."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if isinstance(self.layer, Tied):
            return self.layer(x, ids)
        return self.layer(ids if isinstance(self.layer, nn.Embedding) else x)


def loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    said: Any = model(batch["x"], batch["ids"])
    return (said * batch["slopes"][..., : said.shape[-1]].to(said.dtype)).flatten(1).sum(1).mean()


class Rows:
    """Rows as they are given."""

    def __init__(self, rows: Mapping[str, Tensor]) -> None:
        self.rows = dict(rows)

    def __len__(self) -> int:
        return len(self.rows["x"])

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {name: rows[indices] for name, rows in self.rows.items()}


def patterned(
    pattern: str, count: int, tokens: int, width: int, size: float, slope: float, seed: int
) -> Rows:
    """Rows of which the first follows a pattern and the others are free."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, tokens, width, generator=source) * size
    slopes = torch.randn(count, tokens, HEIGHT + WORDS + width, generator=source) * slope
    ids = torch.randint(0, WORDS, (count, tokens), generator=source)
    if pattern.startswith("cancels"):
        # Each other token takes back what the one before it said, but for its last digits.
        signs = torch.tensor([1.0, -1.0]).repeat(tokens)[:tokens, None]
        far = 0.0 if pattern == "cancels all" else 2e-4
        sparse = (torch.arange(width) % 64 == 0).float()
        rest = (1 - sparse) * torch.randn(width, generator=source).sign() * far
        x[0] = (sparse + signs * rest) * size
        slopes[0] = slopes[0, :1] * signs
        ids[0] = 0
    if pattern == "one huge":
        x[0, 0], slopes[0, -1] = x[0, 0] * 1e8, slopes[0, -1] * 1e8
    if pattern == "denormal":
        x[0], slopes[0] = x[0].sign() * 1e-42, slopes[0].sign() * 1e-42
    if pattern == "overflows":
        x[0, 0], slopes[0] = 3e38, 3e38
    if pattern == "nan":
        slopes[0, 0, 0] = float("nan")
    if pattern == "zero":
        slopes[0] = 0
    return Rows({"x": x, "slopes": slopes, "ids": ids})


def subject_of(layer: str, width: int, rows: Rows, kind: str) -> Objective:
    model = One(LAYERS[layer](width)).eval()
    if kind in ("float64", "bfloat16"):
        dtype = getattr(torch, kind)
        model = model.to(dtype)
        rows.rows = {k: v.to(dtype) if v.is_floating_point() else v for k, v in rows.rows.items()}
    tensors = tuple(
        TrainedTensor(name, tensor, _some_rows(name, tensor) if layer == "dense, some rows" else ())
        for name, tensor in model.named_parameters()
    )
    return Objective(model, tensors, rows, loss, torch.bfloat16 if kind == "autocast" else None)


def _some_rows(name: str, tensor: Tensor) -> tuple[Param, ...]:
    """The second third of what is otherwise frozen."""
    some = Rows_(dim=0, start=HEIGHT // 3, size=HEIGHT // 3, step=HEIGHT)
    return (Param(name, Kind.KEY, (1, HEIGHT // 3, tensor.shape[1]), rows=some),)


def views(subject: Objective, totals: Mapping[str, Tensor]) -> Tensor:
    found = [v for each in subject.tensors for v in each.views(totals[each.name]).values()]
    return torch.cat([each.reshape(-1) for each in found])


def added(subject: Objective, rows: list[int], clip: float, way: Any) -> tuple[Tensor, Tensor]:
    total = ClippedSum(subject.tensors, clip)
    way(subject, torch.tensor(rows), total)
    return views(subject, total.sums), total.norms


@settings(max_examples=often(300))
@given(
    layer=st.sampled_from(sorted(LAYERS)),
    pattern=st.sampled_from(PATTERNS),
    kind=st.sampled_from(["float32", "autocast", "float64", "bfloat16"]),
    width=st.sampled_from([1, 3, 64, 130, 600, 4096]),
    tokens=st.sampled_from([1, 2, 3, 17, 64]),
    size=st.floats(-20, 20),
    slope=st.floats(-20, 20),
    clip=st.floats(-6, 6),
    seed=st.integers(0, 10),
)
def test_what_is_added_of_an_example_is_no_longer_than_the_clip(
    layer: str, pattern: str, kind: str, width: int, tokens: int,
    size: float, slope: float, clip: float, seed: int,
) -> None:  # fmt: skip
    bound = 2.0**clip if clip else 1.0
    rows = patterned(pattern, 4, tokens, width, 10.0**size, 10.0**slope, seed)
    subject = subject_of(layer, width, rows, kind)
    for way in (add_ghost_clipped, add_clipped_one_by_one):
        alone, lengths = added(subject, [0], bound, way)
        assert alone.isfinite().all() and float(alone.norm()) <= bound * (1 + 1e-6)
        whole, _ = added(subject, [1, 0, 2, 3], bound, way)
        without, _ = added(subject, [1, 2, 3], bound, way)
        far = float((whole - without).norm())
        assert far <= bound * (1 + 1e-6), (way, far / bound)
        assert lengths.isfinite().all() or not alone.any()


def nearly_cancelling(width: int, block: int, heads: int, far: float) -> DenseFactor:
    """Two tokens whose products leave only what float32 sums of wide layers lose."""
    source = torch.Generator().manual_seed(0)
    large = (torch.arange(width) % block < heads).float()
    rest = (1 - large) * far * torch.randn(width, generator=source).sign()
    slopes = torch.zeros(1, 2, 64)
    slopes[0, 0, 0], slopes[0, 1, 0] = 1.0, -1.0
    return DenseFactor(torch.stack([large + rest, large - rest])[None], slopes)


@pytest.mark.parametrize("width", [512, 1024, 4096, 65536])
def test_wide_layers_whose_tokens_cancel_are_not_taken_for_short(width: int) -> None:
    for block in (64, 256, 1024):
        for heads in (1, 8, 32):
            for far in (1e-4, 1.5e-4, 2e-4, 3e-4):
                outer = nearly_cancelling(width, block, heads, far)
                exact = (outer.backprops[0].double().T @ outer.activations[0].double()).norm()
                found = squared_norm_bounds((outer,)).sqrt()
                assert 1 <= float(found / exact) <= 2


@settings(max_examples=often(200))
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(8, 300), st.integers(8, 300))
def test_bounds_are_hardly_longer_than_gradients(
    seed: int, tokens: int, width: int, height: int
) -> None:
    source = torch.Generator().manual_seed(seed)
    inputs, rows = (torch.randn(2, tokens, width, generator=source) for _ in range(2))
    slopes = torch.randn(2, tokens, height, generator=source)
    ids = torch.randint(0, height, (2, tokens), generator=source)
    for factors in (
        (DenseFactor(inputs, slopes),),
        (DenseFactor(inputs, slopes), EmbeddingFactor(ids, rows)),
    ):
        for i in range(2):
            exact = slopes[i].double().T @ inputs[i].double()
            if len(factors) == 2:
                exact = exact.index_add(0, ids[i], rows[i].double())
            longer = float(squared_norm_bounds(factors)[i].sqrt() / exact.norm())
            assert 1 <= longer <= 1 + 1e-5
