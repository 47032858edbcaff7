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
    """Settings of a worker pool; the result of a run does not depend on the settings.

    `runner` is "pool" (processes) or "ray". `count` is the number of workers; 0 means the available
    cores divided by the threads per worker. `gpus` is the number (or fraction) of GPUs per Ray
    worker, `address` the address of a Ray cluster; an empty address starts Ray on this machine.
    Raises ConfigError for an unknown runner, a negative number, or `gpus` or `address` for "pool".
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
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return self.count or max(1, cores // threads)


def make_pool_config(
    runner: str, count: int | None = None, gpus: float = 0.0, address: str = ""
) -> PoolConfig | None:
    """Return the pool settings of a command or call; None for the runner "local".

    `count` (None: by the number of cores), `gpus` and `address` are as in PoolConfig. Raises
    ConfigError if an argument is invalid, or is given for the runner "local".
    """
    if runner != LOCAL:
        if count is not None and count < 1:
            raise ConfigError(f"workers is {count}: give at least 1, or leave it out")
        return PoolConfig(runner, count or 0, gpus, address)
    if count or gpus or address:
        option = "workers" if count else "gpus_per_worker" if gpus else "ray_address"
        raise ConfigError(f"{option} does not apply to runner {LOCAL}: use {POOL} or {RAY}")
    return None
