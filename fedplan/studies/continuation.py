# SPDX-License-Identifier: Apache-2.0
"""Continuations: what a folder holds of a run, and whether a study may go on with it."""

from __future__ import annotations

import shutil
from pathlib import Path

from fedplan.federation.identity import RUN, is_id, read_identity
from fedplan.federation.remains import last_told
from fedplan.federation.segments import newest_segment
from fedplan.federation.server import STUDY
from fedplan.federation.world import WORLD
from fedplan.privacy.guard import CHARGES
from fedplan.storage.errors import explained
from fedplan.storage.journal import Journal, home_of
from fedplan.storage.locks import alone
from fedplan.storage.store import Store
from fedplan.studies.folder import MANIFEST, TASK, study_in
from fedplan.studies.run import open_run
from fedplan.studies.schema import (
    ConfigError,
    Study,
    differences,
    laid_over,
    placed,
    read_study,
    study_of,
)
from fedplan.studies.stage import guarantee_of
from fedplan.tensors.riders import is_rider

WRITTEN = (STUDY, MANIFEST, TASK, RUN)
"""What a start writes before its first round."""


def open_study(
    file: Path, changes: list[str], output: Path | None, *, resume: bool, earlier: str = ""
) -> tuple[Study, Path]:
    """The study of a file, or of a run's folder, and the folder that it is to run in.

    `earlier` is the run whose kept parts it goes on from: a folder, or an id.
    """
    if file.is_dir():
        if not resume:
            raise ConfigError(f"{file} is a run: go on with it by --resume")
        if output is not None and output.resolve() != file.resolve():
            raise ConfigError(
                f"--output is {output}, and {file} goes on where it is: leave it out, or copy the "
                "run's folder and go on with the copy"
            )
        said = study_in(file).model_dump(mode="json")
        study, folder = placed(study_of(laid_over(said, changes)), file), file
    else:
        study = read_study(file, changes)
        folder = output or Path("runs") / study.name
    study = continuing(study, earlier) if earlier else study
    require_free(folder, study, resume=resume)
    return study, folder


def require_free(folder: Path, study: Study, *, resume: bool) -> None:
    """Raise unless a study may run in a folder: none ran there, or `resume` goes on with its own.

    A start that closed no round, and has paid for none, leaves nothing that anybody needs.
    """
    if not begun(folder):
        return None if resume and _same(folder, study) else _clear(folder)
    if not resume:
        raise ConfigError(f"{folder} holds a run: go on with it by --resume, or name another")
    require_same(folder, study)


def continuing(study: Study, earlier: Path | str) -> Study:
    """A study that goes on from what was kept in an earlier run: its folder, or its id."""
    known = is_id(earlier) and not Path(earlier).is_dir()
    number = str(earlier) if known else read_identity(Path(earlier)).id
    if study.continues not in ("", number):
        raise ConfigError(f"the study continues {study.continues}, and {earlier} is {number}")
    return study_of(study.model_dump(mode="json") | {"continues": number})


def carry_over(study: Study, earlier: Path | str, folder: Path) -> None:
    """Have each client of a new run begin with what it kept in an earlier one."""
    if not earlier or not Path(earlier).is_dir():
        raise ConfigError(
            f"the study continues the run {study.continues}: say the folder of that run by "
            "--continue-from"
        )
    run = open_run(earlier)
    if run.identity.id != study.continues:
        raise ConfigError(f"the study continues {study.continues}, and {earlier} is another run")
    for client in run.clients:
        kept = {k: v for k, v in run.home(client)[0].items() if not is_rider(k)}
        if kept:
            Journal(home_of(folder, client)).begin(kept)


def begun(folder: Path) -> bool:
    """Whether a folder holds a round that was closed, or paid for.

    A ledger that tells of a second round had a first one, though its world may be lost.
    """
    with explained(f"{folder} cannot be read", "make it readable to this user"):
        charges = (folder / "privacy").rglob(CHARGES)
        closed = _done(folder) > 0 or last_told(newest_segment(folder)) > 1
        return closed or any(file.stat().st_size for file in charges)


def require_same(folder: Path, study: Study) -> None:
    """Raise unless a study is the one that a folder is of, but for what changes no turn."""
    old = study_in(folder)
    if fields := differences(old, study):
        raise ConfigError(
            f"{folder} holds a run of another study, which differs in {', '.join(fields[:8])}: "
            "take that back, or name another folder"
        )
    if guarantee_of(old) != guarantee_of(study):
        raise ConfigError(
            f"train.rounds is {study.train.rounds}, and the noise of {folder} was chosen for "
            f"{old.train.rounds}: name another folder; who says privacy.noise may add rounds later"
        )
    if old.train.pace != study.train.pace:
        raise ConfigError(
            f"train.rounds is {study.train.rounds}, and the schedule of {folder} goes over "
            f"{old.train.rounds}, so that its rates were other ones: name another folder; who says "
            'train.over = "turn" may add rounds later'
        )
    if study.train.rounds < _done(folder):
        raise ConfigError(
            f"train.rounds is {study.train.rounds}, and {folder} has {_done(folder)} already: "
            "rounds can be added, and not taken back"
        )


def _same(folder: Path, study: Study) -> bool:
    try:
        old = study_in(folder)
        return not differences(old, study) and old.train.pace == study.train.pace
    except ConfigError:
        return False


def _done(folder: Path) -> int:
    place = folder / WORLD
    return max(Store(place, reading=True).numbers(), default=0) if place.is_dir() else 0


def _clear(folder: Path) -> None:
    """Remove what a start that failed has left; a run that closes its first round is let be."""
    if not (folder / STUDY).exists():
        return
    with explained(f"{folder} cannot be cleared", "name another folder"), alone(folder):
        if begun(folder):  # by another process, since this one looked
            raise ConfigError(f"{folder} holds a run: go on with it by --resume, or name another")
        shutil.rmtree(folder / "homes", ignore_errors=True)
        for name in WRITTEN:
            (folder / name).unlink(missing_ok=True)
