# SPDX-License-Identifier: Apache-2.0
"""The interface to a pool's workers: start them, send messages, receive replies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from fedplan.federation.aggregation.protocol import TensorsAndJson
from fedplan.tensors.named import Tensors


class WorkerTransport(Protocol):
    """Interface to `count` workers, numbered from 0: `start` each, then `send` and `receive`.

    A worker replies to every message, in the order of sending. Messages and replies are JSON
    objects with tensors. Methods other than `receive` do not wait for replies.
    """

    count: int

    def start(self, number: int, message: Mapping[str, Any]) -> None:
        """Start a worker, in place of an earlier one of this number, and send its first message."""

    def share(self, tensors: Tensors) -> object:
        """Put tensors where all workers can read them; returns the `shared` argument of `send`."""
        ...

    def send(self, number: int, message: Mapping[str, Any], shared: object = None) -> None:
        """Send a JSON message, and shared tensors, to a worker; a dead one is not an error here."""

    def receive(self, timeout: float) -> list[tuple[int, TensorsAndJson | None]]:
        """Return replies received within `timeout` seconds, as (worker, reply).

        Returns as soon as there is one. A reply of None marks a dead worker, reported once.
        """
        ...

    def close(self) -> None:
        """Stop all workers."""
