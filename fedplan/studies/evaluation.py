# SPDX-License-Identifier: Apache-2.0
"""Evaluation of a run's models on all test examples, and its file in the run's folder."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.evaluation import evaluate_predictions, youden_threshold
from fedplan.data.examples import Examples
from fedplan.data.metrics import Predictions
from fedplan.data.tasks.definition import Task
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import global_values, personal_values
from fedplan.federation.identity import changed_examples
from fedplan.federation.server import EVALUATION, Server
from fedplan.language.predicates import Turn
from fedplan.models.values import set_values
from fedplan.studies.experiment import build_experiment, require_study_from_files
from fedplan.studies.federated_data import FederatedData
from fedplan.studies.record import write_record
from fedplan.studies.run import read_run
from fedplan.studies.run_scores import untrained_kinds
from fedplan.studies.schema import ConfigError, Study, read_json_object
from fedplan.tensors.named import Tensors

COMMON = ""
"""Name of the common test set, in place of a client."""


@dataclass(frozen=True)
class RunPredictions:
    """Predictions of a run's models: by model ("global", "personal") and client, or COMMON.

    `validation` are on the examples of which thresholds are chosen. `groups` are those of test
    examples, by client, and `rows` their rows in the dataset's file, if known.
    """

    task: Task
    round: int
    test: dict[tuple[str, str], Predictions]
    validation: dict[tuple[str, str], Predictions]
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    rows: Mapping[str, Sequence[int]] = field(default_factory=dict[str, Sequence[int]])
    untrained: str = ""

    def tables(self) -> dict[str, Any]:
        """Return the content of EVALUATION: see `evaluate_predictions`.

        `sets` has an entry for each model and test set, with `model`, and `on`: "common", or
        "clients" for the test examples of all clients together. The latter has the tables of each
        client, without intervals, in `clients`. `chosen_on` says where the threshold is from.
        """
        sets = list[dict[str, Any]]()
        for model, on in (("personal", "clients"), ("global", "clients"), ("global", "common")):
            names = [n for m, n in self.test if m == model and (n == COMMON) == (on == "common")]
            if not names:
                continue
            threshold, chosen = None, [p for (m, _), p in self.validation.items() if m == model]
            if chosen and self.task.answer_kind == "class" and len(self.task.labels) == 2:
                threshold = youden_threshold(Predictions.join(chosen))
            pooled = Predictions.join([self.test[model, name] for name in names])
            groups = [group for name in names for group in self.groups.get(name, ())]
            entry: dict[str, Any] = {"model": model, "on": on}
            entry |= {"untrained": self.untrained} if model == "global" and self.untrained else {}
            groups = groups if len(groups) == len(pooled) else []
            entry |= evaluate_predictions(self.task, pooled, groups=groups, threshold=threshold)
            if "threshold" in entry:
                entry["chosen_on"] = "default" if threshold is None else "validation"
            if on == "clients":
                entry["clients"] = {
                    name: evaluate_predictions(
                        self.task, self.test[model, name], threshold=threshold, intervals=False
                    )
                    for name in names
                }
            sets.append(entry)
        return {
            "round": self.round,
            "primary": self.task.primary,
            "answer_kind": self.task.answer_kind,
            "f1_average": self.task.f1_average,
            "labels": list(self.task.labels),
            "sets": sets,
        }

    def write_csv(self, file: Path) -> int:
        """Write a row for each test prediction, and return the number of rows.

        Row numbers of the dataset's file begin at 1. Labels of one example are joined by "|".
        Raises ConfigError for a language task without generated texts.
        """
        task = self.task
        if task.answer_kind == "tokens" and next(iter(self.test.values())).texts is None:
            raise ConfigError(
                f"{task.kind} predicts each token of a text: there is no table of it, "
                "unless evaluate.metrics has a metric of texts, as exact_match"
            )
        shown = cast("Any", next(iter(self.test.values()))).probabilities
        columns = [f"p({label})" for label in task.labels] if shown is not None else []
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer, count = csv.writer(stream), 0
            writer.writerow(["client", "model", "example", "row", "truth", "predicted", *columns])
            for (model, client), predictions in self.test.items():
                rows: Sequence[Any] = self.rows.get(client, ())
                has_rows = len(rows) == len(predictions)
                for example, *values in _rows(task, predictions):
                    row = rows[example] if has_rows else ""
                    writer.writerow([client, model, example, row, *values])
                    count += 1
        return count


def _rows(task: Task, predictions: Predictions) -> Iterator[list[Any]]:
    """Yield example, truth, predicted and probabilities of each prediction."""
    if predictions.texts is not None:
        yield from ([i, *texts] for i, texts in enumerate(predictions.texts))
        return

    def text(value: Any) -> Any:
        if task.answer_kind == "labels":
            return "|".join(label for label, has in zip(task.labels, value, strict=True) if has)
        return str(task.labels[value]) if task.answer_kind == "class" else float(value)

    examples = [i for i, size in enumerate(predictions.sizes.tolist()) for _ in range(size)]
    for row, example in enumerate(examples):
        values = (predictions.truth[row], predictions.predicted[row])
        probabilities = predictions.probabilities
        shown: list[float] = [] if probabilities is None else probabilities[row].tolist()
        yield [example, *map(text, values), *shown]


def absence_reason(study: Study) -> str:
    """Return why runs of a study have no EVALUATION; "" if those with test examples have it."""
    if study.hides_clients:
        return (
            "it promises privacy, so there are no scores beside those by round: evaluate an "
            "exported model on data of your own"
        )
    if study.task.kind == CUSTOM_KIND:
        return (
            "a CustomTask has no predictions, only the scores by round: use a task of fedplan, or "
            "evaluate run.global_model() yourself"
        )
    if not study.has_central_data and not study.data.test_path:
        return (
            "the test examples are at the sites, which send only the scores by round: set "
            "data.test_path for a test set at the server"
        )
    return ""


def predict_all(
    study: Study,
    data: FederatedData,
    model: nn.Module,
    agreement: Agreement,
    round_number: int,
    global_values: Tensors,
    personal_values: Callable[[str], Mapping[str, Tensor]] | None,
) -> RunPredictions | None:
    """Predict all test and validation examples with the global and the personal models.

    Personal models are left out if they are not evaluated or equal the global one; without
    `personal_values` the common sets alone are predicted. Changes the values of `model`. None if
    there is no test example, or for `absence_reason`.
    """
    task, params = data.task, agreement.trainable
    common = {"test": data.common_test, "validation": data.common_validation}
    of_clients = {"test": data.client_tests, "validation": data.client_validations}
    if personal_values is None:
        of_clients = dict[str, Mapping[str, Examples]]({"test": {}, "validation": {}})
    if absence_reason(study) or not (of_clients["test"] or data.common_test):
        return None
    predictions: dict[str, dict[tuple[str, str], Predictions]] = {"test": {}, "validation": {}}

    def predict(kind: str, name: tuple[str, str], examples: Examples | None) -> None:
        if examples is not None and len(examples):
            size = study.evaluate.batch_size
            predictions[kind][name] = task.predict(model, examples, batch_size=size)

    set_values(model, global_values, params)
    for kind in predictions:
        predict(kind, ("global", COMMON), common[kind])
        for name, examples in of_clients[kind].items():
            predict(kind, ("global", name), examples)
    if study.evaluate.personal and personal_values is not None:
        names = dict.fromkeys(name for clients in of_clients.values() for name in clients)
        values = {name: personal_values(name) for name in names}
        if any(not torch.equal(v[k], global_values[k]) for v in values.values() for k in v):
            for name in names:
                set_values(model, values[name], params)
                for kind in predictions:
                    predict(kind, ("personal", name), of_clients[kind].get(name))
    untrained = untrained_kinds(agreement)
    return RunPredictions(
        task,
        round_number,
        **predictions,
        groups=data.test_groups,
        rows=data.test_rows,
        untrained=untrained,
    )


def is_evaluated(server: Server) -> bool:
    """Whether the run's folder has the tables of its last round, as they were written."""
    number = server.global_state.round
    return server.is_recorded(EVALUATION) and read_evaluation(server.folder).get("round") == number


def write_evaluation(server: Server, predictions: RunPredictions | None) -> None:
    """Write the tables of predictions to a run's folder, if there are any."""
    if predictions is not None:
        write_record(server, EVALUATION, predictions.tables())


def read_evaluation(folder: Path) -> dict[str, Any]:
    """Return the tables in a run's folder, {} if there are none; ConfigError if unreadable."""
    return read_json_object(folder / EVALUATION, f"run: fedplan evaluate {folder}")


def evaluate_run(folder: Path, client: str = "") -> RunPredictions:
    """Predict all test examples with the models of a run, from its folder and its study's files.

    `client` selects one client. Raises ConfigError if the run hides clients, has no test
    examples, or if its data or model cannot be read or have changed.
    """
    run = read_run(folder)
    study, state = run.study, run.global_state
    if reason := absence_reason(study):
        raise ConfigError(f"{folder} cannot be evaluated: {reason}")
    require_study_from_files(study)
    if client:
        run.require_client(client)
    experiment = build_experiment(study)
    experiment.require_start(run.agreement.start)
    examples = run.identity.examples  # {} on a server of sites, which have the clients' states
    if changed := changed_examples(examples, experiment.data.digests) if examples else []:
        raise ConfigError(
            f"{folder} holds a run on other examples of {', '.join(changed[:5])}: restore the data "
            "that it began with"
        )
    start, agreement = experiment.initial_values, run.agreement

    def values_of_client(name: str) -> Tensors:
        turn = Turn(state.round, name, state.phase, study.clients.traits.get(name, {}))
        return personal_values(agreement, state, start, turn, run.client_state(name)[0])

    predictions = predict_all(
        study,
        experiment.data,
        experiment.model,
        agreement,
        state.round,
        global_values(agreement, state, start),
        values_of_client if examples else None,
    )
    if predictions is None:
        raise ConfigError(
            f"{folder} has no test examples: set data.holdout_fraction, data.test_split or "
            "data.test_path in its study"
        )
    if not client:
        return predictions
    kept = {key: part for key, part in predictions.test.items() if key[1] == client}
    if not kept:
        raise ConfigError(f"{client} has no test examples: name another client")
    return replace(predictions, test=kept)
