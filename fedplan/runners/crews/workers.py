# SPDX-License-Identifier: Apache-2.0
"""Hands: workers that answer messages, however they are reached, and what is said of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fedplan.federation.partial import Sent
from fedplan.studies.schema import ConfigError
from fedplan.tensors.named import Tensors

LOCAL, POOL, RAY = "local", "pool", "ray"
"""Who plays the clients: this process, processes of this machine, Ray's workers."""


@dataclass(frozen=True)
class Workers:
    """How many play the clients of a run, and where; no number of them changes a bit of it.

    `gpus` is what each has of a GPU, by Ray; `address` is that of a Ray cluster, else Ray is
    started on this machine.
    """

    runner: str = POOL
    count: int = 0
    gpus: float = 0.0
    address: str = ""

    def __post_init__(self) -> None:
        if self.runner not in (POOL, RAY):
            raise ConfigError(f"the runner is {self.runner!r}: say {LOCAL}, {POOL} or {RAY}")
        if self.count < 0 or self.gpus < 0:
            wrong = "workers" if self.count < 0 else "gpus_per_worker"
            raise ConfigError(f"{wrong} is {min(self.count, self.gpus)}: give a larger number")
        if self.runner == POOL and (self.gpus or self.address):
            wrong = "gpus_per_worker" if self.gpus else "ray_address"
            raise ConfigError(
                f"{wrong} is for Ray's workers: say the runner {RAY}, or leave it out"
            )

    def many(self, threads: int) -> int:
        """As many as were said; else as this machine has cores for, of so many threads each."""
        return self.count or max(1, _cores() // threads)


def _cores() -> int:
    """The cores that this process may use; not every system says which."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def workers_of(
    runner: str, count: int | None = None, gpus: float = 0.0, address: str = ""
) -> Workers | None:
    """Who plays the clients, by the words of a command or a call; None is this process."""
    if runner != LOCAL:
        if count is not None and count < 1:
            raise ConfigError(f"workers is {count}: give at least 1, or leave it out")
        return Workers(runner, count or 0, gpus, address)
    if count or gpus or address:
        wrong = "workers" if count else "gpus_per_worker" if gpus else "ray_address"
        raise ConfigError(f"{wrong} is said, and the runner {LOCAL} has none: say {POOL} or {RAY}")
    return None


class Hands(Protocol):
    """Workers by their numbers. Each answers every message, in the order in which they came."""

    count: int

    def start(self, number: int, said: Mapping[str, Any]) -> None:
        """Start a worker, or another one in its place, with what it is to be."""

    def share(self, tensors: Tensors) -> object:
        """Put tensors where every worker can read them: what `send` then takes."""
        ...

    def send(self, number: int, said: Mapping[str, Any], shared: object = None) -> None:
        """Send a worker a message; that it is dead is heard of by `heard`."""

    def heard(self, seconds: float) -> list[tuple[int, Sent | None]]:
        """Who has answered what by then, or sooner; None for one that is dead, told once."""
        ...

    def close(self) -> None:
        """End all of them."""
