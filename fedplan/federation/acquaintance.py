# SPDX-License-Identifier: Apache-2.0
"""Acquaintance: what the server knows of each client that ever answered, once for those alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

NAMES, GROUPS, VERSIONS, ROUNDS = "met/names", "met/groups", "met/versions", "met/rounds"

ABSENT = -1
"""What stands for a version that a client never had."""


@dataclass(frozen=True)
class Met:
    """What clients that answered alike have: one of it, for however many they are.

    `round` is when they last answered, `versions` what they then had of the world, and `settled`
    which params they have as their own, a bit each (`Agreement.owned`).
    """

    round: int = 0
    versions: Mapping[str, int] = field(default_factory=dict[str, int])
    settled: int = 0


NOBODY = Met()
"""What is known of a client that never answered."""


def met_saved(
    met: Mapping[str, Met], keys: Sequence[str]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """It as tensors, a number a client and a row a group, and the rest as JSON.

    Names are sorted and groups stand as the names first need them: in which order clients
    answered changes no byte.
    """
    if not met:
        return {}, {"settled": []}
    names = sorted(met)
    groups = list({id(met[name]): met[name] for name in names}.values())
    place = {id(group): i for i, group in enumerate(groups)}
    versions = [[group.versions.get(key, ABSENT) for key in keys] for group in groups]
    said = json.dumps(names, separators=(",", ":")).encode()
    tensors = {
        NAMES: torch.frombuffer(bytearray(said), dtype=torch.uint8),
        GROUPS: torch.tensor([place[id(met[name])] for name in names], dtype=torch.int32),
        VERSIONS: torch.tensor(versions, dtype=torch.int32),
        ROUNDS: torch.tensor([group.round for group in groups], dtype=torch.int32),
    }
    return tensors, {"settled": [hex(group.settled) for group in groups]}


def met_loaded(
    tensors: Mapping[str, Tensor], meta: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Met]:
    """What was saved as these."""
    if NAMES not in tensors:
        return {}
    names = cast("list[str]", json.loads(tensors[NAMES].numpy().tobytes()))
    rows = cast("list[list[int]]", tensors[VERSIONS].tolist())
    rounds = cast("list[int]", tensors[ROUNDS].tolist())
    groups = [
        Met(number, _present(keys, row), int(settled, 16))
        for number, row, settled in zip(rounds, rows, meta["settled"], strict=True)
    ]
    places = cast("list[int]", tensors[GROUPS].tolist())
    return {name: groups[place] for name, place in zip(names, places, strict=True)}


def _present(keys: Sequence[str], row: Sequence[int]) -> dict[str, int]:
    return {key: version for key, version in zip(keys, row, strict=True) if version != ABSENT}
