# SPDX-License-Identifier: Apache-2.0
"""Warnings of a study that are known before its first round: of its plan and of its data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import signature
from math import ceil
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.language.coverage import planned_turns
from fedplan.language.resolution import Participants, phase_names
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.registry import METHOD_REGISTRY
from fedplan.reports.plan_warnings import (
    RunWarning,
    SettingText,
    file_setting,
    plan_warnings,
    python_setting,
)
from fedplan.studies.federated_data import EMPTY_CLIENTS
from fedplan.studies.schema import Study

MIN_TEST_EXAMPLES = 30
"""With fewer test examples, one example changes an accuracy by more than 0.03."""
NOTHING_RUN = "nothing was run"
"""What a strict run says that is refused before its first round."""
MAX_NAMES = 5
"""The most names in a warning."""

DATA_WARNINGS = {
    "no-test-examples": "neither the global nor a personal model is scored",
    "few-test-examples": f"a score is on fewer than {MIN_TEST_EXAMPLES} examples in all",
    "few-client-test-examples": f"a client has fewer than {MIN_TEST_EXAMPLES} test examples",
    "tested-on-training": "a test set is the training set of a client",
    "same-examples": "two clients have the same training examples",
    "one-label": "all training examples have the same label",
    "label-at-one-client": "a label occurs at one client only",
    "label-not-trained": "a label occurs in tests and in no training example",
    "client-without-examples": "a client has no training examples",
}
"""The codes of warnings of the data, with their meaning."""


def setting_text(study: Study) -> SettingText:
    """Return how the user of a study sets a field: as an option, or in Python."""
    return python_setting if study.data.from_python else file_setting


def phase_fields(study: Study) -> dict[str, str]:
    """Return the field of a study that says after which round a phase begins, by phase."""
    method = study.method
    fields = {name: f"method.phases.{name}" for name in method.phases}
    if method.name and "warmup" in signature(METHOD_REGISTRY.find(method.name).value).parameters:
        fields.setdefault("frozen", "method.settings.warmup")
    return fields


def study_warnings(
    study: Study, agreement: Agreement, record: Mapping[str, Any], clients: Iterable[str] = ()
) -> list[RunWarning]:
    """Return the warnings of a study that are known before round 1, by its `data_record`."""
    names = clients or study.clients.names or record.get("train") or ()
    roster = {name: study.clients.traits.get(name, {}) for name in names}
    return [*planned_warnings(study, agreement, roster), *data_warnings(study, record)]


def planned_warnings(
    study: Study, agreement: Agreement, roster: Mapping[str, Mapping[str, str]]
) -> Iterator[RunWarning]:
    """Yield the warnings of a study's plan over all planned rounds; no roster if not known."""
    plan, rule = agreement.method.plan, agreement.method.phase_rule
    planned = dict(rule.after) if isinstance(rule, PlannedPhases) else dict[str, int]()
    unknown = [name for name in phase_names(plan) if name not in planned]
    participants = Participants(roster) if roster else None
    turns = planned_turns(plan, study.train.rounds, planned, unknown, participants)
    fields, setting = phase_fields(study), setting_text(study)
    return plan_warnings(
        plan, agreement.params, turns, phases=planned, setting=setting, phase_fields=fields
    )


def data_warnings(study: Study, record: Mapping[str, Any]) -> Iterator[RunWarning]:
    """Yield the warnings of the data of a run, by its `data_record`, which hides private data."""
    setting = setting_text(study)
    common: Mapping[str, Any] | None = record.get("common_test")
    train: Mapping[str, Mapping[str, Any]] = record.get("train") or {}
    tests: Mapping[str, Mapping[str, Any]] = record.get("test") or {}
    yield from _test_size_warnings(study, common, tests, train)
    for name, split in train.items():
        if common and split["digest"] == common["digest"]:
            yield _tested_on_training("The common test set has", name)
        elif name in tests and split["digest"] == tests[name]["digest"]:
            yield _tested_on_training(f"The test of {name} has", name)
    by_digest = dict[str, list[str]]()
    for name, split in train.items():
        by_digest.setdefault(split["digest"], []).append(name)
    for names in by_digest.values():
        if len(names) > 1 and train[names[0]]["examples"]:
            yield RunWarning(
                "same-examples",
                f"{join_names(names)} have the same training examples.",
                "Give each client its own examples, or remove the duplicates from the data.",
            )
    yield from _label_warnings(study, common, train, tests)
    empty = [name for name, split in train.items() if not split["examples"]]
    empty += [name for name in study.clients.names if train and name not in train]
    notes = [str(note) for note in record.get("notes", ()) if str(note).endswith(EMPTY_CLIENTS)]
    if empty or notes:
        text = f"No training examples: {join_names(empty)}." if empty else notes[0]
        remedy = "Leave these clients out, or give them examples"
        if not study.data.from_python:
            remedy += f"; or use fewer: {setting('data.num_clients', max(1, len(train)))}"
        yield RunWarning("client-without-examples", text, remedy)


def _test_size_warnings(
    study: Study,
    common: Mapping[str, Any] | None,
    tests: Mapping[str, Mapping[str, Any]],
    train: Mapping[str, Mapping[str, Any]],
) -> Iterator[RunWarning]:
    """Yield warnings of missing and of small test sets; `tests` are those of the clients."""
    setting, python = setting_text(study), study.data.from_python
    sizes = {name: int(split["examples"]) for name, split in tests.items()}
    if common is None and train and not sizes:
        remedy = "give test=..., or clients={name: {'train': ..., 'test': ...}}"
        if not python:
            remedy = f"hold examples out: {setting('data.holdout_fraction', 0.2)}"
        text = "There are no test examples, so no model has a score."
        yield RunWarning("no-test-examples", text, remedy.capitalize())
    total = common["examples"] if common else sum(sizes.values())
    if (common or sizes) and total < MIN_TEST_EXAMPLES:
        what = "The common test set has" if common else "All clients' tests have"
        text = f"{what} {total} examples: one of them changes a score by {1 / max(1, total):.2f}."
        remedy = "Give more test examples" + ("" if python else ", as by data.test_path")
        yield RunWarning("few-test-examples", text, remedy)
    few = [name for name, size in sizes.items() if size < MIN_TEST_EXAMPLES]
    if not (study.evaluate.personal or study.evaluate.on_clients):
        few = list[str]()  # no client has a score of its own
    if few and (common or total >= MIN_TEST_EXAMPLES):
        least = min(few, key=lambda name: sizes[name])
        every = sizes[least] + int(train[least]["examples"])
        remedy = "Give these clients more test examples"
        if not python and study.data.partition != "column" and every < 2 * MIN_TEST_EXAMPLES:
            total = sum(sizes.values()) + sum(int(split["examples"]) for split in train.values())
            fewer = total // (5 * MIN_TEST_EXAMPLES)
            remedy = "Give more examples: these are too few for a score of each client"
            if fewer > 1:
                remedy = f"Use fewer clients: {setting('data.num_clients', fewer)}"
        elif not python and every >= 2 * MIN_TEST_EXAMPLES:
            fraction = ceil(100 * MIN_TEST_EXAMPLES / every) / 100
            remedy = f"Hold more examples out: {setting('data.holdout_fraction', fraction)}"
        yield RunWarning(
            "few-client-test-examples",
            f"{len(few)} of {len(sizes)} clients: fewer than {MIN_TEST_EXAMPLES} test examples "
            f"(least: {least}, {sizes[least]}), so their own scores are uncertain.",
            remedy,
        )


def _label_warnings(
    study: Study,
    common: Mapping[str, Any] | None,
    train: Mapping[str, Mapping[str, Any]],
    tests: Mapping[str, Mapping[str, Any]],
) -> Iterator[RunWarning]:
    """Yield warnings of how labels are distributed; none for data without labels."""
    clients_by_label = dict[str, list[str]]()
    for name, split in train.items():
        for label in split["labels"]:
            clients_by_label.setdefault(label, []).append(name)
    if len(clients_by_label) == 1 and len(train):
        label = next(iter(clients_by_label))
        yield RunWarning(
            "one-label",
            f"All training examples have the label {label}, so there is nothing to tell apart.",
            "Check the label column (task.label), and filters of the data.",
        )
        return
    alone = {label: names[0] for label, names in clients_by_label.items() if len(names) == 1}
    if alone and len(train) > 1:
        label, name = next(iter(alone.items()))
        text = f"{len(alone)} labels occur at one client only ({join_names(alone)})."
        if len(alone) == 1:
            text = f"The label {label} occurs at {name} only."
        remedy = "The model of other clients cannot learn it, and updates may reveal it"
        if study.data.path and study.data.partition != "column":
            remedy += f"; to mix labels: {setting_text(study)('data.partition', 'iid')}"
        yield RunWarning("label-at-one-client", text, remedy)
    tested = {
        label
        for split in (*tests.values(), *([common] if common else []))
        for label in split["labels"]
    }
    if train and clients_by_label and (unseen := sorted(tested - clients_by_label.keys())):
        yield RunWarning(
            "label-not-trained",
            f"No training example has the label {join_names(unseen)}, which the tests have.",
            "Add training examples of it, or leave it out of the tests, as with data.filter.",
        )


def _tested_on_training(owner: str, client: str) -> RunWarning:
    return RunWarning(
        "tested-on-training",
        f"{owner} the training examples of {client}, so its score says nothing of new examples.",
        "Give test examples that no client trains on.",
    )


def refuse_warnings(warnings: Sequence[RunWarning], outcome: str) -> None:
    """Raise FedplanError with the codes of warnings, for a strict run; `outcome`: what was run."""
    if warnings:
        codes = ", ".join(dict.fromkeys(warning.code for warning in warnings))
        raise FedplanError(f"strict: {outcome}, because of {codes}")


def join_names(names: Iterable[object]) -> str:
    """Return the first names with commas, and how many more there are."""
    every = list(map(str, names))
    more = f" and {len(every) - MAX_NAMES} more" if len(every) > MAX_NAMES else ""
    return ", ".join(every[:MAX_NAMES]) + more
