# SPDX-License-Identifier: Apache-2.0
"""Partial sums: a round's open sum as a worker begins it, adds to it, and hands it back.

A sum of partial sums has the bits of one sum, in whatever order and however often they are merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation import HeldSum, OpenSum, PlainSum, PrivateSum
from fedplan.federation.agreement import Agreement
from fedplan.federation.world import World
from fedplan.privacy.mechanisms.gaussian import Mechanism
from fedplan.tensors.named import Tensors
from fedplan.tensors.sums import ExactSum

Sent = tuple[dict[str, Tensor], dict[str, Any]]
"""Tensors by name, and all else as JSON."""

PLAIN, HELD, PRIVATE = "plain", "held", "private"


def opening(total: OpenSum) -> dict[str, Any]:
    """What a worker must know to open its part of a sum, as JSON; a secret is none of it."""
    if isinstance(total, PrivateSum):
        made = total.mechanism
        said = {"bound": made.bound, "noise": made.noise, "over": made.over, "rate": made.rate}
        return {"kind": PRIVATE, "shared": list(made.shared), "round": total.number, **said}
    if isinstance(total, HeldSum):
        return {"kind": HELD, "roster": total.roster}
    if isinstance(total, PlainSum):
        return {"kind": PLAIN, "roster": total.roster}
    raise FedplanError(f"a sum of {type(total).__name__} has no parts: run it by --runner local")


def opened(agreement: Agreement, world: World, said: Mapping[str, Any]) -> OpenSum:
    """A worker's part of the sum that was told so."""
    if said["kind"] == PRIVATE:
        held = {key: world.values[key] for key in said["shared"]}
        shared = {key: (tuple(v.shape), v.dtype) for key, v in held.items()}
        made = Mechanism(shared, said["bound"], said["noise"], said["over"], said["rate"])
        return PrivateSum(None, made, world.values, said["round"])
    kind = HeldSum if said["kind"] == HELD else PlainSum
    return kind(agreement, world.values, said["roster"])


def emptied(total: OpenSum) -> OpenSum:
    """A sum of the same round to which nothing was added yet."""
    if isinstance(total, PrivateSum):
        return PrivateSum(total.guard, total.mechanism, total.base, total.number)
    if isinstance(total, HeldSum):
        return HeldSum(total.agreement, total.base, total.roster)
    if isinstance(total, PlainSum):
        return PlainSum(total.agreement, total.base, total.roster)
    raise FedplanError(f"a sum of {type(total).__name__} has no parts: run it by --runner local")


def sent(total: OpenSum) -> Sent:
    """A part of a sum, to be sent."""
    if isinstance(total, PlainSum):
        sums = {"values": total.values, "riders": total.riders, "products": total.products.total}
        tensors, facts = _sums_sent(sums)
        said = {"squares": total.drift.squares, "weight": total.weight, "capped": total.capped}
        return tensors, {"kind": PLAIN, "sums": facts, **said}
    if isinstance(total, PrivateSum):
        tensors, facts = _sums_sent({"changes": total.changes})
        said = {"count": total.count, "within": total.within}
        return tensors, {"kind": PRIVATE, "sums": facts, **said}
    if isinstance(total, HeldSum):
        return _held_sent(total)
    raise FedplanError(f"a sum of {type(total).__name__} has no parts: run it by --runner local")


def merge(total: OpenSum, tensors: Tensors, said: Mapping[str, Any]) -> None:
    """Add a part of a sum, as it was sent, to the whole."""
    sums = _sums_read(tensors, said.get("sums", {}))
    if isinstance(total, PlainSum) and said["kind"] == PLAIN:
        part = PlainSum(total.agreement, total.base, total.roster)
        part.values, part.riders = sums["values"], sums["riders"]
        part.products.total, part.drift.squares = sums["products"], dict(said["squares"])
        part.weight = said["weight"]
        part.capped = {name: (one, other) for name, (one, other) in said["capped"].items()}
        total.merge(part)
    elif isinstance(total, PrivateSum) and said["kind"] == PRIVATE:
        some = PrivateSum(None, total.mechanism, total.base, total.number)
        some.changes, some.count, some.within = sums["changes"], said["count"], said["within"]
        total.merge(some)
    elif isinstance(total, HeldSum) and said["kind"] == HELD:
        total.merge(_held_read(total, tensors, said))
    else:
        raise FedplanError(f"a part of a {said['kind']} sum came to a {type(total).__name__}")


def _sums_sent(sums: Mapping[str, ExactSum]) -> Sent:
    tensors, facts = dict[str, Tensor](), dict[str, Any]()
    for name, each in sums.items():
        found, facts[name] = each.raw()
        tensors |= {f"{name}/{key}": value for key, value in found.items()}
    return tensors, facts


def _sums_read(tensors: Tensors, facts: Mapping[str, Any]) -> dict[str, ExactSum]:
    return {
        name: ExactSum.of_raw(_under(f"{name}/", tensors), held) for name, held in facts.items()
    }


def _held_sent(total: HeldSum) -> Sent:
    """All updates, each under a number: a client may be called anything."""
    tensors, clients = dict[str, Tensor](), list(total.values)
    for number, client in enumerate(clients):
        tensors |= {f"{number}/value/{k}": v for k, v in total.values[client].items()}
        tensors |= {f"{number}/rider/{k}": v for k, v in total.riders[client].items()}
    weights = [total.weights[client] for client in clients]
    return tensors, {"kind": HELD, "clients": clients, "weights": weights}


def _held_read(total: HeldSum, tensors: Tensors, said: Mapping[str, Any]) -> HeldSum:
    clients: list[str] = said["clients"]
    found = {sort: [dict[str, Tensor]() for _ in clients] for sort in ("value", "rider")}
    for name, tensor in tensors.items():
        number, sort, key = name.split("/", 2)
        found[sort][int(number)][key] = tensor
    part = HeldSum(total.agreement, total.base, total.roster)
    part.values |= zip(clients, found["value"], strict=True)
    part.riders |= zip(clients, found["rider"], strict=True)
    part.weights |= zip(clients, said["weights"], strict=True)
    return part


def _under(prefix: str, tensors: Tensors) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
