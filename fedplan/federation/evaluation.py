# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the global model and of personal models on the clients' own test examples.

The server requests it after a round is closed. The answer has metrics only, and no later turn
depends on it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import fsum, isfinite, isnan, nan
from typing import Any, Literal, cast

from torch import Tensor

from fedplan.data.examples import Examples
from fedplan.data.metrics import metric_spread
from fedplan.errors import StoreError
from fedplan.federation.account import Answer
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    charge_answer,
    client_turn,
    receive_request,
    received_values,
)
from fedplan.federation.client_versions import NEVER_SEEN
from fedplan.federation.digests import combine_digests, examples_digest, model_digest
from fedplan.federation.eval_sets import EXAMPLE_COUNT, EvalSet, is_due
from fedplan.federation.global_state import GlobalState
from fedplan.federation.history import Metrics
from fedplan.federation.messages import Request, RequestRefused
from fedplan.federation.rounds import make_request
from fedplan.language.resolution import permitted_roles
from fedplan.models.values import set_values
from fedplan.storage.files import write_atomic
from fedplan.tensors.devices import deterministic
from fedplan.tensors.named import Tensors
from fedplan.tensors.serialization import JSON, SerializationError

Scores = dict[str, dict[str, float]]
"""A client's metrics by model: `global` is the global model, `personal` the client's own."""
GLOBAL, PERSONAL = "global", "personal"
"""Names of the global and of the personal model in metrics."""
BestBy = Literal["", "global", "personal"]
"""Model whose metric decides the best round; empty keeps no best round."""
MAX_METRICS = 64
"""Largest number of metrics of a model, and of characters in a metric's name."""


@dataclass(frozen=True)
class EvalConfig:
    """What a run evaluates, and when.

    `every`: rounds between evaluations; the last round is always evaluated.
    `sites`: each client evaluates the global and its personal model on its own test examples.
    `keep_best`: keep the global state of the best round, by the `global` or `personal` metric.
    `primary`: the task's primary metric. `higher_is_better`: of the primary metric.
    """

    every: int = 1
    on_clients: bool = False
    keep_best: BestBy = ""
    primary: str = "loss"
    higher_is_better: bool = False

    def is_due(self, number: int, rounds: int) -> bool:
        """Whether an evaluation follows a round of a run of `rounds` rounds."""
        return is_due(number, self.every, rounds)

    def best_round(self, metrics: Metrics) -> int:
        """Return the first round with the best finite metric of `keep_best`; 0 if there is none."""
        names = {
            GLOBAL: (f"global.{self.primary}", f"sites.global.{self.primary}"),
            PERSONAL: (f"sites.personal.{self.primary}", f"personal.{self.primary}"),
        }.get(self.keep_best, ())
        sign, values = 1 if self.higher_is_better else -1, dict[int, float]()
        for row in metrics:
            value = next((row[name] for name in names if name in row), nan)
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
    """Return the request to evaluate the last closed round, with the values that a client lacks.

    It has the round's own turn. Values that are personal to the client are sent too if they
    changed, since the global model itself is evaluated. `full`: send all values.
    """
    client_sync = replace(global_state.client_sync.get(client, NEVER_SEEN), personal_bits=0)
    before = replace(global_state, round=global_state.round - 1, client_sync={client: client_sync})
    return make_request(agreement, before, client, traits, full=full)


def evaluate_client(agreement: Agreement, client: Client, request: Request) -> Scores:
    """Evaluate the global and the personal model at a client and return the allowed metrics.

    The same request gives the same metrics, and later turns do not depend on it; the client stores
    received values and charges its account. Raises RequestRefused if the study or the client's
    policy does not allow the evaluation, or if the client has trained a later round.
    """
    with deterministic(client.deterministic):
        eval_set = _require_eval_set(agreement, client, request)
        examples = client.metric_policy.require_examples(client.name, eval_set)
        client_state = _require_current_state(client, request)
        # No notes: personal values are needed from the server, too, for the global model.
        receive_request(agreement, client, request, {})
        models = _model_values(agreement, client, request, eval_set, client_state)
        content = _answer_content(agreement, client, request, examples, models)
        _require_same_content(client, request, content)
        answer = Answer("evaluation", request.name, content, 8 * MAX_METRICS * len(models))
        charge_answer(agreement, client, request, answer)
        return _score_models(
            agreement, client, partial(eval_set.score, client.model, examples), models
        )


def _require_eval_set(agreement: Agreement, client: Client, request: Request) -> EvalSet:
    """Return the client's evaluation set; raise RequestRefused if it may not be evaluated now."""
    if agreement.guarantee is not None:
        raise RequestRefused(
            f"{client.name} sends no metrics: this study promises privacy of "
            f"{agreement.guarantee.unit}s, and the budget does not cover metrics"
        ).with_code("uncharged")
    if agreement.secagg.active:
        raise RequestRefused(
            f"{client.name} sends no metrics: this study uses secure aggregation, and metrics of "
            "a single site are no sum"
        ).with_code("unsummed")
    eval_set, number = client.eval_set, request.turn.round
    if eval_set is None or not is_due(number, eval_set.every, eval_set.rounds):
        raise RequestRefused(
            f"{client.name} sends no metrics of round {number}: its study has no evaluation then; "
            "see evaluate.on_clients and evaluate.every"
        ).with_code("unasked")
    return eval_set


def _require_current_state(client: Client, request: Request) -> Tensors:
    """Return the client's stored values; raise RequestRefused if it trained a later round."""
    number, (client_state, notes) = request.turn.round, client.journal.client_state()
    last = max((line["round"] for line in notes.get("lines", ())), default=0)
    versions = client.received_versions
    newer = any(versions.get(key, -1) > version for key, version in request.versions.items())
    if last > number or newer:
        raise RequestRefused(
            f"{client.name} cannot evaluate round {number}: it has trained a later one"
        ).with_code("gone-on")
    return client_state


def _model_values(
    agreement: Agreement,
    client: Client,
    request: Request,
    eval_set: EvalSet,
    client_state: Tensors,
) -> dict[str, dict[str, Tensor]]:
    """Return the trainable values of the models to evaluate: global, and personal if allowed."""
    roles = permitted_roles(agreement.method.plan, agreement.params, client_turn(client, request))
    params = agreement.trainable
    global_values = received_values(client, [p.key for p in params])
    personal = {p.key for p in params if roles[p].is_personal}
    stored = {key: value for key, value in client_state.items() if key in personal}
    if not (eval_set.personal and client.metric_policy.personal):
        return {GLOBAL: global_values}
    return {GLOBAL: global_values, PERSONAL: global_values | stored}


def _require_same_content(client: Client, request: Request, content: str) -> None:
    """Raise RequestRefused if the same request was answered before with other inputs.

    Otherwise a server could learn personal values by many evaluations of chosen global values.
    Records the content of a new request on disk; an empty content is not recorded.
    """
    if not content:
        return
    file = client.journal.make_folder().parent / ANSWERED_FILE
    try:
        entries: Any = json.loads(file.read_text(encoding="utf-8") if file.exists() else "{}")
        answered = {str(name): str(d) for name, d in cast("dict[Any, Any]", entries).items()}
    except (OSError, ValueError, AttributeError) as error:
        raise StoreError(f"{file} cannot be read: {error}; restore a copy of it") from error
    digest = hashlib.sha256(content.encode()).hexdigest()
    if answered.setdefault(request.name, digest) != digest:
        raise RequestRefused(
            f"{client.name} has answered {request.name[:80]!r} before, for other values"
        ).with_code("unasked")
    write_atomic(file, json.dumps(answered), mode=0o600)


def _score_models(
    agreement: Agreement,
    client: Client,
    score: Callable[[], Mapping[str, float]],
    models: Mapping[str, Mapping[str, Tensor]],
) -> Scores:
    """Put each model's values into the client's model and return the allowed metrics.

    Metrics that are not finite become nan. A personal model equal to the global one is not
    evaluated again.
    """
    scores = Scores()
    for model, values in models.items():
        if model == PERSONAL and all(values[k] is v for k, v in models[GLOBAL].items()):
            scores[PERSONAL] = dict(scores[GLOBAL])
            continue
        set_values(client.model, values, agreement.trainable)
        metrics = client.metric_policy.filter_metrics(client.name, score())
        scores[model] = {k: float(v) if isfinite(v) else nan for k, v in metrics.items()}
    return scores


def _answer_content(
    agreement: Agreement,
    client: Client,
    request: Request,
    examples: Examples,
    models: Mapping[str, Mapping[str, Tensor]],
) -> str:
    """Return the digest of all inputs of an evaluation; empty if the client has no account."""
    if client.account is None:
        return ""
    data = [examples_digest(examples), len(examples), model_digest(client.model)]
    digests = {
        model: {key: client.digests.full_digest(value) for key, value in values.items()}
        for model, values in models.items()
    }
    turn = [request.turn.round, request.turn.phase, client.name, client.traits]
    return combine_digests([agreement.experiment, agreement.text], turn, data, digests)


def metrics_to_json(scores: Scores) -> dict[str, JSON]:
    """Return a client's metrics as JSON, with null for nan."""
    return {
        model: {name: value if isfinite(value) else None for name, value in metrics.items()}
        for model, metrics in scores.items()
    }


ANSWERED_FILE = "examined.json"
"""File beside a journal's folder: digests of the inputs of each answered evaluation."""
UNIT_METRICS = ("accuracy", "f1", "precision", "recall", "auc")
"""Prefixes of metrics between 0 and 1."""


def metrics_from_json(answer: Any) -> Scores:
    """Return a client's metrics from JSON, with nan for null.

    Raises SerializationError unless there are metrics of the global model, names and numbers are
    valid, and the number of examples is a positive integer.
    """
    scores = Scores()
    for model, metrics in _require_table(answer).items():
        if model not in (GLOBAL, PERSONAL):
            raise SerializationError(f"there are metrics of an unknown model {model[:40]!r}")
        scores[model] = {n: _read_number(n, value) for n, value in _require_table(metrics).items()}
        _require_valid_metrics(scores[model])
        count = scores[model].get(EXAMPLE_COUNT, 0.0)
        if not (count == int(count) and 0 < count < 2**32):
            raise SerializationError(f"the metrics of {model} are of {count} examples")
    if GLOBAL not in scores:
        raise SerializationError("there are no metrics of the global model")
    return scores


def _require_valid_metrics(metrics: Mapping[str, float]) -> None:
    """Raise SerializationError for an invalid metric name, or a unit metric outside 0 to 1."""
    for name, value in metrics.items():
        is_unit = name.startswith(UNIT_METRICS) and not isnan(value)
        if not re.fullmatch(r"[\w.@-]+", name, re.ASCII) or (is_unit and not 0 <= value <= 1):
            raise SerializationError(f"these are no valid metrics: {name!r} is {value}")


def _require_table(value: Any) -> dict[str, Any]:
    """Return a non-empty dict of up to MAX_METRICS short names; else raise SerializationError."""
    table = cast("dict[Any, Any]", value if isinstance(value, dict) else {})
    valid_names = all(type(name) is str and 0 < len(name) <= MAX_METRICS for name in table)
    if not table or not valid_names or len(table) > MAX_METRICS:
        raise SerializationError(f"these are no valid metrics: {str(value)[:60]}")
    return table


def _read_number(name: str, value: Any) -> float:
    """Return a metric as a float, nan for None; raise SerializationError if it is no number."""
    if value is None and name != EXAMPLE_COUNT:
        return nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise SerializationError(f"the metric {name!r} is {str(value)[:40]!r}, not a number")
    return float(value)


def combine_scores(
    answers: Mapping[str, Scores], silent: Mapping[str, str], config: EvalConfig
) -> dict[str, Any]:
    """Return the evaluation metrics of a round over all clients.

    `answers`: metrics by client. `silent`: reasons of clients without metrics. The result has the
    mean of each metric by model, weighted by examples; `spread`, the distribution of the primary
    metric over clients; `by`, all clients' metrics; and `silent`.
    """
    means, spreads = dict[str, Any](), dict[str, Any]()
    for model in (GLOBAL, PERSONAL):
        scores = {name: answers[name][model] for name in sorted(answers) if model in answers[name]}
        primary = {n: s[config.primary] for n, s in scores.items() if config.primary in s}
        if scores:
            means[model] = _weighted_means(scores)
        if primary:
            spreads[model] = metric_spread(
                config.primary, primary, higher_is_better=config.higher_is_better
            )
    by = {name: answers[name] for name in sorted(answers)}
    return {**means, "spread": spreads, "by": by, "silent": dict(sorted(silent.items()))}


def _weighted_means(scores: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over clients, weighted by examples, and their total count."""
    clients = list(scores.values())
    names = dict.fromkeys(name for metrics in clients for name in metrics if name != EXAMPLE_COUNT)
    means = dict[str, float]()
    for name in names:
        values = [(m[name], m[EXAMPLE_COUNT]) for m in clients if name in m]
        total = fsum(count for _, count in values)
        means[name] = fsum(value * count for value, count in values) / total
    return {**means, EXAMPLE_COUNT: fsum(metrics[EXAMPLE_COUNT] for metrics in clients)}
