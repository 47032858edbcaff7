# SPDX-License-Identifier: Apache-2.0
"""The privacy section of a report: epsilon by round, its limit, and the score reached."""

from __future__ import annotations

from fedplan.errors import FedplanError
from fedplan.privacy.guarantee import Guarantee
from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import paragraphs
from fedplan.reports.pages.page import PageFigure, PageSection
from fedplan.reports.privacy_statements import read_privacy_statement

EPSILON_POINTS = 12
"""About the number of rounds at which epsilon is computed, as each takes a while."""


def privacy_section(facts: RunFacts) -> PageSection:
    """Return the section on epsilon spent by round; it is empty without differential privacy."""
    title = "Differential privacy"
    guarantee = facts.agreement.guarantee
    if guarantee is None or not facts.run.round:
        return PageSection(title)
    spent = _spent(guarantee, facts.run.round)
    limit = ("guarantee", guarantee.epsilon)
    drawn = line_chart("Epsilon by round", [spent], y="epsilon", limit=limit)
    figures = [
        PageFigure(
            "epsilon", drawn, f"{guarantee.unit.capitalize()}-level, at delta {guarantee.delta:g}."
        )
    ]
    score, scores = facts.score[0], dict(facts.global_scores("global").points)
    reached = Series("global", tuple((e, scores[n]) for n, e in spent.points if n in scores))
    if reached.points:
        drawing = line_chart(
            f"Global {score} by epsilon spent",
            [reached],
            x="epsilon",
            y=score,
            whole=False,
        )
        figures.append(
            PageFigure("score-by-epsilon", drawing, "The global model after the same rounds.")
        )
    return PageSection(title, tuple(paragraphs(_statement(facts, guarantee))), tuple(figures))


def _spent(guarantee: Guarantee, rounds: int) -> Series:
    """Return epsilon after the first, the last and some rounds between, as a series "spent"."""
    step = max(1, rounds // EPSILON_POINTS)
    numbers = sorted({1, *range(step, rounds + 1, step), rounds})
    return Series("spent", tuple((float(n), guarantee.forecast_epsilon(n)) for n in numbers))


def _statement(facts: RunFacts, guarantee: Guarantee) -> str:
    """Return the privacy statement of the run, or a note that only its sites have the accounts."""
    try:
        statement = read_privacy_statement(facts.run.folder)
    except FedplanError as error:
        return (
            f"Differential privacy is {guarantee.unit}-level. Each site has the account of its own "
            f"spent epsilon ({error})."
        )
    return statement.text().partition("\nNot covered")[0]
