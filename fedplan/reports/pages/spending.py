# SPDX-License-Identifier: Apache-2.0
"""Spending: epsilon by round with its limit, and what was learned for it."""

from __future__ import annotations

from fedplan.errors import FedplanError
from fedplan.privacy.guarantee import Guarantee
from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import paragraphs
from fedplan.reports.pages.page import PageSection, Shown
from fedplan.reports.preview import stated

LOOKS = 12
"""Rounds at which epsilon is worked out: each takes a while."""


def spending_section(facts: RunFacts) -> PageSection:
    """What was spent of what was promised, by round, and the score beside it."""
    title = "Privacy"
    guarantee = facts.agreement.guarantee
    if guarantee is None or not facts.run.round:
        return PageSection(title)
    spent = _spent(guarantee, facts.run.round)
    limit = ("promised", guarantee.epsilon)
    drawn = line_chart("Epsilon by round", [spent], y="epsilon", limit=limit)
    figures = [Shown("epsilon", drawn, f"Of each {guarantee.unit}, at delta {guarantee.delta:g}.")]
    score, world = facts.score[0], dict(facts.world_scores("world").points)
    bought = Series("world", tuple((e, world[n]) for n, e in spent.points if n in world))
    if bought.points:
        beside = line_chart(
            f"{score.capitalize()} for the epsilon spent",
            [bought],
            x="epsilon",
            y=score,
            whole=False,
        )
        figures.append(Shown("score-by-epsilon", beside, "The world, after the same rounds."))
    return PageSection(title, tuple(paragraphs(_told(facts, guarantee))), tuple(figures))


def _spent(guarantee: Guarantee, rounds: int) -> Series:
    """Epsilon after some of the rounds, the first and the last among them."""
    step = max(1, rounds // LOOKS)
    looked = sorted({1, *range(step, rounds + 1, step), rounds})
    return Series("spent", tuple((float(n), guarantee.forecast(n)) for n in looked))


def _told(facts: RunFacts, guarantee: Guarantee) -> str:
    try:
        found = stated(facts.run.folder)
    except FedplanError as error:
        return (
            f"Each {guarantee.unit} is hidden. What single sites have spent is told by their own "
            f"accounts ({error})."
        )
    return found.text().partition("\nNot covered")[0]
