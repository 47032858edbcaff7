# SPDX-License-Identifier: Apache-2.0
"""Executors: run the clients of a simulation in this process, in a process pool, or on Ray."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.runners.executors.config import PoolConfig, make_pool_config

__all__ = ["PoolConfig", "make_pool_config"]

__getattr__, __dir__ = lazy_exports(__name__, {"config": "PoolConfig make_pool_config"})
