# SPDX-License-Identifier: Apache-2.0
"""Worlds: the federation's values, and how they are written down and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.acquaintance import NOBODY, Met, met_loaded, met_saved
from fedplan.federation.agreement import Agreement
from fedplan.federation.messages import listed, scored
from fedplan.language.resolution import permitted
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.tensors.named import Tensors
from fedplan.tensors.riders import param_of, riders_of

WORLD, LEDGER, METRICS, BEST = "world", "ledger.jsonl", "metrics.jsonl", "best"
"""What a run's folder holds of its rounds: the last world, and the best, if it is kept."""

FORMAT = 2
"""Of a world on the disk: what clients have stands in groups since 2."""


@dataclass(frozen=True)
class World:
    """The federation's values, each with the round that last changed it.

    `met` says of each client that ever answered when it last did, which version of what it has and
    which params it has as its own; `memory` is the server optimiser's; `drift` is that of the last
    round; `choice` are the scores of the last vote, and `clip` is the bound that follows the
    clients' changes, if any does. Version 0 is the value that a model starts with: of the
    federation's params it travels at first contact, riders start at zero.
    """

    values: dict[str, Tensor]
    versions: dict[str, int]
    round: int = 0
    phase: str = ""
    met: dict[str, Met] = field(default_factory=dict[str, Met])
    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    choice: dict[Block, float] = field(default_factory=dict[Block, float])
    clip: float = 0.0

    @staticmethod
    def start(agreement: Agreement, values: Tensors) -> World:
        """The world as a model starts it: of its values, those that may travel."""
        values = {p.key: values[p.key] for p in agreement.movable}
        beside = riders_of(values, agreement.method.riders)
        riders = {name: torch.zeros_like(values[param_of(name)]) for name in beside}
        return World(values | riders, dict.fromkeys(values | riders, 0))

    def known_by(self, client: str) -> Mapping[str, int]:
        """Which version of what a client has of the world."""
        return self.met.get(client, NOBODY).versions

    def settled_by(self, client: str) -> int:
        """Which params a client has as its own, a bit each (`Agreement.owned`)."""
        return self.met.get(client, NOBODY).settled

    def heard_from(self, client: str) -> int:
        """The round in which a client last answered; 0 if it never did."""
        return self.met.get(client, NOBODY).round

    def saved(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Its tensors by name, and all else as JSON."""
        tensors = {f"value/{k}": v for k, v in self.values.items()}
        for key, memory in self.memory.items():
            tensors |= {f"memory/{name}/{key}": v for name, v in memory.items()}
        met, groups = met_saved(self.met, list(self.versions))
        meta = {"format": FORMAT, "round": self.round, "phase": self.phase}
        drift = {kind: list(numbers) for kind, numbers in self.drift.items()}
        hidden = {"choice": listed(self.choice), "clip": self.clip}
        return tensors | met, meta | {"versions": self.versions, "drift": drift} | hidden | groups

    @staticmethod
    def loaded(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> World:
        """The world that was saved as these."""
        if meta.get("format") != FORMAT:
            raise FedplanError(
                f"this world has format {meta.get('format')!r}, not {FORMAT}: read it with the "
                "fedplan it is from"
            )
        values, memory = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            sort, _, rest = name.partition("/")
            if sort == "value":
                values[rest] = tensor
            elif sort == "memory":
                which, _, key = rest.partition("/")
                memory.setdefault(key, {})[which] = tensor
        versions = {k: int(v) for k, v in meta["versions"].items()}
        return World(
            values,
            versions,
            meta["round"],
            meta["phase"],
            met_loaded(tensors, meta, list(versions)),
            memory,
            {kind: (apart, step) for kind, (apart, step) in meta["drift"].items()},
            scored(meta["choice"]),
            float(meta["clip"]),
        )


def world_values(
    agreement: Agreement, world: World, start: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The values of a federation's model, where it starts from `start`."""
    keys = [p.key for p in agreement.trainable]
    return {key: (world.values if key in world.values else start)[key] for key in keys}


def personal_values(
    agreement: Agreement,
    world: World,
    start: Mapping[str, Tensor],
    turn: Turn,
    home: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """The values of one client's model: its own, as of the turn, over the federation's."""
    roles = permitted(agreement.method.plan, agreement.params, turn)
    own = {p.key for p in agreement.trainable if roles[p].own}
    return world_values(agreement, world, start) | {k: v for k, v in home.items() if k in own}
