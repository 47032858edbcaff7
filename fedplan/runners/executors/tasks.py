# SPDX-License-Identifier: Apache-2.0
"""Tasks of a pool's workers, and the pool's record of each worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedplan.federation.messages import Request
from fedplan.federation.partial_sums import TensorsAndJson
from fedplan.runners.executors.worker import JsonObject


@dataclass
class ClientTask:
    """One client's work for a worker.

    `do` is the worker's action: "turn", "poll", "scores", "own", or "sum" without a client.
    `place` is the client's position in the round, `late` whether its update comes too late,
    `cost` the expected seconds; expensive tasks are started first.
    """

    do: str
    client: str
    request: Request | None = None
    place: int = 0
    late: bool = False
    cost: float = 0.0


Result = tuple[ClientTask, JsonObject]
"""A task and the worker's reply to it."""
OnReply = Callable[[ClientTask, JsonObject], ClientTask | None]
"""Handles a reply; returns a task to run again, with another request, or None."""
OnSum = Callable[[list[Result], TensorsAndJson], None]
"""Handles a worker's partial sum and the results of the turns in it."""


@dataclass
class WorkerHandle:
    """The state of one worker, as the pool knows it.

    `ready`: it has replied once. `versions`: versions of the global values that it has. `batch`:
    the last batch of tasks that it was synchronized for. `tables`: numbers of the shared values
    that it was sent. `pending`: the task of each message without a reply, or None for a message
    without a task. `results`: replies to turns whose updates are in its partial sum. `sum_open`:
    it has an open partial sum.
    """

    ready: bool = False
    versions: dict[str, int] = field(default_factory=dict[str, int])
    batch: int = -1
    tables: dict[str, dict[Any, int]] = field(default_factory=dict[str, dict[Any, int]])
    pending: list[ClientTask | None] = field(default_factory=list["ClientTask | None"])
    results: list[Result] = field(default_factory=list[Result])
    sum_open: bool = False


def table_entry(table: dict[Any, int], key: Any, value: object) -> list[Any]:
    """Return `[number, value]` for a value that is new to the table, else `[number]`."""
    if key in table:
        return [table[key]]
    table[key] = len(table)
    return [table[key], value]
