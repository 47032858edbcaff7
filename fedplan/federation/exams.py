# SPDX-License-Identifier: Apache-2.0
"""Exams: what a client's models are tested on, and which of the scores may leave it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from fedplan.data.examples import Examples
from fedplan.federation.messages import Refused

EXAMPLES = "examples"
"""The score that says of how many rows the others are."""

Score = Callable[[nn.Module, Examples], Mapping[str, float]]
"""What is measured of a model on rows, by name."""


def due(number: int, every: int, rounds: int) -> bool:
    """Whether a round is one after which something is measured: some are, and the last one."""
    return number == rounds or number % every == 0


@dataclass(frozen=True)
class Exam:
    """Rows that nobody trains on, if there are any, and how a model is scored on them.

    Without `personal` only the world is scored, and no client's own model. Scores are told `every`
    so many rounds, and after the last of the `rounds`: a server that asks more often is refused.
    """

    rows: Examples | None
    score: Score
    personal: bool = True
    every: int = 1
    rounds: int = 0


@dataclass(frozen=True)
class Disclosure:
    """Which scores may leave a client, and of how many rows at least; without names, all may.

    A client decides this for itself. Of how many rows the scores are leaves with them.
    """

    metrics: frozenset[str] | None = None
    least_rows: int = 1

    def require_rows(self, name: str, exam: Exam) -> Examples:
        """The rows of an exam, if they are enough for scores of them to leave."""
        count, least = len(exam.rows) if exam.rows is not None else 0, max(1, self.least_rows)
        if exam.rows is None or count < least:
            raise Refused(
                f"{name} holds out {count} rows, and scores leave it of {least} or more: raise "
                "data.own_test, or lower the rows that its policy asks for"
            ).coded("few-rows")
        return exam.rows

    def shown(self, name: str, scores: Mapping[str, float]) -> dict[str, float]:
        """Those of some scores that may leave."""
        allowed = scores.keys() - {EXAMPLES}
        if self.metrics is not None:
            allowed &= self.metrics
        if not allowed:
            there = ", ".join(sorted(scores.keys() - {EXAMPLES}))
            raise Refused(
                f"{name} lets none of {there} leave: name those that may in its policy"
            ).coded("undisclosed")
        return {word: scores[word] for word in scores if word in allowed or word == EXAMPLES}
