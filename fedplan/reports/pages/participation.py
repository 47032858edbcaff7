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
MAX_REASONS = 12
"""The most reasons and the most warnings listed."""


def participation_section(facts: RunFacts) -> PageSection:
    """Return the section on the clients of each round, and the reasons of those missing.

    Under client-level differential privacy it only says that participation is not shown.
    """
    title = "Participation"
    if not facts.rounds:
        return PageSection(title)
    if facts.client_level_dp:
        text = (
            "Not shown: client-level differential privacy protects who was sampled and took part."
        )
        return PageSection(title, tuple(paragraphs(text)))
    outcomes = _outcomes(facts)
    counts = Counter(outcome for rounds in outcomes.values() for outcome in rounds.values())
    texts = [f"{count} {outcome}" for outcome in CELLS if (count := counts[outcome])]
    text = f"Turns over {len(facts.rounds)} rounds: {', '.join(texts)}."
    order = sorted(outcomes, key=lambda client: -_missing(outcomes[client]))
    drawn_clients = [client for client in outcomes if client in set(order[:MAX_CLIENTS])]
    rows = [GridRow(client, tuple(_cells(outcomes[client]))) for client in drawn_clients]
    used = {paint for row in rows for cell in row.cells for paint, _ in cell.paints}
    legend = {paint: label for paint, label in LEGEND.items() if paint in used}
    rounds = max(facts.study.train.rounds, facts.run.round)
    drawn = cell_grid("Clients by round", rows, rounds=rounds, legend=legend, row="client")
    figure = PageFigure("attendance", drawn, _caption(len(outcomes)), wide=True)
    return PageSection(title, tuple(paragraphs(text)), (figure,), tuple(_reasons(facts)))


def _caption(clients: int) -> str:
    """Return the caption of the figure for a number of clients."""
    most_missing = f"The {MAX_CLIENTS} of {clients} clients that were missing most often. "
    blank = "Blank: the client was not sampled in the round, or the round is not done yet."
    return (most_missing if clients > MAX_CLIENTS else "") + blank


def turn_outcome(why: str) -> str:
    """Return the outcome of a turn that was not aggregated, from the reason in the ledger."""
    if why == "late" or why.startswith("late, and "):
        return LATE
    if why == "dropped" or why.startswith(("no answer", "not asked")):
        return DROPPED
    if why.startswith("refused"):
        return REFUSED
    return FAILED if why.startswith("failed") else REJECTED


def _outcomes(facts: RunFacts) -> dict[str, dict[int, str]]:
    """Return for each client the outcome of its turn by round; rounds without a turn are absent."""
    outcomes = dict[str, dict[int, str]]({client: {} for client in facts.roster})
    for record in facts.rounds:
        for client in record.counted:
            outcomes.setdefault(client, {})[record.round] = AGGREGATED
        for client, why in record.rejected.items():
            outcomes.setdefault(client, {})[record.round] = turn_outcome(why)
    return outcomes


def _missing(outcomes: Mapping[int, str]) -> int:
    """Return the number of a client's turns that were not aggregated."""
    return sum(outcome != AGGREGATED for outcome in outcomes.values())


def _cells(outcomes: Mapping[int, str]) -> Iterator[GridCell]:
    """Yield a cell for each run of consecutive rounds with the same outcome of a client."""
    order = enumerate(sorted(outcomes))
    # In consecutive rounds the difference of round and index stays the same.
    for (outcome, _), run in groupby(order, key=lambda p: (outcomes[p[1]], p[1] - p[0])):
        numbers = [number for _, number in run]
        paint, letter = CELLS[outcome]
        yield GridCell(numbers[0], numbers[-1], ((paint, 1.0),), outcome, letter)


def _reasons(facts: RunFacts) -> Iterator[Html]:
    """Yield lists of the reasons of rejected turns, and of warnings, with counts."""
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
