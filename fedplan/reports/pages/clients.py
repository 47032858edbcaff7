# SPDX-License-Identifier: Apache-2.0
"""Clients: each one's score over the rounds, the worst named; and how far clients lay apart."""

from __future__ import annotations

from math import isnan

from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.multiples import small_multiples
from fedplan.reports.figures.series import Series
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import paragraphs
from fedplan.reports.pages.page import PageSection, Shown

MOST = 24
"""Clients that a page draws: of more, those with the worst scores."""


def clients_section(facts: RunFacts) -> PageSection:
    """Each client's own score; where anything is hidden, no single client is told of."""
    title = "Each client"
    scores = facts.client_scores
    if not scores:
        return PageSection(title)
    if facts.hidden:
        words = f"This study hides each {facts.hidden}: no single client's score is told."
        return PageSection(title, tuple(paragraphs(words)))
    score, higher = facts.score
    order = sorted(scores.values(), key=lambda each: _place(each, higher=higher))
    worst = order[0]
    order = order[:MOST] if len(order) > MOST else list(scores.values())
    words = [
        f"The worst is {worst.name}, with {score} {_told(worst.last)}; the mean of all "
        f"{len(scores)} clients is {_told(facts.own_scores('').last)}."
    ]
    drawn = small_multiples(
        f"{score.capitalize()} of each client by round",
        order,
        marked={worst.name: "the worst"},
        behind=facts.own_scores("mean of all"),
        y=score,
    )
    shown = f"The {MOST} worst of {len(scores)} clients are shown. " if len(scores) > MOST else ""
    caption = (
        f"{shown}Each client's own model on its own rows, all on one scale; its last {score} is "
        "at its name. Dashed is the mean of all."
    )
    figure = Shown("clients", drawn, caption, whole=True)
    return PageSection(title, tuple(paragraphs(*words)), (figure,))


def _place(series: Series, *, higher: bool) -> tuple[bool, float]:
    """Worst first; who has no number has diverged, and is the worst."""
    last = series.points[-1][1]
    return not isnan(last), last if higher else -last


def _told(number: float | None) -> str:
    return "none" if number is None else f"{number:.3f}"


def drift_section(facts: RunFacts, name: str = "") -> PageSection:
    """How far clients' changes lay apart, by kind of param."""
    held = dict[str, list[tuple[float, float]]]()
    for record in facts.rounds:
        for kind, (apart, step) in record.drift.items():
            if apart + step > 0:
                held.setdefault(kind, []).append((record.round, apart / (apart + step)))
    if not held:
        return PageSection("Drift")
    series = [Series(kind, tuple(points)) for kind, points in held.items()]
    series.sort(key=lambda each: -(each.last or 0.0))
    title = f"Drift by kind of param{f', {name}' if name else ''}"
    drawn = line_chart(title, series, y="share that was lost", size=(480, 280))
    caption = (
        "How much of what clients changed was lost when it was averaged: 0 if all moved alike, "
        "near 1 if they pulled apart. Only what is shared is averaged."
    )
    return PageSection("Drift", figures=(Shown("drift", drawn, caption),))
