# SPDX-License-Identifier: Apache-2.0
"""Executors: run the clients of a simulation in this process, in a process pool, or on Ray."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.runners.executors.executor import (
        Executor,
        PoolConfig,
        SerialExecutor,
        make_pool_config,
    )
    from fedplan.runners.executors.pool import PoolExecutor, start_pool
    from fedplan.runners.executors.processes import ProcessTransport

__all__ = [
    "Executor",
    "PoolConfig",
    "PoolExecutor",
    "ProcessTransport",
    "SerialExecutor",
    "make_pool_config",
    "start_pool",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "executor": "Executor PoolConfig SerialExecutor make_pool_config",
        "pool": "PoolExecutor start_pool",
        "processes": "ProcessTransport",
    },
)
