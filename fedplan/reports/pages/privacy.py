# SPDX-License-Identifier: Apache-2.0
"""The privacy section of a report: epsilon by round, its limit, and the score reached."""

from __future__ import annotations

from fedplan.errors import FedplanError
from fedplan.reports.explain_study import read_privacy_statement
from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import paragraphs
from fedplan.reports.pages.page import PageFigure, PageSection

EPSILON_POINTS = 12
"""About the number of rounds at which epsilon is computed, as each takes a while."""


def privacy_section(facts: RunFacts) -> PageSection:
    """Return the section on a run's epsilon by round; empty if privacy is off or before round 1.

    It begins with the privacy statement, or a note that only the sites have the accounts.
    """
    title, guarantee, rounds = "Differential privacy", facts.agreement.guarantee, facts.run.round
    if guarantee is None or not rounds:
        return PageSection(title)
    try:
        text = read_privacy_statement(facts.run.folder).text().partition("\nNot covered")[0]
    except FedplanError as error:
        text = (
            f"Differential privacy is {guarantee.unit}-level. Each site has the account of its own "
            f"spent epsilon ({error})."
        )
    step = max(1, rounds // EPSILON_POINTS)
    numbers = sorted({1, *range(step, rounds + 1, step), rounds})
    spent = Series("spent", tuple((float(n), guarantee.forecast_epsilon(n)) for n in numbers))
    limit = ("guarantee", guarantee.epsilon)
    drawn = line_chart("Epsilon by round", [spent], y="epsilon", limit=limit)
    caption = f"{guarantee.unit.capitalize()}-level, at delta {guarantee.delta:g}."
    figures = [PageFigure("epsilon", drawn, caption)]
    score, scores = facts.score[0], dict(facts.global_scores("global").points)
    reached = Series("global", tuple((e, scores[n]) for n, e in spent.points if n in scores))
    if reached.points:
        by_epsilon = f"Global {score} by epsilon spent"
        drawn = line_chart(by_epsilon, [reached], x="epsilon", y=score, whole=False)
        caption = "The global model after the same rounds."
        figures.append(PageFigure("score-by-epsilon", drawn, caption))
    return PageSection(title, tuple(paragraphs(text)), tuple(figures))
