# SPDX-License-Identifier: Apache-2.0
"""Archives: a run's folder as it was last committed, read without a lock and left as it is."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.identity import RUN, Identity, read_identity
from fedplan.federation.record import parsed
from fedplan.federation.world import LEDGER, WORLD, World, read_world
from fedplan.models.schema import read
from fedplan.privacy.guard import CHARGES
from fedplan.studies.folder import MANIFEST, study_in
from fedplan.studies.schema import ConfigError, Study
from fedplan.studies.stage import agreement_of


@dataclass(frozen=True)
class Archive:
    """What a run's folder holds: the study, the agreement, and all up to its last commit.

    `lines` are those of the ledger up to there, as JSON or, where they are none, as bytes.
    """

    folder: Path
    study: Study
    agreement: Agreement
    identity: Identity
    world: World
    meta: dict[str, Any]
    lines: list[object]


def committed(folder: Path) -> tuple[World, dict[str, Any]]:
    """The world that a run last committed, and its meta."""
    found = read_world(folder)
    if found is None:
        raise ConfigError(f"{folder / WORLD} holds no round that was committed")
    return found


def read_archive(folder: Path) -> Archive:
    """The archive of a run that has committed a round. Nothing in the folder is changed."""
    world, meta = committed(folder)
    study, identity, params = study_in(folder), read_identity(folder), read(folder / MANIFEST)
    try:
        content = (folder / LEDGER).read_bytes()[: meta["files"][LEDGER][0]]
    except OSError as error:
        raise ConfigError(f"{folder} is not the folder of a run: {error}") from error
    agreement = replace(agreement_of(study, params), start=identity.start, run=identity.id)
    lines = [_line(line) for line in content.splitlines()]
    return Archive(folder, study, agreement, identity, world, meta, lines)


def _line(line: bytes) -> object:
    try:
        return parsed(line)
    except FedplanError:
        return line


def file_faults(folder: Path) -> dict[str, str]:
    """Files that are not as they were when the last round was committed, each with the fault."""
    world, meta = committed(folder)
    faults = dict[str, str]()
    for name, (length, sha256) in meta["files"].items():
        file = folder / name
        content = file.read_bytes() if file.is_file() else b""
        if not file.is_file():
            faults[name] = f"{name} is lost"
        elif hashlib.sha256(content[:length]).hexdigest() != sha256:
            faults[name] = f"{name} is not what round {world.round} was committed with"
        elif len(content) > length and not name.endswith(CHARGES):
            faults[name] = (
                f"{name} has {len(content) - length} bytes after round {world.round}, the last "
                "that was committed: go on with the run by --resume, then verify it"
            )
    return faults


def identity_faults(archive: Archive) -> list[str]:
    """Whether the run is the one that its world was made in, of the study that stands there."""
    identity, faults = archive.identity, list[str]()
    if identity.id != archive.meta["run"]:
        faults.append(f"{RUN} says another run than the world was made in")
    if identity.study != archive.study.digest:
        faults.append(f"{RUN} says another study than stands in the folder")
    start = hashlib.sha256(identity.marks.encode()).hexdigest()[:16]
    if identity.start != start:
        faults.append(f"{RUN} says another start than its digests")
    return faults
