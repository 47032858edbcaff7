# SPDX-License-Identifier: Apache-2.0
"""Creation of a worker pool for a study."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.runners.executors.config import RAY, PoolConfig
from fedplan.runners.executors.pool import PoolExecutor
from fedplan.runners.executors.process_transport import ProcessTransport
from fedplan.runners.executors.transport import WorkerTransport
from fedplan.runners.executors.worker import BEGIN
from fedplan.studies.schema import ConfigError, Study, resolve_paths


@contextmanager
def start_pool(
    config: PoolConfig | None, study: Study, folder: Path
) -> Generator[PoolExecutor | None]:
    """Start a worker pool if requested, and yield it; stop it if the body raises.

    Yields None without a config. The pool keeps running after the body.
    """
    pool = make_pool(config, study, folder) if config is not None else None
    try:
        if pool is not None:
            pool.start()
        yield pool
    except BaseException:
        if pool is not None:
            pool.close()
        raise


def make_pool(config: PoolConfig, study: Study, folder: Path) -> PoolExecutor:
    """Make a pool for a study that runs in a folder, without starting its workers.

    Raises ConfigError for a study of Python objects, which other processes cannot build.
    """
    if study.data.from_python:
        raise ConfigError(
            f"the runner {config.runner} has workers that build a study from its files, and this "
            "one was given Python objects, which only this process has: write it as a study file "
            'for fp.run_study, or use runner="local"'
        )
    begin = {
        "do": BEGIN,
        "study": resolve_paths(study, Path.cwd()).model_dump(mode="json"),
        "folder": str(folder.resolve()),
    }
    return PoolExecutor(make_transport(config, config.worker_count(study.threads)), begin)


def make_transport(config: PoolConfig, count: int) -> WorkerTransport:
    """Make the transport for `count` workers; FedplanError if Ray is needed and not installed."""
    if config.runner != RAY:
        return ProcessTransport(count)
    try:
        from fedplan.runners.executors.ray_transport import RayTransport
    except ModuleNotFoundError as error:
        raise FedplanError(
            f"{error.name} is not installed: `pip install fedplan[ray]`, or use the runner pool"
        ) from error
    return RayTransport(count, gpus=config.gpus, address=config.address)
