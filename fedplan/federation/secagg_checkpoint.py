# SPDX-License-Identifier: Apache-2.0
"""Write-ahead file of an open secure aggregation round, for a server that restarts.

Sites accept one roster, one set of encrypted shares and one survivor list in an attempt, so a
restarted server must send the same again. The file contains no secrets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedplan.errors import StoreError
from fedplan.storage.files import write_atomic

ROUND_CHECKPOINT, POLL_CHECKPOINT = "masking.json", "masked_poll.json"
"""Files in a run's folder: the open round, and the poll of layer scores before it."""


@dataclass(frozen=True)
class SecAggCheckpoint:
    """Messages that the server has sent in a secure aggregation round, as JSON.

    `attempt`: number of the attempt, from 1. `adverts`: key adverts by client.
    `boxes`: encrypted shares by client. `survivors`: clients whose masked inputs arrived.
    """

    round: int
    attempt: int = 1
    adverts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    boxes: Mapping[str, Any] = field(default_factory=dict[str, Any])
    survivors: tuple[str, ...] = ()

    def next_attempt(self) -> SecAggCheckpoint:
        """Return the empty checkpoint of the next attempt of the round."""
        return SecAggCheckpoint(self.round, self.attempt + 1)


def read_secagg_checkpoint(file: Path, number: int) -> SecAggCheckpoint:
    """Return the checkpoint of a round, or a new one if the file is missing or of another round.

    Raises StoreError if the file cannot be read.
    """
    try:
        fields: Any = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        checkpoint = SecAggCheckpoint(**fields) if fields else SecAggCheckpoint(number)
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{file} cannot be read: {error}; restore a copy of it") from error
    if checkpoint.round != number:
        return SecAggCheckpoint(number)
    return replace(checkpoint, survivors=tuple(checkpoint.survivors))


def write_secagg_checkpoint(file: Path, checkpoint: SecAggCheckpoint) -> SecAggCheckpoint:
    """Write a checkpoint and return it; call this before sending its messages."""
    write_atomic(file, json.dumps(asdict(checkpoint)), mode=0o600)
    return checkpoint
