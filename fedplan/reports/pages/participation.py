# SPDX-License-Identifier: Apache-2.0
"""The participation section of a report: the outcome of each client's turn by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import Html, html_list, paragraphs, tag
from fedplan.reports.pages.page import PageFigure, PageSection

MAX_CLIENTS = 40
"""The most clients in the figure: those that were missing most often."""
AGGREGATED, LATE, DROPPED, REFUSED, FAILED, REJECTED = (
    *("aggregated", "late", "dropped"),
    *("refused", "failed", "rejected"),
)
CELLS = {
    AGGREGATED: ("good", "✓"),
    LATE: ("warn", "L"),
    DROPPED: ("away", "D"),
    REFUSED: ("bad", "R"),
    FAILED: ("bad", "F"),
    REJECTED: ("bad", "X"),
}
"""The paint and letter of each outcome."""
LEGEND = {
    "good": "✓ aggregated",
    "warn": "L late: answered, not aggregated",
    "away": "D dropped out, no answer, or not requested",
    "bad": "R refused, F failed, X rejected",
}
"""The legend of the paints."""
BLANK = "Blank: the client was not sampled in the round, or the round is not done yet."
MAX_REASONS = 12
"""The most reasons and the most warnings listed."""


def participation_section(facts: RunFacts) -> PageSection:
    """Return the section on the clients of each round of a run; empty before round 1 is closed.

    Reasons of clients that were not aggregated are listed below the figure. Under client-level
    differential privacy a sentence says that participation is not shown.
    """
    title = "Participation"
    if not facts.rounds:
        return PageSection(title)
    if facts.client_level_dp:
        text = (
            "Not shown: client-level differential privacy protects who was sampled and took part."
        )
        return PageSection(title, tuple(paragraphs(text)))
    outcomes = dict[str, dict[int, str]]({client: {} for client in facts.roster})
    for record in facts.rounds:
        for client in record.aggregated:
            outcomes.setdefault(client, {})[record.round] = AGGREGATED
        for client, why in record.rejected.items():
            outcomes.setdefault(client, {})[record.round] = turn_outcome(why)
    counts = {client: Counter(rounds.values()) for client, rounds in outcomes.items()}
    total = sum(counts.values(), Counter[str]())
    texts = ", ".join(f"{total[outcome]} {outcome}" for outcome in CELLS if total[outcome])
    text = f"Turns over {len(facts.rounds)} rounds: {texts}."
    missing = {client: each.total() - each[AGGREGATED] for client, each in counts.items()}
    most_missing = set(sorted(outcomes, key=lambda client: -missing[client])[:MAX_CLIENTS])
    rows = [
        GridRow(name, tuple(_cells(outcomes[name]))) for name in outcomes if name in most_missing
    ]
    used = {paint for row in rows for cell in row.cells for paint, _ in cell.paints}
    legend = {paint: label for paint, label in LEGEND.items() if paint in used}
    rounds = max(facts.study.train.rounds, facts.run.round)
    drawn = cell_grid("Clients by round", rows, rounds=rounds, legend=legend, row="client")
    some = f"The {MAX_CLIENTS} of {len(outcomes)} clients that were missing most often. "
    caption = (some if len(outcomes) > MAX_CLIENTS else "") + BLANK
    figure = PageFigure("participation", drawn, caption, wide=True)
    return PageSection(title, tuple(paragraphs(text)), (figure,), tuple(_reasons(facts)))


def turn_outcome(why: str) -> str:
    """Return the outcome of a turn that was not aggregated, from the reason `why` in the ledger."""
    if why == "late" or why.startswith("late, and "):
        return LATE
    if why == "dropped" or why.startswith(("no answer", "not requested")):
        return DROPPED
    if why.startswith("refused"):
        return REFUSED
    return FAILED if why.startswith("failed") else REJECTED


def _cells(outcomes: Mapping[int, str]) -> Iterator[GridCell]:
    """Yield a cell for each run of consecutive rounds with the same outcome of a client.

    `outcomes` are the client's outcomes by round; rounds without a turn are absent.
    """
    order = enumerate(sorted(outcomes))
    # In consecutive rounds the difference of round and index stays the same.
    for (outcome, _), run in groupby(order, key=lambda p: (outcomes[p[1]], p[1] - p[0])):
        numbers = [number for _, number in run]
        paint, letter = CELLS[outcome]
        yield GridCell(numbers[0], numbers[-1], ((paint, 1.0),), outcome, letter)


def _reasons(facts: RunFacts) -> Iterator[Html]:
    """Yield lists of the reasons of updates not aggregated in a run, and of warnings.

    At most MAX_REASONS of each are listed, the most frequent reasons first; late and dropped
    clients are left out.
    """
    reasons = Counter(
        f"{client}: {reason}"
        for record in facts.rounds
        for client, reason in record.rejected.items()
        if turn_outcome(reason) not in (LATE, DROPPED)
    )
    if reasons:
        yield tag("h3", "Reasons of updates not aggregated")
        top = reasons.most_common(MAX_REASONS)
        yield html_list(f"{text} ({times} times)" for text, times in top)
    warnings = [f"round {r.round}: {text}" for r in facts.rounds for text in r.warnings]
    if warnings:
        yield tag("h3", "Warnings")
        yield html_list(warnings[:MAX_REASONS])
    more = max(0, len(reasons) - MAX_REASONS) + max(0, len(warnings) - MAX_REASONS)
    if more:
        yield tag("p", f"And {more} more: the ledger has all of them.", class_="faint")
