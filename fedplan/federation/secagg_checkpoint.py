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

ROUND_CHECKPOINT, SCORING_CHECKPOINT = "secagg.json", "secagg_scoring.json"
"""Files in a run's folder: the open round, and the layer scoring before it."""


@dataclass(frozen=True)
class SecAggCheckpoint:
    """Messages that the server has sent in one attempt of a secure aggregation round.

    `attempt`: number of the attempt, from 1. `adverts`: key advert of each client as JSON.
    `encrypted_shares`: by client, as JSON. `survivors`: clients with masked input that arrived in
    time. An empty field: the server has not sent this message yet.
    """

    round: int
    attempt: int = 1
    adverts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    encrypted_shares: Mapping[str, Any] = field(default_factory=dict[str, Any])
    survivors: tuple[str, ...] = ()

    def next_attempt(self) -> SecAggCheckpoint:
        """Return the empty checkpoint of the next attempt of the round."""
        return SecAggCheckpoint(self.round, self.attempt + 1)


def read_secagg_checkpoint(file: Path, number: int) -> SecAggCheckpoint:
    """Return the checkpoint of round `number` from a file; creates or changes no file.

    A missing file, or a checkpoint of another round, gives an empty checkpoint of attempt 1. Raises
    StoreError if the file cannot be read or is not a checkpoint.
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
    """Write a checkpoint atomically over the file, and return it; call before sending messages."""
    write_atomic(file, json.dumps(asdict(checkpoint)), mode=0o600)
    return checkpoint
