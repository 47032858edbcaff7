# SPDX-License-Identifier: Apache-2.0
"""Drift from sums alone is the spread of the clients' changes, in any order of arrival."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

from fedplan.federation.aggregation.drift import Drift
from fedplan.models.params import Kind, Param
from fedplan.tensors.chunks import squared_distances
from fedplan.tensors.sums import ExactSum

PARAMS = (
    Param("q", Kind.QUERY, (3, 4)),
    Param("k", Kind.QUERY, (5,)),
    Param("v", Kind.VALUE, (7,)),
)


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2**32)), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
@settings(max_examples=often(300))
def test_drift_is_the_spread_around_the_mean_whatever_the_order(
    clients: list[tuple[int, int]], chance: object
) -> None:
    base = {p.key: torch.ones(p.shape) for p in PARAMS}
    updates = [(weight, _values(seed)) for weight, seed in clients]
    told = _told(base, updates)
    chance.shuffle(updates)  # type: ignore[attr-defined]
    assert _told(base, updates) == told

    total = sum(weight for weight, _ in updates)
    for kind in ("query", "value"):
        keys = [p.key for p in PARAMS if p.kind == kind]
        changes = [
            (w, torch.cat([(v[k] - base[k]).flatten() for k in keys]).double()) for w, v in updates
        ]
        mean = sum(w * change for w, change in changes) / total
        apart = sum(w * (change - mean).square().sum().item() for w, change in changes) / total
        assert abs(told[kind][0] - apart) < 1e-4 * (1 + apart)
        assert abs(told[kind][1] - mean.square().sum().item()) < 1e-4 * (1 + apart)


def test_one_client_does_not_drift() -> None:
    base = {p.key: torch.zeros(p.shape) for p in PARAMS}
    told = _told(base, [(3, _values(1))])
    assert [apart for apart, _ in told.values()] == [0.0, 0.0]


def test_what_nobody_sent_has_no_drift() -> None:
    base = {p.key: torch.zeros(p.shape) for p in PARAMS}
    update = {"v": torch.ones(7)}
    assert set(_told(base, [(1, update)])) == {"value"}


def _values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {p.key: torch.randn(p.shape, generator=generator) for p in PARAMS}


def _told(
    base: dict[str, torch.Tensor], updates: list[tuple[int, dict[str, torch.Tensor]]]
) -> dict[str, tuple[float, float]]:
    sums, drift = ExactSum(), Drift()
    for weight, values in updates:
        sums.add(values, weight)
        drift.add(squared_distances(values, base), weight)
    return drift.by_kind(PARAMS, base, sums.mean(), sums.weights())
