# SPDX-License-Identifier: Apache-2.0
"""The section "Record" of a run's report: configuration, data, environment, time and cost."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from fedplan.data.tables import label_sort_key
from fedplan.reports.formats import duration, megabytes
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import PageBlock, PageSection, block
from fedplan.storage.logs import LOG, read_log
from fedplan.studies.record import DATA_FILE, ENVIRONMENT_FILE, read_data_record, read_sessions
from fedplan.studies.schema import Study, flatten_fields

MAIN_FIELDS: Any = {
    "seed": True,
    "train": {"rounds", "epochs", "steps", "batch_size", "optimizer", "lr", "lr_scheduler"},
    "clients": {"fraction"},
    "data": {"partition", "num_clients", "holdout_fraction"},
}
"""Fields of a study that the record shows also if they have their default."""
OMITTED = ("clients.names", "clients.traits", "task.from_python", "method.from_python")
"""Fields that the record leaves out: names of clients, and code that Python gave."""
MAIN_PACKAGES = ("python", "fedplan", "torch", "transformers")
MAX_VALUE, MAX_ROWS, MAX_LABELS = 160, 20, 8
"""The longest value; the most clients, sessions and labels in a table. The files have all."""


def record_section(facts: RunFacts) -> PageSection:
    """Return the record of a run: its settings, data, sessions, time and traffic."""
    return PageSection(
        "Record",
        (
            block("heading", text="Configuration"),
            block("table", columns=("section", "settings"), rows=list(_settings(facts.study))),
            *_data_blocks(facts),
            *_session_blocks(facts),
            block("heading", text="Time and cost"),
            block("table", columns=("", ""), rows=list(_costs(facts))),
        ),
    )


def _settings(study: Study) -> Iterator[tuple[str, str]]:
    """Yield each section of a study and its settings: the main ones, and all that are set."""
    main = study.model_dump(mode="json", include=MAIN_FIELDS)
    if not study.data.path:
        del main["data"]
    if study.train.steps:
        del main["train"]["epochs"]
    else:
        del main["train"]["steps"]
    for section, values in study.model_dump(mode="json", exclude_defaults=True).items():
        nested = isinstance(values, dict) and isinstance(main.get(section, {}), dict)
        main[section] = {**main.get(section, {}), **values} if nested else values
    general = {name: value for name, value in main.items() if not isinstance(value, dict)}
    for section in ("", *(name for name in Study.model_fields if name in main.keys() - general)):
        values = flatten_fields(main[section] if section else general)
        kept = {k: v for k, v in values.items() if not f"{section}.{k}".startswith(OMITTED)}
        texts = list[str]()
        for name, value in kept.items():
            text = str(value) or "none"
            shown = text if len(text) <= MAX_VALUE else f"{text[:MAX_VALUE]} ..."
            texts.append(f"{name} = {shown}")
        if texts:
            yield section or "study", "; ".join(texts)


def _data_blocks(facts: RunFacts) -> Iterator[PageBlock]:
    """Yield the sizes, digests and labels of a run's data, and what was dropped, if recorded."""
    data = read_data_record(facts.run.folder)
    if not data:
        return
    yield block("heading", text="Data")
    train, test = data["train"], data["test"]
    rows = list[tuple[str, ...]]()
    splits = {"training": train, "clients' tests": test, "clients' validation": data["validation"]}
    for name in ("common_test", "common_validation"):
        splits[name.replace("_", " ")] = {"": data[name]} if data[name] else {}
    for name, parts in splits.items():
        if parts:
            count = "" if "" in parts else str(len(parts))
            examples = f"{sum(part['examples'] for part in parts.values()):,}"
            rows.append((name, _joined_digest(parts), count, examples))
    if rows:
        columns = ("split", "digest", "clients", "examples")
        yield block("table", columns=columns, rows=rows, numbers=2)
    if data["private"]:
        yield block("note", text="Clients are hidden: nothing is recorded of single ones.")
    elif not train:
        yield block("note", text="The examples are at the sites, and are not recorded here.")
    else:
        yield from _label_blocks(data)
    for note in data["notes"]:
        yield block("note", text=note)


def _joined_digest(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return 16 hex digits of one digest, or of SHA-256 over those of all clients by name."""
    digests = [str(part["digest"]) for _, part in sorted(parts.items())]
    if len(digests) > 1:
        digests = [hashlib.sha256("".join(digests).encode()).hexdigest()]
    return digests[0][:16]


def _label_blocks(data: Mapping[str, Any]) -> Iterator[PageBlock]:
    """Yield a table of the training examples of each client, by label, with those held out."""
    train, test = data["train"], data["test"]
    labels = sorted({k for part in train.values() for k in part["labels"]}, key=label_sort_key)
    listed = labels if len(labels) <= MAX_LABELS else []
    rows = [
        (
            name,
            *(str(part["labels"].get(label, 0)) for label in listed),
            str(part["examples"]),
            str(test[name]["examples"]) if name in test else "0",
        )
        for name, part in list(train.items())[:MAX_ROWS]
    ]
    columns = ("client", *listed, "training", "test")
    yield block("table", columns=columns, rows=rows, numbers=len(columns) - 1)
    hidden = [
        *([f"{len(train) - MAX_ROWS} more clients"] if len(train) > MAX_ROWS else []),
        *([f"counts of {len(labels)} labels"] if labels and not listed else []),
    ]
    if hidden:
        yield block("note", text=f"{DATA_FILE} in the run's folder has {' and '.join(hidden)}.")


def _session_blocks(facts: RunFacts) -> Iterator[PageBlock]:
    """Yield the environment of the last sessions; nothing for a run of an older version."""
    sessions = read_sessions(facts.run.folder)
    if not sessions:
        return
    rows = [
        (
            f"{each['started'][:16].replace('T', ' ')} UTC",
            *(str(each[name]) for name in ("after_round", "runner", "device", "threads")),
            *(str(each["versions"].get(name, "")) for name in MAIN_PACKAGES),
        )
        for each in sessions[-MAX_ROWS:]
    ]
    columns = ("session started", "after round", "runner", "device", "threads", *MAIN_PACKAGES)
    yield block("heading", text="Environment")
    yield block("table", columns=columns, rows=rows)
    last = sessions[-1]
    others = {k: v for k, v in last["versions"].items() if k not in MAIN_PACKAGES}
    texts = [str(last["platform"]), *(f"{name} {number}" for name, number in others.items())]
    more = f" {ENVIRONMENT_FILE} has all {len(sessions)} sessions." * (len(sessions) > MAX_ROWS)
    yield block("note", text=f"{', '.join(texts)}.{more}")


def _costs(facts: RunFacts) -> Iterator[tuple[str, str]]:
    """Yield time and traffic in all, except where traffic would tell the number of clients."""
    yield "rounds", str(facts.run.round)
    if seconds := _wall_seconds(facts):
        yield "time", duration(seconds)
    if facts.snapshot.status.round_seconds is not None:
        yield "time per round (median)", duration(facts.snapshot.status.round_seconds)
    if not facts.client_level_dp:
        yield from zip(("upload MB", "download MB"), map(megabytes, facts.traffic), strict=True)


def _wall_seconds(facts: RunFacts) -> float:
    """Return the seconds of all sessions, each from its start to its last event in the log."""
    starts = [str(each["started"]) for each in read_sessions(facts.run.folder)]
    # A run from Python without a folder of its own has no log.
    has_log = bool(starts) and (facts.run.folder / LOG).exists()
    times = sorted(entry.time for entry in read_log(facts.run.folder)) if has_log else []
    total = 0.0
    for start, end in pairwise([*starts, "9999"]):
        last = max((time for time in times if start <= time < end), default=start)
        total += (datetime.fromisoformat(last) - datetime.fromisoformat(start)).total_seconds()
    return total
