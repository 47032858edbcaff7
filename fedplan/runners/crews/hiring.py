# SPDX-License-Identifier: Apache-2.0
"""Hiring: the team that plays a study's clients, by what is said of its workers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.runners.crews.player import BEGIN
from fedplan.runners.crews.pool import Processes
from fedplan.runners.crews.team import Team
from fedplan.runners.crews.workers import RAY, Hands, Workers
from fedplan.studies.schema import ConfigError, Study, placed


@contextmanager
def hired(workers: Workers | None, study: Study, folder: Path) -> Generator[Team | None]:
    """A team that begins with a study, if there is to be one; it ends if what it is for fails."""
    team = team_of(workers, study, folder) if workers is not None else None
    try:
        if team is not None:
            team.start()
        yield team
    except BaseException:
        if team is not None:
            team.close()
        raise


def team_of(workers: Workers, study: Study, folder: Path) -> Team:
    """A team for a study that runs in a folder; nobody of it is started yet."""
    if study.data.given:
        raise ConfigError(
            f"the runner {workers.runner} has workers that build a study from its files, and this "
            "one was given objects of Python, which only this process has: write it as a study "
            'file for fp.run_study, or say runner="local"'
        )
    said = placed(study, Path.cwd()).model_dump(mode="json")
    count = workers.many(study.threads)
    begin = {"do": BEGIN, "study": said, "folder": str(folder.resolve())}
    return Team(_hands(workers, count), begin)


def _hands(workers: Workers, count: int) -> Hands:
    if workers.runner != RAY:
        return Processes(count)
    try:
        from fedplan.runners.crews.actors import Actors
    except ModuleNotFoundError as error:
        raise FedplanError(
            f"{error.name} is not installed: `pip install fedplan[ray]`, or say the runner pool"
        ) from error
    return Actors(count, gpus=workers.gpus, address=workers.address)
