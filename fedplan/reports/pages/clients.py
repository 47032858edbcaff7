# SPDX-License-Identifier: Apache-2.0
"""The sections of a report on each client's personal score, and on client drift."""

from __future__ import annotations

from math import isnan

from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.multiples import small_multiples
from fedplan.reports.figures.series import Series
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import paragraphs
from fedplan.reports.pages.page import PageFigure, PageSection

MAX_CLIENTS = 24
"""The most clients in the figure: those with the worst scores."""


def clients_section(facts: RunFacts) -> PageSection:
    """Return the section on each client's personal score by round, with the worst client marked.

    It is empty if no client was measured. Under differential privacy, a sentence says that single
    clients are not shown.
    """
    title, scores, (score, higher) = "Clients", facts.client_scores, facts.score
    if not scores:
        return PageSection(title)
    if facts.privacy_unit:
        level = f"{facts.privacy_unit}-level differential privacy"
        text = f"Not shown: {level} protects the scores of single clients."
        return PageSection(title, tuple(paragraphs(text)))

    def rank(series: Series) -> tuple[bool, float]:
        last = series.points[-1][1]
        return not isnan(last), last if higher else -last  # NaN (diverged) is the worst

    order = sorted(scores.values(), key=rank)
    worst, mean = order[0], facts.personal_scores("mean of all clients")
    last, average = ("none" if x is None else f"{x:.3f}" for x in (worst.last, mean.last))
    text = (
        f"Worst client: {worst.name}, with {score} {last}; mean of all "
        f"{len(scores)} clients: {average}."
    )
    drawn = small_multiples(
        f"Personal {score} of each client by round",
        order[:MAX_CLIENTS] if len(order) > MAX_CLIENTS else list(scores.values()),
        marked={worst.name: "worst client"},
        behind=mean,
        y=score,
    )
    some = f"The {MAX_CLIENTS} worst of {len(scores)} clients. "
    caption = (some if len(scores) > MAX_CLIENTS else "") + (
        "Each client's personal model on its own examples, all on one scale, with the last "
        f"{score}. Dashed: mean of all clients."
    )
    figure = PageFigure("clients", drawn, caption, wide=True)
    return PageSection(title, tuple(paragraphs(text)), (figure,))


def drift_section(facts: RunFacts, name: str = "") -> PageSection:
    """Return the section on client drift in a run: the share of updates lost in averaging, by kind.

    Empty if the ledger has no drift. `name` is added to the figure's title.
    """
    shares = dict[str, list[tuple[float, float]]]()
    for record in facts.rounds:
        for kind, (spread, step) in record.drift.items():
            if spread + step > 0:
                shares.setdefault(kind, []).append((record.round, spread / (spread + step)))
    if not shares:
        return PageSection("Client drift")
    series = [Series(kind, tuple(points)) for kind, points in shares.items()]
    series.sort(key=lambda each: -(each.last or 0.0))
    title = f"Client drift by kind of param{f', {name}' if name else ''}"
    drawn = line_chart(title, series, y="share lost", size=(480, 280))
    caption = (
        "The share of the clients' updates that cancels out in the average: 0 if all updates are "
        "equal, near 1 if they point in different directions. Only shared params are averaged."
    )
    return PageSection("Client drift", figures=(PageFigure("drift", drawn, caption),))
