# SPDX-License-Identifier: Apache-2.0
"""The server's global state: values with versions, what each client has, and the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.messages import block_scores_from_json, block_scores_to_json
from fedplan.language.predicates import Turn
from fedplan.language.resolution import permitted_roles
from fedplan.models.params import Block
from fedplan.tensors.named import Tensors, aux_name, aux_names, is_aux, param_key
from fedplan.training.client_hooks import COPY

NAMES, GROUPS, VERSIONS, ROUNDS = "sync/names", "sync/groups", "sync/versions", "sync/rounds"
"""Names of the tensors in a checkpoint."""

ABSENT = -1
"""Stands for the version of a value that a client never received."""


@dataclass(frozen=True)
class ClientSync:
    """The server's record of one client; clients in the same state share one object.

    `round`: last round in which the client responded; 0 if never. `versions`: version of each
    global value that the client has, by key; a missing key was never sent.
    `personal_bits`: params that are personal at the client (`Agreement.personal_bits`).
    """

    round: int = 0
    versions: Mapping[str, int] = field(default_factory=dict[str, int])
    personal_bits: int = 0


NEVER_SEEN = ClientSync()
"""The record of a client that never responded."""


LEDGER, METRICS, BEST = "ledger.jsonl", "metrics.jsonl", "best"
"""Names in a run's folder: ledger, metrics, and the best global state."""

FORMAT = 2
"""Version of the checkpoint format."""


@dataclass(frozen=True)
class GlobalState:
    """The server's state after a round; never changed in place.

    `values`: global params and auxiliary tensors by key. `versions`: by key, the round that last
    changed the value; 0 for the initial value. `round`, `phase`: last closed round and present
    phase. `client_sync`: last round and value versions of each client that ever responded.
    `memory`: state tensors of the server optimizer by key. `drift`: by kind of param, drift of the
    last round. `choice`: block scores of the last vote. `clipping_norm`: norm for the next round if
    clipping adapts, else 0. `to_tensors` and `from_tensors` convert to and from a checkpoint.
    """

    values: dict[str, Tensor]
    versions: dict[str, int]
    round: int = 0
    phase: str = ""
    client_sync: dict[str, ClientSync] = field(default_factory=dict[str, ClientSync])
    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    choice: dict[Block, float] = field(default_factory=dict[Block, float])
    clipping_norm: float = 0.0

    @staticmethod
    def initial(agreement: Agreement, values: Tensors) -> GlobalState:
        """Return the state before the first round, from the model's initial values by key.

        Has the params that the agreement exchanges, uncopied, and zeros as auxiliary tensors.
        """
        values = {p.key: values[p.key] for p in agreement.exchanged}
        names = aux_names(values, agreement.method.aux)
        aux = {name: torch.zeros_like(values[param_key(name)]) for name in names}
        return GlobalState(values | aux, dict.fromkeys(values | aux, 0))

    def versions_of(self, client: str) -> Mapping[str, int]:
        """Return the versions of the global values that a client has."""
        return self.client_sync.get(client, NEVER_SEEN).versions

    def last_round_of(self, client: str) -> int:
        """Return the last round in which a client responded; 0 if never."""
        return self.client_sync.get(client, NEVER_SEEN).round

    def to_tensors(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return (tensors by name, JSON metadata) for a checkpoint; the values are not copied.

        A record of clients that several clients share is stored once. Its versions are a row of a
        table with a column for each key of `versions`.
        """
        tensors = {f"value/{k}": v for k, v in self.values.items()}
        for key, memory in self.memory.items():
            tensors |= {f"memory/{name}/{key}": v for name, v in memory.items()}
        # Sorted by name, so that the order of responses changes no byte.
        names = sorted(self.client_sync)
        by_client = [self.client_sync[name] for name in names]
        groups = list({id(each): each for each in by_client}.values())
        position = {id(group): i for i, group in enumerate(groups)}
        if names:
            positions = [position[id(each)] for each in by_client]
            versions = [
                [each.versions.get(key, ABSENT) for key in self.versions] for each in groups
            ]
            names_json = json.dumps(names, separators=(",", ":")).encode()
            tensors |= {
                NAMES: torch.frombuffer(bytearray(names_json), dtype=torch.uint8),
                GROUPS: torch.tensor(positions, dtype=torch.int32),
                VERSIONS: torch.tensor(versions, dtype=torch.int32),
                ROUNDS: torch.tensor([each.round for each in groups], dtype=torch.int32),
            }
        return tensors, {
            "format": FORMAT,
            "round": self.round,
            "phase": self.phase,
            "versions": self.versions,
            "drift": {kind: list(numbers) for kind, numbers in self.drift.items()},
            "choice": block_scores_to_json(self.choice),
            "clipping_norm": self.clipping_norm,
            "personal_bits": [hex(each.personal_bits) for each in groups],
        }

    @staticmethod
    def from_tensors(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> GlobalState:
        """Return the state of a checkpoint's tensors and metadata: the inverse of `to_tensors`.

        Does not copy the tensors. Raises FedplanError if `meta` has another format version.
        """
        missing = {"round", "phase", "versions", "drift", "choice", "clipping_norm"} - meta.keys()
        if meta.get("format") != FORMAT or missing:
            raise FedplanError(
                f"this checkpoint, of format {meta.get('format')!r}, is of another version of "
                "fedplan: read it with that version"
            )
        values, memory = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
        for name, tensor in tensors.items():
            kind, _, rest = name.partition("/")
            if kind == "value":
                values[rest] = tensor
            elif kind == "memory":
                state_name, _, key = rest.partition("/")
                memory.setdefault(key, {})[state_name] = tensor
        versions = {k: int(v) for k, v in meta["versions"].items()}
        client_sync = dict[str, ClientSync]()
        if NAMES in tensors:
            names = cast("list[str]", json.loads(tensors[NAMES].numpy().tobytes()))
            table = cast("list[list[int]]", tensors[VERSIONS].tolist())
            rounds = cast("list[int]", tensors[ROUNDS].tolist())
            positions = cast("list[int]", tensors[GROUPS].tolist())
            groups = [
                ClientSync(
                    number,
                    {k: v for k, v in zip(versions, row, strict=True) if v != ABSENT},
                    int(b, 16),
                )
                for number, row, b in zip(rounds, table, meta["personal_bits"], strict=True)
            ]
            client_sync = {name: groups[i] for name, i in zip(names, positions, strict=True)}
        return GlobalState(
            values,
            versions,
            meta["round"],
            meta["phase"],
            client_sync,
            memory,
            {kind: (variance, step) for kind, (variance, step) in meta["drift"].items()},
            block_scores_from_json(meta["choice"]),
            float(meta["clipping_norm"]),
        )


def global_values(
    agreement: Agreement, global_state: GlobalState, start: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the global model's trainable values by key, not copied.

    Params that the agreement does not exchange have the initial value, from `start`.
    """
    keys = [p.key for p in agreement.trainable]
    values = global_state.values
    return {key: (values if key in values else start)[key] for key in keys}


def personal_values(
    agreement: Agreement,
    global_state: GlobalState,
    start: Mapping[str, Tensor],
    turn: Turn,
    client_state: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the trainable values of a client's personal model, by key.

    The client's own values in `client_state` (`own_values` of a turn of the client), and all others
    of `global_values` for the agreement, the global state and the initial values `start`.
    """
    values = global_values(agreement, global_state, start)
    return values | own_values(agreement, turn, client_state)


def own_values(
    agreement: Agreement, turn: Turn, client_state: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return by key the values in `client_state` that a client's personal model has in a turn.

    Those of params with a personal role, and under a method with `own_copy` the client's copies of
    all others. Values that are not in `client_state` are left out.
    """
    roles = permitted_roles(agreement.method.plan, agreement.params, turn)
    personal = [p.key for p in agreement.trainable if roles[p].is_personal]
    names = {key: key for key in personal}
    if agreement.method.own_copy:
        names = {p.key: aux_name(p.key, COPY) for p in agreement.trainable} | names
    return {key: client_state[name] for key, name in names.items() if name in client_state}


def continued_state(agreement: Agreement, client_state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what a client takes from an earlier run into the one of an agreement.

    Its personal values, and its copies of other params if the method of the agreement has them.
    """
    copies = agreement.method.own_copy
    return {
        name: value
        for name, value in client_state.items()
        if not is_aux(name) or (copies and name == aux_name(param_key(name), COPY))
    }
