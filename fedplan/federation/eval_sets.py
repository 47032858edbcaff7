# SPDX-License-Identifier: Apache-2.0
"""Evaluation sets of clients, and the policy for metrics that may leave a client."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from fedplan.data.examples import Examples
from fedplan.federation.messages import RequestRefused

EXAMPLE_COUNT = "examples"
"""Name of the metric with the number of test examples."""

ScoreFn = Callable[[nn.Module, Examples], Mapping[str, float]]
"""Returns the metrics of a model on examples, by name."""


def is_due(number: int, every: int, rounds: int) -> bool:
    """Whether an evaluation follows a round: every `every` rounds, and after the last one."""
    return number == rounds or number % every == 0


@dataclass(frozen=True)
class EvalSet:
    """A client's test examples, with the function and the rounds of evaluation.

    `examples`: None if the client has no test examples. `score`: function (model, examples) to
    metrics by name. `personal`: evaluate the client's personal model too, not only the global one.
    `every`: rounds between evaluations. `rounds`: last round of the run, always evaluated. Requests
    for other rounds are refused.
    """

    examples: Examples | None
    score: ScoreFn
    personal: bool = True
    every: int = 1
    rounds: int = 0


@dataclass(frozen=True)
class MetricPolicy:
    """A client's own policy for the metrics that may be sent to the server.

    `metrics`: names of allowed metrics; None allows all. The number of examples is always sent.
    `min_examples`: no metrics are sent if there are fewer test examples. `personal`: allow
    evaluation of the personal model; metrics of many evaluations can reveal personal values.
    """

    metrics: frozenset[str] | None = None
    min_examples: int = 1
    personal: bool = True

    def require_examples(self, name: str, eval_set: EvalSet) -> Examples:
        """Return `eval_set.examples`; raise RequestRefused if there are fewer than `min_examples`.

        None, and no examples at all, are always refused. `name`: the client, for the message.
        """
        count = len(eval_set.examples) if eval_set.examples is not None else 0
        least = max(1, self.min_examples)
        if eval_set.examples is None or count < least:
            raise RequestRefused(
                f"{name} has {count} test examples, and its policy requires {least} or more: raise "
                "data.holdout_fraction, or lower the number in its policy"
            ).with_code("few-examples")
        return eval_set.examples

    def filter_metrics(self, name: str, scores: Mapping[str, float]) -> dict[str, float]:
        """Return the allowed metrics among `scores`, and the example count if present.

        `name`: the client, for the message. Raises RequestRefused if no metric is allowed.
        """
        allowed = scores.keys() - {EXAMPLE_COUNT}
        if self.metrics is not None:
            allowed &= self.metrics
        if not allowed:
            names = ", ".join(sorted(scores.keys() - {EXAMPLE_COUNT}))
            raise RequestRefused(
                f"the policy of {name} allows none of {names}: name those that may leave"
            ).with_code("metrics-not-allowed")
        return {n: value for n, value in scores.items() if n in allowed or n == EXAMPLE_COUNT}
