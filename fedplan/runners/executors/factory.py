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
    """Start a worker pool for a study that runs in `folder`; yield the pool, None without a config.

    The workers build the study in the background, and keep running after the body; the workers are
    stopped if the body raises. Raises ConfigError for a study of Python objects, which other
    processes cannot build, and FedplanError if Ray is needed and not installed.
    """
    if config is None:
        yield None
        return
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
    pool = PoolExecutor(make_transport(config, config.worker_count(study.threads)), begin)
    try:
        pool.start()
        yield pool
    except BaseException:
        pool.close()
        raise


def make_transport(config: PoolConfig, count: int) -> WorkerTransport:
    """Return the transport of the config's runner for `count` workers, without starting a worker.

    Raises FedplanError if Ray is needed and not installed.
    """
    if config.runner != RAY:
        return ProcessTransport(count)
    try:
        from fedplan.runners.executors.ray_transport import RayTransport
    except ModuleNotFoundError as error:
        raise FedplanError(
            f"{error.name} is not installed: `pip install fedplan[ray]`, or use the runner pool"
        ) from error
    return RayTransport(count, gpus=config.gpus, address=config.address)
