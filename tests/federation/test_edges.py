# SPDX-License-Identifier: Apache-2.0
"""Edge servers: a sum of partial sums of partial sums has the bits of one sum of all clients."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
import zoo
from torch import Tensor

from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.aggregation.factory import open_partial_sum
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.private import ClientDPAggregator
from fedplan.federation.aggregation.protocol import AggregationResult, Aggregator
from fedplan.federation.aggregation.robust import BufferedAggregator
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.tensors.named import digests, is_aux
from fedplan.training.fit import TrainArguments

CLIENTS = 23

Updates = dict[str, tuple[dict[str, Tensor], dict[str, Tensor], int]]

KINDS: dict[str, tuple[str, Defence]] = {
    "plain": ("fedavg", Defence()),
    "riders": ("scaffold", Defence()),
    "capped": ("fedavg", Defence(max_weight=12)),
    "held": ("fedavg", Defence(rule="median")),
    "private": ("fedavg", Defence()),
}


def made(kind: str) -> tuple[Aggregator, Updates]:
    """An open sum, and what clients send to it: some of them not all params."""
    name, defence = KINDS[kind]
    model = zoo.build("vit")
    agreement = Agreement(
        "edges", describe(model), method_by_name(name), TrainArguments(), defence=defence
    )
    global_state, draw = (
        GlobalState.initial(agreement, get_values(model, agreement.params)),
        Random(kind),
    )
    generator = torch.Generator().manual_seed(7)
    updates: Updates = {}
    for number in range(CLIENTS):
        drawn = {
            k: v + torch.randn(v.shape, generator=generator) for k, v in global_state.values.items()
        }
        values = {k: v for k, v in drawn.items() if not is_aux(k) and number % 5 < 4}
        values = values or {k: v for k, v in list(drawn.items())[:3] if not is_aux(k)}
        riders = {k: v for k, v in drawn.items() if is_aux(k) and number % 5 < 4}
        updates[f"c{number}"] = values, riders, draw.randint(1, 40)
    said: dict[str, Any] = {"kind": {"held": "buffered", "private": "client-dp"}.get(kind, "mean")}
    said |= {"roster": CLIENTS, "shared": list(global_state.values), "round": 1}
    said |= {"clipping_norm": 30.0, "noise_multiplier": 1.0, "divisor": 10.0, "sampling_rate": None}
    return open_partial_sum(agreement, global_state, said), updates


def summed(total: Aggregator, updates: Updates, names: list[str]) -> Aggregator:
    for name in names:
        values, riders, weight = updates[name]
        total.require(values, riders, weight)
        total.add(name, values, riders, weight)
    return total


def tree(empty: Aggregator, updates: Updates, names: list[str], draw: Random) -> Aggregator:
    """The sum of an edge: of its own clients, or of the edges below it, as messages bring them."""
    if len(names) < 3 or draw.random() < 0.2:
        return summed(empty.empty(), updates, names)
    total, places = empty.empty(), sorted(draw.sample(range(len(names) + 1), 2))
    parts = [names[: places[0]], names[places[0] : places[1]], names[places[1] :]]
    draw.shuffle(parts)
    for part in parts:
        tensors, facts = tree(empty, updates, part, draw).state()
        total.merge(tensors, json.loads(json.dumps(facts)))
    return total


def bits(total: Aggregator) -> object:
    """All that follows from a sum, bit by bit."""
    if isinstance(total, ClientDPAggregator):
        return digests(total.changes.mean()), total.count, total.within
    assert isinstance(total, MeanAggregator | BufferedAggregator)
    closed: AggregationResult = total.close()
    return digests(closed.means), digests(closed.aux), closed.drift, closed.defence


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_of_edges_gives_the_bits_of_one_sum(kind: str) -> None:
    total, updates = made(kind)
    expected = bits(summed(total.empty(), updates, list(updates)))
    for seed in range(3):
        draw, names = Random(seed), list(updates)
        draw.shuffle(names)
        assert bits(tree(total, updates, names, draw)) == expected


def test_clients_of_every_edge_count_as_unchanged_where_they_sent_nothing() -> None:
    plain, updates = made("plain")
    assert isinstance(plain, MeanAggregator)
    method = replace(plain.agreement.method, absent=True)
    total = MeanAggregator(replace(plain.agreement, method=method), plain.base, CLIENTS)
    expected = bits(summed(total.empty(), updates, list(updates)))
    assert bits(tree(total, updates, list(updates), Random(0))) == expected
