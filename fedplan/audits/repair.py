# SPDX-License-Identifier: Apache-2.0
"""Repair a simulation's folder: rounds are run again, and the files that they write restored."""

from __future__ import annotations

import filecmp
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fedplan.audits.run import audit_run
from fedplan.errors import FedplanError, StoreError
from fedplan.federation.client import KEY
from fedplan.federation.global_state import BEST, METRICS
from fedplan.federation.identity import GLOBAL_FOLDER, RUN_FILE, STUDY, closed_rounds, read_identity
from fedplan.federation.ledger.records import RecordError, RoundRecord, parse_line, read_record
from fedplan.federation.ledger.segments import newest_segment
from fedplan.federation.server import EVALUATION, WRITE_ONCE_FILES
from fedplan.privacy.guard import CHARGES_FILE, SECRET_FILE
from fedplan.runners.simulation import Simulation
from fedplan.storage.append_log import AppendLog, LogHead, head_file
from fedplan.storage.files import wrap_disk_errors, write_atomic, write_if_changed
from fedplan.storage.locks import acquire_folder_lock
from fedplan.storage.store import Store
from fedplan.studies.in_memory import InMemoryInputs
from fedplan.studies.record import (
    DATA_FILE,
    ENVIRONMENT_FILE,
    INITIAL_SCORES_FILE,
    environment_faults,
)
from fedplan.studies.run import read_run_study
from fedplan.studies.stored_model import MODEL_FOLDER

CLIENTS, PRIVACY = "clients", "privacy"
"""Folders in a run's folder: states of clients, and the files of privacy budgets."""
IRREPLACEABLE = f"{STUDY}, {RUN_FILE}, the keys in {CLIENTS} and the secrets in {PRIVACY}"
"""The files that no repetition of rounds can write again, as a text."""


def repair_run(folder: Path, in_memory: InMemoryInputs | None = None) -> list[str]:
    """Restore the damaged and lost files of a simulation; return their paths in `folder`, sorted.

    `in_memory`: the Python objects of a run of `fp.simulate`. Runs the last round again from the
    one before, or else all rounds from the start, in a folder beside the run's. The rounds must
    repeat the run: the new ledger, or if the old one is damaged the new global state, must have the
    same bytes as the old; else nothing is changed. Raises FedplanError if the run cannot be
    repeated, or if another process has it open.
    """
    replica = folder.absolute().with_name(f".{folder.absolute().name}.repair")
    with wrap_disk_errors(f"{folder} cannot be locked", "name the folder of a run"):
        lock = acquire_folder_lock(folder)  # before any change: another repair may be at work
    failures = list[str]()
    try:
        shutil.rmtree(replica, ignore_errors=True)  # of a repair that was killed
        with suppress(FedplanError):
            if not audit_run(folder).faults:
                return []
        if in_memory is None and _is_from_python(folder):
            raise FedplanError(
                f"{folder} is damaged, and its model and data came from Python: repair it with "
                "fedplan.simulate(..., options=RunOptions(folder=..., resume=True, repair=True)), "
                "with the same objects"
            )
        number = _last_round(folder)
        for prepare in (_copy_before_last_round, _copy_inputs):
            shutil.rmtree(replica, ignore_errors=True)
            try:
                prepare(folder, replica, number)
                _repeat_rounds(replica, number, in_memory)
                _require_same_run(folder, replica)
            except (FedplanError, OSError) as error:
                failures.append(str(error).splitlines()[0].replace(str(replica), str(folder)))
                continue
            with wrap_disk_errors(f"{folder} is half repaired", "make room and repair it again"):
                return sorted(_take_files(replica, folder))
    finally:
        shutil.rmtree(replica, ignore_errors=True)
        del lock
    reasons = "; ".join(dict.fromkeys(failures))
    raise FedplanError(
        f"{folder} cannot be repaired: {reasons}. A repair needs the run's data, and these files: "
        f"{IRREPLACEABLE}; restore what is damaged from a backup"
    )


def _is_from_python(folder: Path) -> bool:
    with suppress(FedplanError):
        return read_run_study(folder).data.from_python
    return False


def _last_round(folder: Path) -> int:
    """Return the last round of which the global state or the ledger has a whole record."""
    numbers = Store(folder / GLOBAL_FOLDER, read_only=True).numbers()
    ledger = newest_segment(folder)
    for line in ledger.read_bytes().splitlines() if ledger.is_file() else ():
        with suppress(RecordError):
            if isinstance(record := read_record(parse_line(line)), RoundRecord):
                numbers.append(record.round)
    return max(numbers, default=0)


def _copy_before_last_round(folder: Path, replica: Path, number: int) -> None:
    """Copy a run without round `number`, its last one, and without damaged states of clients."""
    shutil.copytree(
        folder, replica, ignore=shutil.ignore_patterns("*.tmp", "log.jsonl", f"{ENVIRONMENT_FILE}*")
    )
    (replica / GLOBAL_FOLDER / f"{number}.json").unlink(missing_ok=True)
    for manifest in (replica / CLIENTS).rglob("*.json"):
        store = Store(manifest.parent, read_only=True)
        if any(f"checkpoint {manifest.stem}:" in damage for damage in store.find_damage()):
            manifest.unlink()


def _copy_inputs(folder: Path, replica: Path, number: int) -> None:
    """Copy the files of a run that no round writes: study, identity, secrets, initial model."""
    del number
    replica.mkdir(mode=0o700)
    for name in (STUDY, RUN_FILE):
        if not (folder / name).is_file():
            raise FedplanError(f"{name} is lost")
    inputs = [folder / STUDY, folder / RUN_FILE, *(folder / CLIENTS).rglob(KEY)]
    inputs += [*(folder / PRIVACY).rglob(SECRET_FILE), *(folder / MODEL_FOLDER).rglob("*")]
    for file in inputs:
        target = replica / file.relative_to(folder)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if file.is_file():
            shutil.copy2(file, target)


def _repeat_rounds(replica: Path, number: int, in_memory: InMemoryInputs | None) -> None:
    stored = (replica / MODEL_FOLDER).is_dir()
    simulation = Simulation(read_run_study(replica), replica, in_memory, store_model=stored)
    rounds = simulation.rounds()
    for committed in rounds:
        if committed.round >= number and number < committed.total_rounds:
            break
    rounds.close()  # pyright: ignore[reportAttributeAccessIssue]


def _require_same_run(folder: Path, replica: Path) -> None:
    """Raise FedplanError unless the replica's ledger, or its global state, is that of the run."""
    with suppress(StoreError):
        checkpoint = Store(folder / GLOBAL_FOLDER, read_only=True).peek()
        if checkpoint and checkpoint.meta["run"] != read_identity(replica).id:
            raise FedplanError(f"{RUN_FILE} is not of the same run as {GLOBAL_FOLDER}")
    ledgers = sorted(file.name for file in replica.glob("ledger*.jsonl"))
    newest = closed_rounds(replica)
    evidence: tuple[list[str], ...] = (ledgers, [f"{GLOBAL_FOLDER}/{newest}.json"])
    if not any(
        names and not any(filecmp.cmpfiles(folder, replica, names, shallow=False)[1:])
        for names in evidence
    ):
        raise FedplanError(
            "its rounds gave other results when they were run again, as with other data or "
            "versions of packages"
        )


def _take_files(replica: Path, folder: Path) -> Iterator[str]:
    """Copy the replica's files that differ into the run's folder; yield their relative paths.

    Checkpoints that the replica lacks are removed: they are damaged, or of a round that runs again.
    A log that goes on after the replica's end stays; damaged sessions are lost, and begin anew.
    """
    names = {*WRITE_ONCE_FILES, METRICS, DATA_FILE, INITIAL_SCORES_FILE, EVALUATION}
    if environment_faults(folder):
        names |= {ENVIRONMENT_FILE, head_file(Path(ENVIRONMENT_FILE)).name}
    files = [file for file in replica.iterdir() if file.name in names]
    files += replica.glob("ledger*.jsonl")
    for part in (CLIENTS, PRIVACY, GLOBAL_FOLDER, BEST):
        files += [file for file in (replica / part).rglob("*") if file.is_file()]
    others = [  # before the first copy, whose failure must remove nothing
        file
        for part in (CLIENTS, GLOBAL_FOLDER, BEST)
        for file in (folder / part).rglob("*.json")
        if not (replica / file.relative_to(folder)).exists()
    ]
    for file in files:
        name = file.relative_to(replica)
        if not _is_intact(folder / name, file):
            (folder / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            if file.name == CHARGES_FILE:
                write_atomic(head_file(folder / name), head_file(file).read_bytes())
            write_atomic(folder / name, file.read_bytes())
            yield str(name)
    for file in others:
        file.unlink()


def _is_intact(file: Path, expected: Path) -> bool:
    """Whether a file has the expected content; a charges log may go on, and its head is mended."""
    if file.name == head_file(Path(CHARGES_FILE)).name:
        return True  # mended with its log, or copied here
    if not file.is_file():
        return False
    content = file.read_bytes()
    if file.name != CHARGES_FILE or not content.startswith(expected.read_bytes()):
        return content == expected.read_bytes()
    head = LogHead()
    for line in content.splitlines(keepends=True):
        head = head.extended_by(line)
    write_if_changed(head_file(file), head.text)
    AppendLog(file, chained=True).read()  # raises DamagedLog if the charges after it are damaged
    return True
