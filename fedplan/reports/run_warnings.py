# SPDX-License-Identifier: Apache-2.0
"""Warnings of a run: reasons to doubt its result, from the files in its folder alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import fsum, isfinite
from pathlib import Path
from typing import Any

from fedplan.audits.ledger import Movement
from fedplan.errors import FedplanError
from fedplan.language.parts import named
from fedplan.language.plan import chain, freeze
from fedplan.language.predicates import Turn
from fedplan.reports.pages.facts import RunFacts, read_run_facts
from fedplan.reports.plan_warnings import FOLDER, RunWarning, plan_warnings
from fedplan.reports.study_warnings import (
    data_warnings,
    join_names,
    phase_fields,
    planned_warnings,
    setting_text,
)
from fedplan.studies.record import read_data_record, read_initial_scores
from fedplan.studies.run import read_consistently
from fedplan.studies.run_scores import COMMON_TEST, RunScore
from fedplan.studies.schema import Study
from fedplan.studies.sections import TrainConfig
from fedplan.tensors.compression import plain

RESULT_WARNINGS = {
    "param-not-moved": "a param was trained and has the same value after every turn",
    "update-without-effect": "clients trained a param, and the global value never changed",
    "loss-not-finite": "a training loss is infinite or no number",
    "loss-exploded": "the training loss exceeded ten times its start",
    "loss-grew": "the training loss is higher at the end than at the start",
    "score-not-finite": "a score is infinite or no number",
    "score-constant": "the score is the same after every round",
    "score-not-above-start": "the score is not better than that of the starting model",
    "score-not-above-majority": "the accuracy is not above that of always naming one label",
    "rounds-without-update": "in some rounds no update was aggregated",
    "update-not-finite": "an update was rejected: its values are not finite, or too large",
    "client-never-aggregated": "no update of a client was ever aggregated",
    "client-never-drawn": "a personal score is of a client that was never asked to train",
    "ended-early": "the run ended before its last round",
    "unreadable": "the folder of the run cannot be read",
}
"""The codes of warnings of a result, with their meaning."""
LOSS_GROWTH, LOSS_EXPLOSION = 1.05, 10.0
"""Factors by which the last loss has grown over the first, and by which any loss has exploded."""

ROUNDING = 1e-6
"""Two accuracies that differ by less are equal: tasks may average in single precision."""
NOT_FINITE = "send finite values"
"""In the reason of a rejected update: its values are not finite, or too large."""


def read_run_warnings(folder: Path | str) -> list[RunWarning]:
    """Return the warnings of the run in a folder, finished or in progress; change nothing.

    A damaged folder has a warning of its own. Raises FedplanError if there is no run.
    """
    return [each.of_run(Path(folder)) for each in read_warnings(Path(folder))]


def read_warnings(folder: Path) -> list[RunWarning]:
    """Return the same warnings, with FOLDER in place of the folder in their remedies."""
    try:
        return read_consistently(folder, lambda run: run_warnings(read_run_facts(run)))
    except FedplanError as error:
        if not folder.is_dir():
            raise
        return [RunWarning("unreadable", f"{error}.", f"Check it: fedplan verify {FOLDER}")]


def run_warnings(facts: RunFacts) -> list[RunWarning]:
    """Return the warnings of a run, in the order of plan, data, training, clients and scores.

    For a run in progress only those that later rounds cannot take back. Under differential privacy
    no warning tells more of clients or examples than a report shows. FOLDER in a remedy stands for
    the run's folder.
    """
    record = read_data_record(facts.run.folder)
    warnings = [*_plan_warnings(facts), *data_warnings(facts.study, record)]
    warnings += _loss_warnings(facts)
    if facts.snapshot.live:
        return warnings
    warnings += [*_movement_warnings(facts), *_client_warnings(facts)]
    nothing = any(each.code == "nothing-trained" for each in warnings)
    if not nothing and any(each.aggregated for each in facts.rounds):
        warnings += _score_warnings(facts, record)  # else the reason is among the warnings
    return [*warnings, *_end_warnings(facts)]


def _plan_warnings(facts: RunFacts) -> Iterator[RunWarning]:
    """Yield warnings of the plan: as recorded, or as planned if turns are private or to come."""
    if facts.snapshot.live or facts.client_level_dp or not any(facts.turns):
        roster = {} if facts.client_level_dp else facts.roster
        return planned_warnings(facts.study, facts.agreement, roster)
    every = (turn for turns in facts.turns for turn in turns)
    turns = [Turn(turn.round, turn.client, turn.phase, turn.traits) for turn in every]
    plan, params = facts.agreement.method.plan, facts.agreement.params
    fields, setting = phase_fields(facts.study), setting_text(facts.study)
    return plan_warnings(plan, params, turns, setting=setting, phase_fields=fields)


def _movement_warnings(facts: RunFacts) -> Iterator[RunWarning]:
    """Yield warnings of params that were trained, and of which the value stayed the same."""
    setting, method = setting_text(facts.study), facts.agreement.method
    movement = Movement(facts.agreement, facts.run.identity.digests)
    for record in facts.run.records:
        movement.add(record)
    if unmoved := movement.unmoved:
        names, codec = join_names(unmoved), facts.agreement.method.compression.text
        text = f"{len(unmoved)} of {len(movement.trained)} trained params never moved: {names}."
        layer = unmoved[0].rpartition(".")[0] + "."
        alone = not any(key.startswith(layer) for key in movement.moved)
        pattern = f"{layer}*" if alone and all(k.startswith(layer) for k in unmoved) else unmoved[0]
        freezing = chain(method.plan, freeze(named(pattern))).text
        remedy = f"If the model does not use them, freeze them: {setting('method.plan', freezing)}"
        if codec != plain().text:
            text += f" Updates are compressed: {codec}."
            remedy = f"Compress less: {setting('method.compression', 'bf16()')}"
        elif len(unmoved) == len(movement.trained):
            remedy = f"Raise the learning rate: {setting('train.lr', 1e-3)}"
        yield RunWarning("param-not-moved", text, remedy)
    if (lost := movement.not_aggregated) and any(record.aggregated for record in facts.rounds):
        yield RunWarning(
            "update-without-effect",
            f"Clients trained {join_names(lost)}, and the global values never changed.",
            f"Take the clients' mean: {setting('method.server_optimizer', 'mean')}",
        )


def _loss_warnings(facts: RunFacts) -> Iterator[RunWarning]:
    """Yield warnings of training losses: of each client's first, highest and last, the means."""
    agreement, remedy = facts.agreement, f"Lower {_lower_lr(facts.study)}"
    visible = agreement.guarantee is None and not agreement.secagg.active
    visible = visible and facts.study.has_central_data
    turns = [turn for turns in facts.turns for turn in turns]
    not_finite = [turn for turn in turns if visible and turn.steps and turn.loss is None]
    if not_finite:
        first = not_finite[0]
        text = (
            f"The training loss is not finite in {len(not_finite)} turns, first in round "
            f"{first.round} at {first.client}."
        )
        yield RunWarning("loss-not-finite", text, remedy)
    by_client = dict[str, list[float]]()
    for turn in turns:
        if turn.loss is not None:
            by_client.setdefault(turn.client, []).append(turn.loss)
    losses = list(by_client.values())
    if not losses:
        return
    first, highest, last = (
        fsum(values) / len(losses)
        for values in zip(*((each[0], max(each), each[-1]) for each in losses), strict=True)
    )
    initial = read_initial_scores(facts.run.folder)
    tested = [value for name, value in initial.items() if name.endswith(".loss")]
    start = fsum(tested) / len(tested) if tested else 0.0
    if highest > LOSS_EXPLOSION * first > 0:
        text = f"The training loss rose from {first:.4g} to {highest:.4g}."
        yield RunWarning("loss-exploded", text, remedy)
    elif highest > LOSS_EXPLOSION * start > 0:
        text = f"The training loss is {highest:.4g}; the starting model's test loss is {start:.4g}."
        yield RunWarning("loss-exploded", text, remedy)
    elif last - first > (LOSS_GROWTH - 1) * abs(first):
        text = f"The training loss grew from {first:.4g} to {last:.4g}."
        yield RunWarning("loss-grew", text, remedy)


def _lower_lr(study: Study) -> str:
    """Return the end of a remedy: a tenth of the learning rate; above 1 the default rate."""
    lr = study.train.lr
    lower = float(f"{lr / 10:.2g}") if lr <= 1 else TrainConfig().lr
    return f"the learning rate, which is {lr:.2g}: {setting_text(study)('train.lr', lower)}"


def _client_warnings(facts: RunFacts) -> Iterator[RunWarning]:
    """Yield warnings of clients without any part in the result; none under client-level DP."""
    if facts.client_level_dp:
        return
    setting = setting_text(facts.study)
    empty = [record.round for record in facts.rounds if not record.aggregated]
    if empty:
        text = f"in {len(empty)} of {len(facts.rounds)} rounds, first in round {empty[0]}."
        if len(empty) == len(facts.rounds):
            text = "in any round: the global model is the starting model."
        yield RunWarning(
            "rounds-without-update",
            f"No update was aggregated {text}",
            f"See why: fedplan logs {FOLDER}",
        )
    aggregated = {name for record in facts.rounds for name in record.aggregated}
    reasons = {name: why for record in facts.rounds for name, why in record.rejected.items()}
    not_finite = [name for name, why in reasons.items() if NOT_FINITE in why]
    if not_finite:
        yield RunWarning(
            "update-not-finite",
            f"Updates of {join_names(not_finite)} were rejected: they are not finite or too large.",
            f"Check these clients' examples, or lower {_lower_lr(facts.study)}",
        )
    never = {n: why for n, why in reasons.items() if n not in {*aggregated, *not_finite}}
    if never:
        listed = [f"{name} ({why[:60]})" for name, why in never.items()]
        why = next(iter(never.values()))
        remedies = {
            "dropped": f"Simulate fewer dropouts: {setting('clients.dropout_fraction', 0.0)}",
            "late": f"Simulate fewer late answers: {setting('clients.late_fraction', 0.0)}",
            "no answer": "Give the client examples, or leave it out",
        }
        yield RunWarning(
            "client-never-aggregated",
            f"Never aggregated: {join_names(listed)}.",
            remedies.get(why, f"Correct the client's data, or leave it out; fedplan logs {FOLDER}"),
        )
    trained = {turn.client for turns in facts.turns for turn in turns} | reasons.keys()
    idle = [name for name in facts.client_scores if name not in trained]
    if idle and facts.rules.personal and not facts.privacy_unit:
        count = len(facts.client_scores)
        text = f"{len(idle)} of {count} clients with a personal score never trained: "
        more = setting("train.rounds", 2 * facts.study.train.rounds)
        yield RunWarning("client-never-drawn", f"{text}{join_names(idle)}.", f"Run longer: {more}")


def _score_warnings(facts: RunFacts, record: Mapping[str, Any]) -> Iterator[RunWarning]:
    """Yield warnings of the score that leads the run's report; `record` is of the run's data."""
    score, setting = facts.scores.leading, setting_text(facts.study)
    if score is None:
        yield from _no_score_warnings(facts, record)
        return
    label, value, higher = score.label, score.value, facts.rules.higher_is_better
    rounds = setting("train.rounds", 2 * facts.study.train.rounds)
    train_more = f"Train longer, or with another learning rate: {rounds}"
    if not isfinite(value):
        text = f"The last score ({label}) is {value}."
        yield RunWarning("score-not-finite", text, f"Lower {_lower_lr(facts.study)}")
        return
    start = read_initial_scores(facts.run.folder).get(score.column)
    values = [row[score.column] for row in facts.metrics if score.column in row]
    values += [start] if start is not None else []
    if len(values) > 2 and len(set(values)) == 1:
        text = f"The score ({label}) is {value:.4g} after every round"
        text += ", as that of the starting model." if start is not None else "."
        yield RunWarning("score-constant", text, train_more)
    elif start is not None and (value <= start if higher else value >= start):
        text = f"The score ({label}) is {value:.4g}, and the starting model's {start:.4g}."
        yield RunWarning("score-not-above-start", text, train_more)
    majority = _majority_share(score, record)
    if majority is not None and value <= majority + ROUNDING:
        text = (
            f"The score ({label}) is {value:.4g}, and that of always naming the most frequent "
            f"label {majority:.4g}."
        )
        if not facts.study.data.from_python:
            f1 = setting("evaluate.metrics", ["f1_macro"])
            train_more += f"; if labels are rare, compare by another metric, too: {f1}"
        yield RunWarning("score-not-above-majority", text, train_more)


def _no_score_warnings(facts: RunFacts, record: Mapping[str, Any]) -> Iterator[RunWarning]:
    """Yield a warning if the last round has no score, where the data of clients is not recorded."""
    unfinished = facts.run.round < facts.study.train.rounds
    if record.get("train") or record.get("common_test") or unfinished:
        return
    remedy = "Give a common test set, as by data.test_path"
    if facts.study.data.from_python:
        remedy = "Give a common test set: test=..."
    elif not facts.study.hides_clients:
        on_clients = setting_text(facts.study)("evaluate.on_clients", True)
        remedy += f", or test examples to the sites, with {on_clients}"
    text = "No model has a score: there is no common test set, and no client sent a score."
    yield RunWarning("no-test-examples", text, remedy)


def _majority_share(score: RunScore, record: Mapping[str, Any]) -> float | None:
    """Return the accuracy of the most frequent labels in a score's tests; None if unknown."""
    by_client: Mapping[str, Mapping[str, Any]] = record.get("test") or {}
    common: Mapping[str, Any] | None = record.get("common_test")
    tests = list(by_client.values())
    if score.examples == COMMON_TEST:
        tests = [common] if common else []
    labelled = all(sum(split["labels"].values()) == split["examples"] > 0 for split in tests)
    if score.metric != "accuracy" or not tests or not labelled:
        return None
    if score.kind != "personal":
        counts = sum((Counter[str](split["labels"]) for split in tests), Counter[str]())
        return max(counts.values()) / counts.total()
    return fsum(max(s["labels"].values()) / s["examples"] for s in tests) / len(tests)


def _end_warnings(facts: RunFacts) -> Iterator[RunWarning]:
    """Yield a warning if the run ended before its last round, and not by its early stopping."""
    status, rounds = facts.snapshot.status, facts.study.train.rounds
    planned = status.stopped_early and facts.study.early_stopping is not None
    if facts.run.round >= rounds or planned:
        return
    reason = f": {status.reason}" if status.reason and not facts.client_level_dp else ""
    resume = f"fedplan run --resume {FOLDER}"
    yield RunWarning(
        "ended-early",
        f"The run ended after {facts.run.round} of {rounds} rounds{reason}.",
        f"Continue it: {'run.resume()' if facts.study.data.from_python else resume}",
    )
