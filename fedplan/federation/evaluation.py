# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the global model and of personal models on the clients' own test examples.

The server requests it after a round is closed. The answer has metrics only, or score counts where
no metrics of one client may leave, and no later turn depends on it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import fsum, isfinite, isnan, nan
from typing import Any, Literal, cast

import numpy as np

from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_bounds, metric_spread
from fedplan.errors import PrivacyError
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    EXAMPLE_COUNT,
    SCORE_COUNTS,
    Client,
    EvalSet,
    PredictFn,
    charge_answer,
    client_turn,
    last_trained_round,
    receive_request,
    received_values,
)
from fedplan.federation.global_state import NEVER_SEEN, GlobalState, own_values
from fedplan.federation.ledger.digests import combine_digests, examples_digest, model_digest
from fedplan.federation.ledger.egress import Answer
from fedplan.federation.ledger.history import Metrics
from fedplan.federation.messages import Request, RequestRefused
from fedplan.federation.rounds import make_request
from fedplan.federation.score_sums import GLOBAL, PERSONAL, VALIDATION, ScoreVector
from fedplan.models.values import set_values
from fedplan.privacy.guard import OneExample, contain_faults
from fedplan.tensors.devices import deterministic
from fedplan.tensors.named import Tensors
from fedplan.tensors.serialization import JSON, SerializationError

Scores = dict[str, dict[str, float]]
"""A client's metrics by model: `global` is the global model, `personal` the client's own, on test
examples; `validation.global` and `validation.personal` are of the same on validation examples."""
SiteScores = Scores | list[int]
"""A client's metrics, or its score counts where no metrics of one client leave."""
_SCORE_KEYS = (GLOBAL, PERSONAL, f"{VALIDATION}.{GLOBAL}", f"{VALIDATION}.{PERSONAL}")
BestBy = Literal["", "global", "personal"]
"""Model whose metric decides the best round; empty keeps no best round."""
MAX_METRICS = 64
"""Largest number of metrics of a model, and of characters in a metric's name."""


@dataclass(frozen=True)
class EvalConfig:
    """Settings of evaluation in a run.

    `every`: rounds between evaluations; the last round is always evaluated.
    `on_clients`: each client evaluates the global and the personal model on local test examples.
    `keep_best`: keep the global state of the round with the best primary metric of this model,
    "global" or "personal"; "" keeps none. `primary`: name of the task's primary metric.
    `higher_is_better`: whether a higher primary metric is better. `directions`: the same of all
    metrics that the task names. `vector`: the score counts that clients send in place of metrics;
    None if they send metrics.
    """

    every: int = 1
    on_clients: bool = False
    keep_best: BestBy = ""
    primary: str = "loss"
    higher_is_better: bool = False
    directions: Mapping[str, bool] = field(default_factory=dict[str, bool])
    vector: ScoreVector | None = None

    def is_due(self, number: int, rounds: int) -> bool:
        """Whether an evaluation follows a round of a run of `rounds` rounds."""
        return number == rounds or number % self.every == 0

    def best_round(self, metrics: Metrics) -> int:
        """Return the first round with the best finite primary metric of the model `keep_best`.

        0 if no round has a finite one, or if `keep_best` is "". `metrics`: rows of all rounds. Only
        metrics on validation examples count.
        """
        name = f"{VALIDATION}.{self.keep_best}.{self.primary}"
        sign, values = 1 if self.higher_is_better else -1, dict[int, float]()
        for row in metrics:
            value = row.get(name, nan)
            if isfinite(value):
                values[int(row["round"])] = sign * value
        return max(values, key=lambda number: (values[number], -number), default=0)


def make_eval_request(
    agreement: Agreement,
    global_state: GlobalState,
    client: str,
    traits: Mapping[str, str],
    *,
    full: bool = False,
) -> Request:
    """Return the request to a client to evaluate the last closed round; change nothing.

    The request has the turn of `global_state.round`, the client's `traits`, and the global values
    that the client lacks. Changed values of params that are personal at the client are sent too,
    since the global model itself is evaluated. `full`: send all values that the client needs, as to
    a client that lost its state.
    """
    client_sync = replace(global_state.client_sync.get(client, NEVER_SEEN), personal_bits=0)
    before = replace(global_state, round=global_state.round - 1, client_sync={client: client_sync})
    return make_request(agreement, before, client, traits, full=full)


def evaluate_client(agreement: Agreement, client: Client, request: Request) -> SiteScores:
    """Evaluate the global and the personal model at a client; return the allowed metrics by model.

    If the agreement hides metrics, returns score counts instead, with noise if the agreement has
    differential privacy. Metrics that are not finite become nan. Leaves the evaluated values in the
    client's model, the request's values in `client.received`, and charges the client's account. The
    same request gives the same answer, and later training does not depend on evaluations. Raises
    RequestRefused if the agreement, the client's policy or the account's limits forbid the
    evaluation, if the client has trained a later round, or if a client with an account evaluated a
    request of this name before with other values. Raises as `receive_request` for an invalid
    request.
    """
    setup, privacy = client.setup, client.privacy
    with deterministic(setup.deterministic):
        eval_set, client_state = _require_evaluation(agreement, client, request)
        # Too few examples are left out. Not so where the client adds noise: there one example would
        # decide whether all others count.
        least = max(1, privacy.metric_policy.min_examples if privacy.guard is None else 1)
        all_sets = {"": eval_set.examples, f"{VALIDATION}.": eval_set.validation}
        sets = {k: each for k, each in all_sets.items() if each is not None and len(each) >= least}
        # No notes: personal values are needed from the server, too, for the global model.
        receive_request(agreement, client, request, {})
        turn, params = request.turn, agreement.trainable
        models = {GLOBAL: received_values(client, [p.key for p in params])}
        if eval_set.personal and privacy.metric_policy.personal:
            own = own_values(agreement, client_turn(client, request), client_state)
            models[PERSONAL] = models[GLOBAL] | own
        content, vector = "", None
        if agreement.hides_metrics and eval_set.counts is not None:
            vector = ScoreVector.of(
                agreement,
                eval_set.counts,
                personal=eval_set.personal,
                validation=eval_set.validates,
            )
        if privacy.account is not None or privacy.guard is not None:
            content = combine_digests(
                [agreement.experiment, agreement.text],
                [turn.round, turn.phase, client.name, client.traits],
                {name: [examples_digest(each), len(each)] for name, each in sets.items()},
                model_digest(setup.model),
                {
                    model: {key: setup.digests.full_digest(value) for key, value in values.items()}
                    for model, values in models.items()
                },
            )
        size = vector.size if vector is not None else MAX_METRICS * len(models) * len(sets)
        charge_answer(privacy, Answer("evaluation", request.name, content, 8 * size))
        if vector is not None:
            counts = _count_scores(agreement, client, eval_set.predict, vector, sets, models)
            if privacy.guard is None:
                return counts
            try:
                sensitivity = vector.sensitivity
                return privacy.guard.release_counts(counts, sensitivity, request.name, content)
            except PrivacyError as error:
                raise RequestRefused(str(error)).with_code(error.code) from error
        scores = Scores()
        for model, values in models.items():
            same = model == PERSONAL and all(values[k] is v for k, v in models[GLOBAL].items())
            if not same:
                set_values(setup.model, values, params)
            for prefix, tested in sets.items():
                if same:
                    scores[prefix + PERSONAL] = dict(scores[prefix + GLOBAL])
                    continue
                metrics = eval_set.score(setup.model, tested)
                allowed = privacy.metric_policy.filter_metrics(client.name, metrics)
                scores[prefix + model] = {
                    k: float(v) if isfinite(v) else nan for k, v in allowed.items()
                }
        return scores


def _count_scores(
    agreement: Agreement,
    client: Client,
    predict: PredictFn | None,
    vector: ScoreVector,
    sets: Mapping[str, Examples],
    models: Mapping[str, Tensors],
) -> list[int]:
    """Return the counts of `vector` on a client's examples; zeros for what is not there.

    `sets`: test examples, and with the prefix `validation.` validation examples. `models`: values
    by model. Under differential privacy examples run one at a time, so that none can change the
    count of another; at a site an example that fails counts nothing, and its error is logged.
    """
    assert predict is not None
    counts = np.zeros((len(vector.models), vector.counts.size), np.int64)

    def parts() -> Iterator[tuple[int, Examples]]:
        """Yield (row of the counts, examples to count there), with the row's model loaded."""
        for row, name in enumerate(vector.models):
            prefix, model = name[: -len(name.rpartition(".")[2])], name.rpartition(".")[2]
            examples = sets.get(prefix)
            if model not in models or examples is None:
                continue
            set_values(client.setup.model, models[model], agreement.trainable)
            if client.privacy.guard is None:
                yield row, examples
            else:
                yield from ((row, OneExample(examples, i)) for i in range(len(examples)))

    def count(part: tuple[int, Examples]) -> None:
        counts[part[0]] += vector.counts.count(predict(client.setup.model, part[1]))

    contain_faults(count, parts(), client.privacy.contained_fault)
    return counts.ravel().tolist()


def _require_evaluation(
    agreement: Agreement, client: Client, request: Request
) -> tuple[EvalSet, Tensors]:
    """Return (evaluation set, values in the client's journal); change nothing.

    Raises RequestRefused if the agreement has differential privacy that does not cover score
    counts, or hides metrics of a task that has no score counts, if the evaluation set has no
    evaluation after the request's round, if the client's policy forbids metrics or score counts, or
    if the client has trained a later round or received newer values. With fewer test examples than
    the policy requires metrics are refused, but not score counts: that would reveal how few.
    """
    guarantee, guard = agreement.guarantee, client.privacy.guard
    if guarantee is not None and (guard is None or not guarantee.evaluation_noise_multiplier):
        raise RequestRefused(
            f"{client.name} sends no metrics: this study promises privacy of "
            f"{guarantee.unit}s, and the budget does not cover metrics"
        ).with_code("metrics-not-private")
    eval_set, number = client.eval_set, request.turn.round
    if eval_set is None or (number != eval_set.rounds and number % eval_set.every):
        raise RequestRefused(
            f"{client.name} sends no metrics of round {number}: its study has no evaluation then; "
            "see evaluate.on_clients and evaluate.every"
        ).with_code("no-evaluation")
    policy = client.privacy.metric_policy
    if not agreement.hides_metrics:
        count = len(eval_set.examples) if eval_set.examples is not None else 0
        if count < (least := max(1, policy.min_examples)):
            raise RequestRefused(
                f"{client.name} has {count} test examples, and its policy requires {least} or "
                "more: raise data.holdout_fraction, or lower the number in its policy"
            ).with_code("few-examples")
    elif eval_set.counts is None:
        raise RequestRefused(
            f"{client.name} sends no metrics: metrics of a single site are no sum, and this task "
            "has no score counts"
        ).with_code("metrics-not-summed")
    elif policy.metrics is not None and SCORE_COUNTS not in policy.metrics:
        raise RequestRefused(
            f"the policy of {client.name} lets no score counts leave: add {SCORE_COUNTS!r} to its "
            "metrics"
        ).with_code("metrics-not-allowed")
    client_state, notes = client.state(request)
    last, versions = last_trained_round(notes), client.received_versions
    newer = any(versions.get(key, -1) > version for key, version in request.versions.items())
    if last > number or newer:
        raise RequestRefused(
            f"{client.name} cannot evaluate round {number}: it has trained a later one"
        ).with_code("later-round")
    return eval_set, client_state


def metrics_to_json(scores: Scores) -> dict[str, JSON]:
    """Return a client's metrics as JSON, with null for nan."""
    return {
        model: {name: value if isfinite(value) else None for name, value in metrics.items()}
        for model, metrics in scores.items()
    }


def metrics_from_json(metrics: Any) -> Scores:
    """Return a client's metrics by model and name from untrusted JSON, with nan for null.

    Raises SerializationError if a key is not one of `Scores` or "global" is missing, a model has no
    metrics or more than MAX_METRICS, a name or number is invalid, a metric of fedplan is outside
    its bounds, or the number of examples is no positive integer below 2**32.
    """
    scores = Scores()
    for model, table in _require_table(metrics).items():
        if model not in _SCORE_KEYS:
            raise SerializationError(f"there are metrics of an unknown model {model[:40]!r}")
        scores[model] = {}
        for name, value in _require_table(table).items():
            if value is None and name != EXAMPLE_COUNT:
                number = nan
            elif (
                isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value)
            ):
                raise SerializationError(
                    f"the metric {name!r} is {str(value)[:40]!r}, not a number"
                )
            else:
                number = float(value)
            lowest, highest = metric_bounds(name)
            outside = not (isnan(number) or lowest <= number <= highest)
            if outside or not re.fullmatch(r"[\w.@-]+", name, re.ASCII):
                raise SerializationError(f"these are no valid metrics: {name!r} is {number}")
            scores[model][name] = number
        count = scores[model].get(EXAMPLE_COUNT, 0.0)
        if not (count == int(count) and 0 < count < 2**32):
            raise SerializationError(f"the metrics of {model} are of {count} examples")
    if GLOBAL not in scores:
        raise SerializationError("there are no metrics of the global model")
    return scores


def _require_table(value: Any) -> dict[str, Any]:
    """Return a non-empty dict of up to MAX_METRICS short names; else raise SerializationError."""
    table = cast("dict[Any, Any]", value if isinstance(value, dict) else {})
    valid_names = all(type(name) is str and 0 < len(name) <= MAX_METRICS for name in table)
    if not table or not valid_names or len(table) > MAX_METRICS:
        raise SerializationError(f"these are no valid metrics: {str(value)[:60]}")
    return table


def combine_scores(
    answers: Mapping[str, Scores], silent: Mapping[str, str], config: EvalConfig
) -> dict[str, Any]:
    """Return the evaluation metrics of a round over all clients, as JSON-compatible values.

    `answers`: metrics by client. `silent`: reason by client without metrics. `config`: names the
    primary metric. Keys of the result, with clients sorted by name: `global` and `personal` (by
    metric, the mean over the clients that have it, weighted by examples, and the total of examples;
    the key is absent if no client has metrics of this model), `spread` (by model, distribution of
    the primary metric over clients; {} without any), `by` (all `answers`), and `silent`. A metric
    that is NaN for one client has the mean NaN.
    """
    means, spreads = dict[str, Any](), dict[str, Any]()
    for model in (GLOBAL, PERSONAL):
        scores = _scores_of(answers, model)
        means |= {model: _weighted_means(scores)} if scores else {}
        spreads |= {model: spread} if (spread := _spread(scores, config)) else {}
    by = {name: answers[name] for name in sorted(answers)}
    return {**means, "spread": spreads, "by": by, "silent": dict(sorted(silent.items()))}


def join_validation(
    scores: Mapping[str, Any],
    answers: Mapping[str, Scores],
    config: EvalConfig,
    common: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Return the metrics of a round on validation examples, as JSON-compatible values.

    `scores`: those of the round; what the score counts in `scores["sites"]` say of validation
    examples moves from there into the result. `answers`: metrics by client. `common`: metrics of
    the global model on the common validation set, if there is one. Keys of the result, each only if
    there are such metrics: `global` (those in `common`, or else means over clients, weighted by
    examples) and `personal` (distribution of the primary metric over clients).
    """
    summed: dict[str, Any] = scores.get("sites", {}).pop(VALIDATION, {})
    global_scores = _scores_of(answers, f"{VALIDATION}.{GLOBAL}")
    means = dict(common) if common else _weighted_means(global_scores) if global_scores else {}
    spread = _spread(_scores_of(answers, f"{VALIDATION}.{PERSONAL}"), config)
    return summed | ({GLOBAL: means} if means else {}) | ({PERSONAL: spread} if spread else {})


def _scores_of(answers: Mapping[str, Scores], key: str) -> Scores:
    """Return the metrics under one key of the clients' scores, by client, sorted by name."""
    return {name: answers[name][key] for name in sorted(answers) if key in answers[name]}


def _weighted_means(scores: Scores) -> dict[str, float]:
    """Return the mean of each metric over clients, weighted by examples, and all examples."""
    clients, means = list(scores.values()), dict[str, float]()
    for name in dict.fromkeys(name for metrics in clients for name in metrics):
        if name != EXAMPLE_COUNT:
            values = [(m[name], m[EXAMPLE_COUNT]) for m in clients if name in m]
            total = fsum(count for _, count in values)
            means[name] = fsum(value * count for value, count in values) / total
    return {**means, EXAMPLE_COUNT: fsum(m[EXAMPLE_COUNT] for m in clients)}


def _spread(scores: Scores, config: EvalConfig) -> dict[str, float]:
    """Return the distribution of the primary metric over clients; {} if no client has it."""
    primary = {n: s[config.primary] for n, s in scores.items() if config.primary in s}
    if not primary:
        return {}
    return metric_spread(config.primary, primary, higher_is_better=config.higher_is_better)
