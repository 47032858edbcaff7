# SPDX-License-Identifier: Apache-2.0
"""Partial sums: worker processes open a part of a round's aggregator, add updates, and return it.

Merging partial sums gives the same bits as one sum, in whatever order they are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation import (
    Aggregator,
    BufferedAggregator,
    MeanAggregator,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_dp import ClientDPAggregator
from fedplan.federation.global_state import GlobalState
from fedplan.privacy.mechanisms.gaussian import GaussianMechanism
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum

TensorsAndJson = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and all else as JSON."""

MEAN, BUFFERED, CLIENT_DP = "mean", "buffered", "client-dp"
"""Values of "kind" in the JSON of a partial sum: mean, buffered and client-level DP aggregators."""


def describe_sum(aggregator: Aggregator) -> dict[str, Any]:
    """Return the JSON from which a worker opens a partial sum; contains no updates and no secret.

    For mean, buffered and client-level DP aggregators. Raises FedplanError for other aggregators
    (secure aggregation), which have no partial sums.
    """
    if isinstance(aggregator, ClientDPAggregator):
        mechanism = aggregator.mechanism
        return {
            "kind": CLIENT_DP,
            "shared": list(mechanism.public_shapes),
            "round": aggregator.number,
            "clipping_norm": mechanism.clipping_norm,
            "noise_multiplier": mechanism.noise_multiplier,
            "divisor": mechanism.divisor,
            "sampling_rate": mechanism.sampling_rate,
        }
    if isinstance(aggregator, BufferedAggregator):
        return {"kind": BUFFERED, "roster": aggregator.roster}
    if isinstance(aggregator, MeanAggregator):
        return {"kind": MEAN, "roster": aggregator.roster}
    raise _no_partial_sums(aggregator)


def open_partial_sum(
    agreement: Agreement, global_state: GlobalState, description: Mapping[str, Any]
) -> Aggregator:
    """Return a worker's empty partial sum from the `description` that `describe_sum` returned.

    Agreement and global state must equal the server's; the global values are not copied.
    """
    if description["kind"] == CLIENT_DP:
        shared = {key: global_state.values[key] for key in description["shared"]}
        shapes = {key: (tuple(value.shape), value.dtype) for key, value in shared.items()}
        names = ("clipping_norm", "noise_multiplier", "divisor", "sampling_rate")
        settings = (description[name] for name in names)
        mechanism = GaussianMechanism(shapes, *settings)
        return ClientDPAggregator(None, mechanism, global_state.values, description["round"])
    kind = BufferedAggregator if description["kind"] == BUFFERED else MeanAggregator
    return kind(agreement, global_state.values, description["roster"])


def empty_copy(aggregator: Aggregator) -> Aggregator:
    """Return an aggregator of the same round without updates.

    Raises FedplanError for an aggregator without partial sums (`describe_sum`).
    """
    if isinstance(aggregator, ClientDPAggregator):
        return ClientDPAggregator(
            aggregator.guard, aggregator.mechanism, aggregator.base, aggregator.number
        )
    if isinstance(aggregator, BufferedAggregator | MeanAggregator):
        return type(aggregator)(aggregator.agreement, aggregator.base, aggregator.roster)
    raise _no_partial_sums(aggregator)


def export_partial_sum(aggregator: Aggregator) -> TensorsAndJson:
    """Return (tensors, JSON) of a partial sum, for `merge_partial_sum` in another process.

    The tensors are not copied: send the tensors before the aggregator changes. Raises FedplanError
    for an aggregator without partial sums (`describe_sum`).
    """
    if isinstance(aggregator, MeanAggregator):
        sums = {
            "values": aggregator.values,
            "aux": aggregator.aux,
            "products": aggregator.products.total,
        }
        tensors, facts = _export_sums(sums)
        return tensors, {
            "kind": MEAN,
            "sums": facts,
            "squares": aggregator.drift.squares,
            "weight": aggregator.weight,
            "capped": aggregator.capped,
        }
    if isinstance(aggregator, ClientDPAggregator):
        tensors, facts = _export_sums({"changes": aggregator.changes})
        counts = {"count": aggregator.count, "within": aggregator.within}
        return tensors, {"kind": CLIENT_DP, "sums": facts, **counts}
    if isinstance(aggregator, BufferedAggregator):
        # Clients have numbers, because a client's name may contain any character.
        tensors, clients = dict[str, Tensor](), list(aggregator.values)
        for number, client in enumerate(clients):
            tensors |= {f"{number}/value/{k}": v for k, v in aggregator.values[client].items()}
            tensors |= {f"{number}/aux/{k}": v for k, v in aggregator.aux[client].items()}
        weights = [aggregator.weights[client] for client in clients]
        return tensors, {"kind": BUFFERED, "clients": clients, "weights": weights}
    raise _no_partial_sums(aggregator)


def merge_partial_sum(aggregator: Aggregator, tensors: Tensors, fields: Mapping[str, Any]) -> None:
    """Add a partial sum to the aggregator of the round, in place.

    `tensors` and `fields` (JSON) are the result of `export_partial_sum`; the aggregator may keep
    the tensors. Raises FedplanError if the partial sum is of another kind than the aggregator.
    """
    sums = dict[str, ExactSum]()
    for sum_name, facts in fields.get("sums", {}).items():
        prefix = f"{sum_name}/"
        raw = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        sums[sum_name] = ExactSum.from_raw(raw, facts)
    if isinstance(aggregator, MeanAggregator) and fields["kind"] == MEAN:
        part = MeanAggregator(aggregator.agreement, aggregator.base, aggregator.roster)
        part.values, part.aux = sums["values"], sums["aux"]
        part.products.total, part.drift.squares = sums["products"], dict(fields["squares"])
        part.weight = fields["weight"]
        part.capped = {name: (weight, cap) for name, (weight, cap) in fields["capped"].items()}
        aggregator.merge(part)
    elif isinstance(aggregator, ClientDPAggregator) and fields["kind"] == CLIENT_DP:
        part = ClientDPAggregator(None, aggregator.mechanism, aggregator.base, aggregator.number)
        part.changes, part.count, part.within = sums["changes"], fields["count"], fields["within"]
        aggregator.merge(part)
    elif isinstance(aggregator, BufferedAggregator) and fields["kind"] == BUFFERED:
        clients: list[str] = fields["clients"]
        groups = {group: [dict[str, Tensor]() for _ in clients] for group in ("value", "aux")}
        for name, tensor in tensors.items():
            number, group, key = name.split("/", 2)
            groups[group][int(number)][key] = tensor
        part = BufferedAggregator(aggregator.agreement, aggregator.base, aggregator.roster)
        part.values |= zip(clients, groups["value"], strict=True)
        part.aux |= zip(clients, groups["aux"], strict=True)
        part.weights |= zip(clients, fields["weights"], strict=True)
        aggregator.merge(part)
    else:
        raise FedplanError(
            f"a partial sum of kind {fields['kind']} cannot be merged into a "
            f"{type(aggregator).__name__}"
        )


def _no_partial_sums(aggregator: Aggregator) -> FedplanError:
    return FedplanError(f"{type(aggregator).__name__} has no partial sums: use --runner local")


def _export_sums(sums: Mapping[str, ExactSum]) -> TensorsAndJson:
    """Return (the sums' own tensors, called `sum/tensor`, and JSON facts by sum)."""
    tensors, facts = dict[str, Tensor](), dict[str, Any]()
    for name, total in sums.items():
        counts, facts[name] = total.export_raw()
        tensors |= {f"{name}/{key}": value for key, value in counts.items()}
    return tensors, facts
