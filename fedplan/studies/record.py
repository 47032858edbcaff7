# SPDX-License-Identifier: Apache-2.0
"""The record of a run in its folder: the data it uses, and the environment of each session."""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from fedplan.data.tasks.definition import Task
from fedplan.federation.ledger.digests import ExamplesSummary, summarize_examples
from fedplan.federation.ledger.history import Row, join_scores
from fedplan.federation.server import Server
from fedplan.storage.append_log import AppendLog, DamagedLog, head_file, read_head
from fedplan.storage.files import write_if_changed
from fedplan.storage.logs import utc_now
from fedplan.studies.federated_data import FederatedData
from fedplan.studies.schema import ConfigError, Study, read_json_object
from fedplan.tensors.devices import DeviceError, device_description, resolve_device

DATA_FILE, ENVIRONMENT_FILE = "data.json", "environment.jsonl"
INITIAL_SCORES_FILE = "initial_scores.json"
"""Files in a run's folder: what the run's data is, where each session of it ran, as a chained log,
and the scores of the starting model."""
PACKAGES = ("fedplan", "torch", "transformers", "peft", "bitsandbytes", "datasets", "numpy")
"""Packages whose versions are recorded, if installed."""

log = logging.getLogger("fedplan")


def write_record(server: Server, name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file of a run, and record its digest for `verify`; an unchanged file is kept."""
    text = json.dumps(content, indent=1, ensure_ascii=False)
    write_if_changed(server.folder / name, text + "\n")
    server.record_files([name])


def data_record(study: Study, data: FederatedData) -> dict[str, Any]:
    """Return columns, labels, and size, digest and labels of each split of a study's data.

    "train", "test" and "validation" are by client. If the study hides clients they are left out,
    with all notes: nothing of single clients or examples is stored. On a server without data they
    are empty.
    """
    task, private = data.task, study.hides_clients
    common = {"common_test": data.common_test, "common_validation": data.common_validation}
    held_out = {"test": data.client_tests, "validation": data.client_validations}
    content: dict[str, Any] = {
        "task": task.kind,
        "columns": list(task.columns),
        "label": task.label,
        "labels": list(task.labels),
        "private": private,
        "notes": [] if private else list(data.notes),
        "train": {},
    }
    for split, rows in common.items():
        content[split] = _split_record(task, summarize_examples(rows)) if rows is not None else None
    for split, clients in held_out.items():
        shown = {} if private else clients
        content[split] = {n: _split_record(task, summarize_examples(r)) for n, r in shown.items()}
    if not private:
        summaries = data.train_summaries.items()
        content["train"] = {name: _split_record(task, each) for name, each in summaries}
    return content


def _split_record(task: Task, summary: ExamplesSummary) -> dict[str, Any]:
    names = dict(enumerate(task.labels))
    labels = {names.get(index, str(index)): n for index, n in summary.label_counts.items()}
    return {"examples": summary.count, "digest": summary.digest, "labels": labels}


def read_data_record(folder: Path) -> dict[str, Any]:
    """Return the content of a run's data file; empty for a run of an older version."""
    return read_json_object(folder / DATA_FILE)


def read_initial_scores(folder: Path) -> Row:
    """Return the scores of the starting model, as in the row of a round; may be empty."""
    scores = read_json_object(folder / INITIAL_SCORES_FILE)
    return join_scores([{"round": 0}], [{**scores, "round": 0}])[0]


def current_environment(study: Study) -> dict[str, Any]:
    """Return what this process runs a study with: versions, device, threads and machine."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    try:
        device = device_description(resolve_device(study.device))
    except DeviceError:
        device = f"{study.device} at the sites"
    return {
        "versions": versions,
        "device": device,
        "threads": study.threads,
        "machine": platform.machine(),
        "platform": platform.platform(),
    }


def record_session(
    folder: Path, study: Study, runner: str, committed: int, devices_per_client: int = 1
) -> None:
    """Append a session to a run's environment file, and log a warning if its environment is new.

    Nothing is written after the last round. Raises DamagedLog if the file was edited.
    """
    if committed >= study.train.rounds:
        return
    sessions, environment = read_sessions(folder), current_environment(study)
    environment["devices_per_client"] = devices_per_client
    if changes := environment_changes(sessions[-1], environment) if sessions and committed else []:
        log.warning(
            "the run continues in another environment (%s), so its values may differ from those "
            "of an uninterrupted run: --same-environment refuses this",
            "; ".join(changes),
        )
    started = {"started": utc_now(), "after_round": committed, "runner": runner}
    AppendLog(folder / ENVIRONMENT_FILE, chained=True).append(started | environment)


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """Return the sessions of a run, oldest first; raise DamagedLog if the file was edited."""
    return AppendLog(folder / ENVIRONMENT_FILE, chained=True).read()


def environment_faults(folder: Path) -> list[str]:
    """Return a sentence if the environment file of a started run is lost or was edited."""
    file = folder / ENVIRONMENT_FILE
    try:
        counted, lines = read_head(file).lines, len(read_sessions(folder))
    except DamagedLog as error:
        return [str(error)]
    # A kill may leave one line that the head does not count yet.
    if lines and counted and lines - counted in (0, 1):
        return []
    return [f"{file.name} or {head_file(file).name} is lost: restore it from a backup"]


def environment_changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a text for each version, device, number of threads and machine that differs.

    >>> environment_changes({"threads": 1}, {"threads": 2, "devices_per_client": 2})
    ['threads 2, before 1', 'devices per client 2, before 1']
    """
    pairs = [(name, before.get(name), now.get(name)) for name in ("device", "threads", "machine")]
    devices: Sequence[int] = [each.get("devices_per_client", 1) for each in (before, now)]
    pairs += [("devices per client", *devices)]
    versions: Sequence[Mapping[str, Any]] = [dict(e.get("versions", {})) for e in (before, now)]
    pairs += [(n, *(each.get(n) for each in versions)) for n in ("python", *PACKAGES)]
    return [
        f"{name} {'none' if new is None else new}, before {'none' if old is None else old}"
        for name, old, new in pairs
        if old != new
    ]


def require_same_environment(folder: Path, study: Study) -> None:
    """Raise ConfigError unless this process has the environment of the run's last session."""
    sessions = read_sessions(folder)
    if not sessions:
        raise ConfigError(
            f"{folder} has no {ENVIRONMENT_FILE} to compare with: resume it without "
            "--same-environment"
        )
    last = sessions[-1] | {"devices_per_client": 1}  # an option of the command, not of the study
    if changes := environment_changes(last, current_environment(study)):
        raise ConfigError(
            f"{folder} has run in another environment ({'; '.join(changes)}): restore that, or "
            "resume without --same-environment"
        )
