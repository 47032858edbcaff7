# SPDX-License-Identifier: Apache-2.0
"""Start or resume a run in a folder, or continue from an earlier run; checks before either."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import continued_state
from fedplan.federation.identity import RUN_FILE, STUDY, closed_rounds, is_run_id, read_identity
from fedplan.federation.ledger.segments import last_ledger_round, newest_segment
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.storage.append_log import head_file
from fedplan.storage.files import wrap_disk_errors
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.storage.locks import locked_folder
from fedplan.studies.experiment import privacy_guarantee
from fedplan.studies.record import (
    DATA_FILE,
    ENVIRONMENT_FILE,
    INITIAL_SCORES_FILE,
    require_same_environment,
)
from fedplan.studies.run import MANIFEST, TASK, read_run, read_run_study
from fedplan.studies.schema import (
    Study,
    changed_fields,
    read_study,
    resolve_paths,
    study_from_dict,
)
from fedplan.studies.section import ConfigError, apply_overrides
from fedplan.studies.stored_model import MODEL_FOLDER

START_FILES = (
    *(STUDY, MANIFEST, TASK, RUN_FILE, DATA_FILE, INITIAL_SCORES_FILE),
    *(ENVIRONMENT_FILE, head_file(Path(ENVIRONMENT_FILE)).name),
)
"""Files that a run writes before its first round."""


def open_study(
    file: Path,
    changes: list[str],
    output: Path | None,
    *,
    resume: bool,
    earlier: str = "",
    same_environment: bool = False,
) -> tuple[Study, Path]:
    """Return the study to run and the folder of the run, after preparing the folder.

    `file`: a study file, or with `resume` a run's folder. `changes`: overrides, as
    "train.rounds=5". `output`: the run's folder; by default `runs/` and the study's name.
    `earlier`: folder or id of a run to continue from: clients start from the personal params of
    that run. `same_environment`: also require the versions, device and threads of the run's last
    session. Raises ConfigError if the study is invalid or the folder cannot be used; see
    `prepare_folder`.
    """
    if same_environment and not resume:
        raise ConfigError("--same-environment is for a run that continues: give --resume, too")
    if resume and not file.exists() and file.suffix != ".toml":
        runs = sorted(str(path.parent) for path in file.parent.glob(f"*/{STUDY}"))
        there = f"there are {', '.join(runs[:10])}" if runs else "name the folder of a run"
        raise ConfigError(f"there is no run in {file} to resume: {there}")
    if file.is_dir():
        if not resume:
            raise ConfigError(f"{file} is a run: continue it with --resume")
        if output is not None and output.resolve() != file.resolve():
            raise ConfigError(
                f"--output is {output}, but a run resumes in its own folder {file}: leave it out"
            )
        values = read_run_study(file).model_dump(mode="json")
        study, folder = resolve_paths(study_from_dict(apply_overrides(values, changes)), file), file
    else:
        study = read_study(file, changes)
        folder = output or Path("runs") / study.name
    study = continue_study(study, earlier) if earlier else study
    prepare_folder(folder, study, resume=resume)
    if same_environment:
        require_same_environment(folder, study)
    return study, folder


def prepare_folder(folder: Path, study: Study, *, resume: bool) -> None:
    """Check that a study may run in a folder, and delete a run there that has made no progress.

    A folder with progress (see `has_progress`) needs `resume` and the same study; else raises
    ConfigError. A run without progress stays only with `resume` and the same study.
    """
    busy = (
        f"{folder} holds a run: continue it with --resume (Python: resume=True), or name another "
        "folder"
    )
    if has_progress(folder):
        if not resume:
            raise ConfigError(busy)
        require_same_study(folder, study)
        return
    if resume:
        with suppress(ConfigError):
            run_study = read_run_study(folder)
            same_arguments = run_study.train.train_arguments == study.train.train_arguments
            if not changed_fields(run_study, study) and same_arguments:
                return
    if not (folder / STUDY).exists():
        return
    with (
        wrap_disk_errors(f"{folder} cannot be cleared", "name another folder"),
        locked_folder(folder),
    ):
        if has_progress(folder):  # closed by another process in the meantime
            raise ConfigError(busy)
        for name in ("clients", MODEL_FOLDER):
            shutil.rmtree(folder / name, ignore_errors=True)
        for name in START_FILES:
            (folder / name).unlink(missing_ok=True)


def continue_study(study: Study, earlier: Path | str) -> Study:
    """Return a copy of the study that continues an earlier run, given by its folder or id.

    Raises ConfigError if it continues another run, or if the folder has no run.
    """
    is_id = is_run_id(earlier) and not Path(earlier).is_dir()
    run_id = str(earlier) if is_id else read_identity(Path(earlier)).id
    if study.continue_from not in ("", run_id):
        raise ConfigError(
            f"the study continues the run {study.continue_from}, but {earlier} is {run_id}"
        )
    return study_from_dict(study.model_dump(mode="json") | {"continue_from": run_id})


def import_kept_params(
    study: Study, agreement: Agreement, earlier: Path | str, folder: Path
) -> None:
    """Write each client's personal params of an earlier run as its state in a new folder.

    `agreement`: the new run's. Raises ConfigError if `earlier` is not the folder of the run that
    the study continues.
    """
    if not earlier or not Path(earlier).is_dir():
        raise ConfigError(
            f"the study continues the run {study.continue_from}: give the folder of that run with "
            "--continue-from"
        )
    run = read_run(earlier)
    if run.identity.id != study.continue_from:
        raise ConfigError(
            f"the study continues the run {study.continue_from}, but {earlier} is another run"
        )
    for client in run.clients:
        if state := continued_state(agreement, run.client_state(client)[0]):
            Journal(client_state_folder(folder, client)).initialize(state)


def has_progress(folder: Path) -> bool:
    """Return whether a folder holds a closed round, or spent privacy budget; False if missing.

    Raises StoreError if the folder cannot be read.
    """
    with wrap_disk_errors(f"{folder} cannot be read", "make it readable to this user"):
        charges = (folder / "privacy").rglob(CHARGES_FILE)
        closed = closed_rounds(folder) > 0 or last_ledger_round(newest_segment(folder)) > 1
        return closed or any(file.stat().st_size for file in charges)


def require_same_study(folder: Path, study: Study) -> None:
    """Raise ConfigError if the run in a folder cannot be resumed with this study.

    Both must agree on everything that affects training. Rounds may be added, except where the noise
    or the learning rates depend on their number, and cannot be removed.
    """
    run_study = read_run_study(folder)
    if changed := changed_fields(run_study, study):
        raise ConfigError(
            f"{folder} holds a run of another study, which differs in {', '.join(changed[:8])}: "
            "undo the change, or name another folder"
        )
    if privacy_guarantee(run_study) != privacy_guarantee(study):
        raise ConfigError(
            f"train.rounds is {study.train.rounds}, but the noise of {folder} was calibrated for "
            f"{run_study.train.rounds}: name another folder; set "
            "privacy.noise_multiplier to add rounds later"
        )
    if run_study.train.train_arguments != study.train.train_arguments:
        raise ConfigError(
            f"train.rounds is {study.train.rounds}, but the learning rates of {folder} were "
            f"scheduled over {run_study.train.rounds}: name another folder; set "
            'train.lr_scheduler_span = "round" to add rounds later'
        )
    if study.train.rounds < closed_rounds(folder):
        raise ConfigError(
            f"train.rounds is {study.train.rounds}, but {folder} has {closed_rounds(folder)} "
            "already: rounds can be added, but not removed"
        )
