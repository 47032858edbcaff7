# SPDX-License-Identifier: Apache-2.0
"""Identity of the run in a folder: a random id, and digests of its inputs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.storage.files import checkpoint_numbers, write_atomic

RUN_FILE, STUDY, GLOBAL_FOLDER = "run.json", "study.json", "global"
"""In a run's folder: the files of its identity and study, and its global model's checkpoints."""

DIGEST_FIELD = "sha256"
"""Field of RUN_FILE with the SHA-256 of all other fields; absent in files of older versions."""

_ID = re.compile("[0-9a-f]{16}")


def closed_rounds(folder: Path) -> int:
    """Return the number of the last round with a checkpoint of the global model; 0 if none."""
    return max(checkpoint_numbers(folder / GLOBAL_FOLDER), default=0)


@dataclass(frozen=True)
class RunIdentity:
    """Identity of a run, as in RUN_FILE of the run's folder.

    `id`: 16 random hex digits; no value of a model depends on the id. `study`: digest of the study.
    `start`: digest of the initial model. `examples`: digest of each client's examples, in a
    simulation. `digests`: 16-digit digests of all params' initial values, as one text
    (`join_digests`).
    """

    id: str = ""
    study: str = ""
    start: str = ""
    examples: dict[str, str] = field(default_factory=dict[str, str])
    digests: str = ""


def is_run_id(value: object) -> bool:
    """Whether a value is a run id: 16 hex digits, so safe as the name of a folder."""
    return isinstance(value, str) and _ID.fullmatch(value) is not None


def load_or_create_identity(folder: Path, expected: RunIdentity) -> RunIdentity:
    """Return the identity of the run in a folder; write the expected one if there is no RUN_FILE.

    A new run takes the expected id, or draws one if that is empty. The caller must have locked the
    folder. Raises FedplanError if the file is damaged, or if the folder has a run of another study,
    initial model or examples.
    """
    file = folder / RUN_FILE
    if not file.exists():
        identity = replace(expected, id=expected.id or token_hex(8))
        fields = asdict(identity)
        text = json.dumps(fields | {DIGEST_FIELD: _digest(fields)}, sort_keys=True)
        write_atomic(file, text + "\n")
    identity = read_identity(folder)
    if identity.study != expected.study:
        raise FedplanError(
            f"{folder} holds a run of another study, or the code that this one names has changed "
            "since: name another folder, or undo the change"
        )
    if (identity.start, identity.digests) != (expected.start, expected.digests):
        raise FedplanError(
            f"{folder} holds a run from the model {identity.start or '?'}, and this one is "
            f"{expected.start or '?'}: use the weights that it began with"
        )
    if changed := changed_examples(identity.examples, expected.examples):
        raise FedplanError(
            f"{folder} holds a run on other examples of {', '.join(changed[:5])}: restore the data "
            "that it began with, or start another run"
        )
    return identity


def read_identity(folder: Path) -> RunIdentity:
    """Return the identity of the run in a folder; changes nothing.

    Raises FedplanError if RUN_FILE is missing, damaged, or has fields of a wrong type.
    """
    file = folder / RUN_FILE
    try:
        fields = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
        if fields.pop(DIGEST_FIELD, "") not in ("", _digest(fields)):
            raise ValueError(f"{DIGEST_FIELD} is the digest of other fields; restore a copy of it")
        unknown = fields.keys() - RunIdentity.__annotations__
        if RunIdentity.__annotations__.keys() - fields and unknown:
            raise FedplanError(
                f"{file.parent} is a run of another version of fedplan, or its {file.name} was "
                f"edited (there is no field {min(unknown)!r}): open and export it with the version "
                "that wrote it"
            )
        identity = RunIdentity(**fields)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise FedplanError(f"{file} does not say which run this is: {error}") from error
    texts = (identity.study, identity.start, identity.digests)
    pairs = identity.examples.items() if type(identity.examples) is dict else [(None, None)]
    if not is_run_id(identity.id) or any(type(t) is not str for t in (*texts, *sum(pairs, ()))):
        raise FedplanError(f"{file} does not say which run this is: restore a copy of it")
    return identity


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def changed_examples(one: Mapping[str, str], other: Mapping[str, str]) -> list[str]:
    """Return the names of clients whose examples' digests differ, sorted."""
    return [name for name in sorted(one.keys() | other) if one.get(name) != other.get(name)]
