# SPDX-License-Identifier: Apache-2.0
"""Files of a run's folder that describe it: the study, the model's manifest and the task."""

from __future__ import annotations

import json
from pathlib import Path

from fedplan.federation.agreement import Agreement
from fedplan.federation.identity import RUN_FILE
from fedplan.federation.server import STUDY, Server
from fedplan.models.catalog import manifest_json, read_manifest
from fedplan.models.params import Params
from fedplan.storage.files import wrap_disk_errors, write_if_changed
from fedplan.storage.locks import FolderLock, acquire_folder_lock
from fedplan.studies.experiment import make_agreement
from fedplan.studies.federated_data import FederatedData
from fedplan.studies.schema import ConfigError, Study, resolve_paths, study_from_dict

MANIFEST, TASK = "manifest.json", "task.json"
"""Files in the folder of a run, here or at a site: model parameters; labels and clients."""


def claim_run_folder(folder: Path, study: Study, params: Params, data: FederatedData) -> FolderLock:
    """Create and lock a run's folder; if no run started there, write the run's first files.

    These are study, manifest (from `params`) and task file (from `data`). The files of a started
    run are left for `update_run_files`. Returns the lock: no other process can claim the folder
    until the lock is released. Raises ConfigError if the folder has a run of another study,
    StoreError if another process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with wrap_disk_errors(f"{folder} cannot be locked", "name a folder that you may write to"):
        claim = acquire_folder_lock(folder)
    if (folder / STUDY).exists() and read_run_study(folder).digest != study.digest:
        raise ConfigError(f"{folder} holds a run of another study: name another folder")
    if not (folder / RUN_FILE).exists():
        write_run_files(folder, study, params)
        write_task_file(folder, data)
    return claim


def update_run_files(server: Server, study: Study, data: FederatedData) -> None:
    """Rewrite the study, manifest and task files of a run after the server has resumed the run.

    `data`: gives labels and client names. Stores the study file's digest in the newest checkpoint.
    """
    write_run_files(server.folder, study, server.agreement.params)
    write_task_file(server.folder, data)
    server.record_study()


def write_run_files(folder: Path, study: Study, params: Params) -> None:
    """Write the study, with absolute paths, and the model's manifest (names and shapes of params).

    Creates the folder; a file with the same content is not touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_if_changed(folder / STUDY, resolve_paths(study, Path.cwd()).model_dump_json(indent=1))
    write_if_changed(folder / MANIFEST, manifest_json(params))


def write_task_file(folder: Path, data: FederatedData) -> None:
    """Write the labels and the client names of a run, for exports when the data is gone."""
    content = {"labels": data.task.labels, "clients": list(data.train)}
    write_if_changed(folder / TASK, json.dumps(content, indent=1) + "\n")


def read_task_file(folder: Path) -> tuple[list[str], list[str]]:
    """Return (labels, client names) of the run in a folder; ConfigError if unreadable."""
    try:
        content = json.loads((folder / TASK).read_text(encoding="utf-8"))
        lists = tuple([str(item) for item in content[name]] for name in ("labels", "clients"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{folder} has no readable {TASK}: {error!r}") from error
    return lists[0], lists[1]


def read_run_study(folder: Path) -> Study:
    """Return the study of a run's folder; raise ConfigError if it cannot be read."""
    try:
        content = json.loads((folder / STUDY).read_text(encoding="utf-8"))
        return study_from_dict(content if isinstance(content, dict) else {STUDY: content})
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{folder} is not the folder of a run: {STUDY}: {error}") from error


def read_run_agreement(folder: Path, study: Study | None = None) -> Agreement:
    """Return the agreement of the run in a folder, from its manifest and its study.

    `study` replaces the study in the folder.
    """
    return make_agreement(study or read_run_study(folder), read_manifest(folder / MANIFEST))
