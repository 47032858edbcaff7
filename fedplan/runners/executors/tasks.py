# SPDX-License-Identifier: Apache-2.0
"""Tasks of a pool's workers, and the pool's record of each worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.federation.messages import Request
from fedplan.runners.executors.worker import JsonObject


@dataclass
class ClientTask:
    """One client's work for a worker.

    `do` is the worker's action: "turn" (train), "poll" (layer scores), "scores" (evaluate),
    "personal_scores" (personal test), or "sum" (return the partial sum, without a client).
    `request` is the server's request to the client, None where the action needs none. `place` is
    the client's position in the round, `late` whether the update comes too late to be aggregated,
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
    """The pool's record of one worker.

    `ready`: the worker has replied once. `versions`: versions of the global values at the worker.
    `batch`: number of the last batch of tasks for which the worker got the global state. `tables`:
    for each repeated field of requests, the numbers of the values that the worker got in this batch
    (see `table_entry`). `pending`: the task of each message without a reply, oldest first; None for
    a message without a task. `results`: the turns in the worker's partial sum, with their replies.
    `sum_open`: the worker has an open partial sum.
    """

    ready: bool = False
    versions: dict[str, int] = field(default_factory=dict[str, int])
    batch: int = -1
    tables: dict[str, dict[Any, int]] = field(default_factory=dict[str, dict[Any, int]])
    pending: list[ClientTask | None] = field(default_factory=list["ClientTask | None"])
    results: list[Result] = field(default_factory=list[Result])
    sum_open: bool = False


def table_entry(table: dict[Any, int], key: Any, value: object) -> list[Any]:
    """Return `[number, value]` for a new key, which is added to the table, and else `[number]`.

    The worker stores the value under the number, so later messages need only the number.
    """
    if key in table:
        return [table[key]]
    table[key] = len(table)
    return [table[key], value]
