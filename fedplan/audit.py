# SPDX-License-Identifier: Apache-2.0
"""Audits: a run's folder re-checked: its ledger, and the values that lie on the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedplan.agreement import Setup
from fedplan.config import ConfigError, read_study
from fedplan.content import keyed
from fedplan.explanation import Explanation, explain
from fedplan.journal import Journal, home_of
from fedplan.ledger import digest, parted
from fedplan.outgoing import AGREEMENT, read_agreement
from fedplan.phases import Planned
from fedplan.privacy.promise import require_sound
from fedplan.privacy.secret import secret_of
from fedplan.privacy.statement import Statement
from fedplan.site import KEY
from fedplan.store import Store
from fedplan.studies import method_of, promise_of, read_run, stage_of, study_in
from fedplan.verification import verify_lines


def verify_run(folder: Path) -> tuple[list[str], str]:
    """Every fault of a run, in words, and a sentence of what was checked."""
    _, setup, lines = read_run(folder)
    turns = [line for line in lines if "moved" not in line]
    faults = verify_lines(setup, lines)
    faults += _world_faults(folder, lines)
    faults += _home_faults(folder, setup, turns)
    up, down = (sum(line[way] for line in turns) for way in ("up", "down"))
    rested = sum(line["roles"].count("F") + line["roles"].count("H") for line in turns)
    clients = len({line["client"] for line in turns})
    return faults, (
        f"{len(lines) - len(turns)} rounds, {clients} clients, {len(turns)} turns: "
        f"{rested} params rested and none of them moved; "
        f"{up} bytes went up and {down} came down, all of them explained by the plan "
        f"{setup.method.plan.fingerprint}; no client's own param was in a message."
    )


def _world_faults(folder: Path, lines: list[dict[str, Any]]) -> list[str]:
    """The committed world must be what the ledger last said of each of its values."""
    last: dict[str, str] = {}
    for line in lines:
        last |= line.get("moved", {})
    found = Store(folder / "world").read()
    held = found.tensors if found else {}
    return [
        f"the world's {key} is not what the ledger says"
        for key, mark in last.items()
        if f"value/{key}" not in held or digest(held[f"value/{key}"]) != mark
    ]


def _home_faults(folder: Path, setup: Setup, turns: list[dict[str, Any]]) -> list[str]:
    """Each home must be what its client's last turn left."""
    faults = list[str]()
    for client, line in {line["client"]: line for line in turns}.items():
        place = home_of(folder, client)
        home, _ = Journal(place).home()
        if home and not (place / KEY).exists():
            faults.append(f"{client} has lost the key of its digests, {place / KEY}")
            continue
        key = secret_of(place / KEY) if home else b""
        after = parted(setup.params, line["after"])
        for p, letter in zip(setup.params, line["roles"], strict=True):
            if letter not in "KH" or p.key not in home:
                continue
            if keyed(key, p.key, digest(home[p.key])) != after[p.key]:
                faults.append(f"{client}'s {p.key} is not what its last turn left")
    return faults


def foretold(file: Path) -> tuple[Explanation, Statement | None]:
    """What a study will do with its model, and what that will cost of privacy."""
    study = read_study(file)
    setup, rounds = stage_of(study).setup, study.train.rounds
    announce = setup.method.announce
    phases = announce.after if isinstance(announce, Planned) else None
    explanation = explain(setup.method.plan, setup.params, rounds=rounds, phases=phases)
    return explanation, Statement.of(setup.promise, rounds) if setup.promise else None


def stated(place: Path) -> Statement:
    """What a study promises, or a run has spent; a run's is also written into its folder."""
    if place.is_dir():
        study = study_in(place)
        folder: Path | None = place
    else:
        study, folder = read_study(place), None
    promise = promise_of(study)
    if promise is None:
        raise ConfigError(f"{place} promises nothing: it has no [privacy]")
    require_sound(promise, method_of(study))
    charged, run = folder, ""
    if folder is not None and (folder / AGREEMENT).exists():
        agreed = read_agreement(folder)
        charged, run = Path(agreed["account"]), agreed["run"]
    found = Statement.of(promise, study.train.rounds, charged, run=run)
    if folder is not None:
        (folder / "privacy.json").write_text(json.dumps(found.json(), indent=1) + "\n")
    return found
