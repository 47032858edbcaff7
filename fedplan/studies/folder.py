# SPDX-License-Identifier: Apache-2.0
"""Folders: what a run is of, written beside it."""

from __future__ import annotations

import json
from pathlib import Path

from fedplan.federation.agreement import Agreement
from fedplan.federation.identity import RUN
from fedplan.federation.server import STUDY, Server
from fedplan.models.params import Params
from fedplan.models.schema import read, written
from fedplan.storage.errors import explained
from fedplan.storage.files import keep_file
from fedplan.storage.locks import Claim, claimed
from fedplan.studies.schema import ConfigError, Study, placed, study_of
from fedplan.studies.shares import Shares
from fedplan.studies.stage import agreement_of

MANIFEST, TASK = "manifest.json", "task.json"
"""In a run's folder, and in a site's for a run: what it is of; its labels and its clients."""


def opened_run(folder: Path, study: Study, params: Params, shares: Shares) -> Claim:
    """Claim a folder for a run of a study, and write what it is of, if no run was begun there.

    While the claim is held no other process opens the folder. What a run was begun with is changed
    by `agreed_run`, when nothing is left that could refuse to go on with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with explained(f"{folder} cannot be claimed", "name a folder that you may write to"):
        claim = claimed(folder)
    if (folder / STUDY).exists() and study_in(folder).digest != study.digest:
        raise ConfigError(f"{folder} holds a run of another study: name another folder")
    if not (folder / RUN).exists():
        write_run(folder, study, params)
        note_task(folder, shares)
    return claim


def agreed_run(server: Server, study: Study, shares: Shares) -> None:
    """Write what a run is of as it now is, once its server has taken it up."""
    write_run(server.folder, study, server.agreement.params)
    note_task(server.folder, shares)
    server.agree()


def write_run(folder: Path, study: Study, params: Params) -> None:
    """Write what a folder is of, unless that stands there."""
    folder.mkdir(parents=True, exist_ok=True)
    keep_file(folder / STUDY, placed(study, Path.cwd()).model_dump_json(indent=1))
    keep_file(folder / MANIFEST, written(params))


def note_task(folder: Path, shares: Shares) -> None:
    """Write what a model of the run is told apart by: its labels, and whose it may be.

    Rows are needed to train, and not to export what was trained: they may be gone by then.
    """
    said = {"labels": shares.task.labels, "clients": list(shares.train)}
    keep_file(folder / TASK, json.dumps(said, indent=1) + "\n")


def noted_task(folder: Path) -> tuple[list[str], list[str]]:
    """The labels and the clients of a run, as its folder tells them."""
    try:
        said = json.loads((folder / TASK).read_text(encoding="utf-8"))
        found = tuple([str(each) for each in said[name]] for name in ("labels", "clients"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{folder} does not say the labels of its run: {error!r}") from error
    return found[0], found[1]


def study_in(folder: Path) -> Study:
    """The study that a folder is of."""
    try:
        said = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        return study_of(said if isinstance(said, dict) else {STUDY: said})
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {STUDY}: {error}") from error


def agreement_in(folder: Path, study: Study | None = None) -> Agreement:
    """The agreement of a run, as its folder tells it; or by a study of its own that is known."""
    return agreement_of(study or study_in(folder), read(folder / MANIFEST))
