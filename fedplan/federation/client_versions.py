# SPDX-License-Identifier: Apache-2.0
"""The server's record of each client: its last round, and the versions of the values it has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

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


def pack_client_sync(
    client_sync: Mapping[str, ClientSync], keys: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the records of all clients for a checkpoint: (tensors by name, JSON metadata).

    `client_sync`: records by client name. `keys`: all keys of global values, the columns of the
    version table. Clients are sorted by name, so the order of responses changes no byte. A record
    object that several clients share is stored once.
    """
    if not client_sync:
        return {}, {"personal_bits": []}
    names = sorted(client_sync)
    groups = list({id(client_sync[name]): client_sync[name] for name in names}.values())
    position = {id(group): i for i, group in enumerate(groups)}
    versions = [[group.versions.get(key, ABSENT) for key in keys] for group in groups]
    names_json = json.dumps(names, separators=(",", ":")).encode()
    tensors = {
        NAMES: torch.frombuffer(bytearray(names_json), dtype=torch.uint8),
        GROUPS: torch.tensor([position[id(client_sync[n])] for n in names], dtype=torch.int32),
        VERSIONS: torch.tensor(versions, dtype=torch.int32),
        ROUNDS: torch.tensor([group.round for group in groups], dtype=torch.int32),
    }
    return tensors, {"personal_bits": [hex(group.personal_bits) for group in groups]}


def unpack_client_sync(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, ClientSync]:
    """Return the records of all clients by name: the inverse of `pack_client_sync`.

    `tensors`, `meta`: the two results of `pack_client_sync`; further tensors are ignored.
    `keys`: must be equal to the keys when packed.
    """
    if NAMES not in tensors:
        return {}
    names = cast("list[str]", json.loads(tensors[NAMES].numpy().tobytes()))
    versions = cast("list[list[int]]", tensors[VERSIONS].tolist())
    rounds = cast("list[int]", tensors[ROUNDS].tolist())
    groups = [
        ClientSync(
            number, {k: v for k, v in zip(keys, row, strict=True) if v != ABSENT}, int(b, 16)
        )
        for number, row, b in zip(rounds, versions, meta["personal_bits"], strict=True)
    ]
    positions = cast("list[int]", tensors[GROUPS].tolist())
    return {name: groups[i] for name, i in zip(names, positions, strict=True)}
