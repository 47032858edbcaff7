# SPDX-License-Identifier: Apache-2.0
"""Settings of a worker pool: the runner, the number of workers, and their resources."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

from fedplan.studies.schema import ConfigError

LOCAL, POOL, RAY = "local", "pool", "ray"
"""Runners: this process, worker processes on this machine, Ray actors."""


@dataclass(frozen=True)
class PoolConfig:
    """Settings of a worker pool; they do not change the result of a run.

    `runner` is "pool" or "ray". `count` is the number of workers, 0 for one per available core
    group. `gpus` is the number (or fraction) of GPUs per Ray worker, `address` that of a Ray
    cluster; empty starts Ray on this machine. Raises ConfigError for invalid values.
    """

    runner: str = POOL
    count: int = 0
    gpus: float = 0.0
    address: str = ""

    def __post_init__(self) -> None:
        if self.runner not in (POOL, RAY):
            raise ConfigError(f"the runner is {self.runner!r}: use {LOCAL}, {POOL} or {RAY}")
        if self.count < 0 or self.gpus < 0:
            option = "workers" if self.count < 0 else "gpus_per_worker"
            raise ConfigError(f"{option} is {min(self.count, self.gpus)}: give a larger number")
        if self.runner == POOL and (self.gpus or self.address):
            option = "gpus_per_worker" if self.gpus else "ray_address"
            raise ConfigError(f"{option} is for Ray: use runner {RAY}, or leave it out")

    def worker_count(self, threads: int) -> int:
        """Return `count`, or if it is 0 the available cores divided by threads per worker."""
        return self.count or max(1, _available_cores() // threads)


def _available_cores() -> int:
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def make_pool_config(
    runner: str, count: int | None = None, gpus: float = 0.0, address: str = ""
) -> PoolConfig | None:
    """Return the pool settings of a command or call; None for the runner "local".

    The arguments are the fields of PoolConfig. Raises ConfigError if they are invalid, or given
    for "local".
    """
    if runner != LOCAL:
        if count is not None and count < 1:
            raise ConfigError(f"workers is {count}: give at least 1, or leave it out")
        return PoolConfig(runner, count or 0, gpus, address)
    if count or gpus or address:
        option = "workers" if count else "gpus_per_worker" if gpus else "ray_address"
        raise ConfigError(f"{option} does not apply to runner {LOCAL}: use {POOL} or {RAY}")
    return None
