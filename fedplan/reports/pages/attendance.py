# SPDX-License-Identifier: Apache-2.0
"""Attendance: who came, who was late and who was not counted, client by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import Html, listed, paragraphs, tag
from fedplan.reports.pages.page import PageSection, Shown

MOST = 40
"""Clients that a page draws: of more, those that were missing most often."""
CAME, LATE, DROPPED, REFUSED, FAILED, LEFT = (
    *("counted", "late", "dropped"),
    *("refused", "failed", "not counted"),
)
LOOKS = {
    CAME: ("good", "✓"),
    LATE: ("warn", "L"),
    DROPPED: ("away", "D"),
    REFUSED: ("bad", "R"),
    FAILED: ("bad", "F"),
    LEFT: ("bad", "X"),
}
LEGEND = {
    "good": "✓ counted",
    "warn": "L late: heard, not counted",
    "away": "D dropped out, away, or not asked",
    "bad": "R refused, F failed, X not counted",
}
TOLD = 12
"""Reasons and warnings that are listed."""


def attendance_section(facts: RunFacts) -> PageSection:
    """Who took part in which round, and why somebody did not."""
    title = "Who came"
    if not facts.rounds:
        return PageSection(title)
    if facts.hides_clients:
        words = "This study hides each client: who was drawn, and who came, is not told."
        return PageSection(title, tuple(paragraphs(words)))
    states = _states(facts)
    counts = Counter(state for held in states.values() for state in held.values())
    told = [f"{count} {state}" for state in LOOKS if (count := counts[state])]
    words = f"Over {len(facts.rounds)} rounds, turns were: {', '.join(told)}."
    order = sorted(states, key=lambda client: -_missing(states[client]))
    shown = [client for client in states if client in set(order[:MOST])]
    rows = [GridRow(client, tuple(_cells(states[client]))) for client in shown]
    used = {paint for row in rows for cell in row.cells for paint, _ in cell.paints}
    legend = {paint: text for paint, text in LEGEND.items() if paint in used}
    rounds = max(facts.study.train.rounds, facts.run.round)
    drawn = cell_grid("Clients by round", rows, rounds=rounds, legend=legend, row="client")
    figure = Shown("attendance", drawn, _caption(len(states)), whole=True)
    return PageSection(title, tuple(paragraphs(words)), (figure,), tuple(_reasons(facts)))


def _caption(clients: int) -> str:
    some = (
        f"The {MOST} of {clients} clients that were missing most often. " if clients > MOST else ""
    )
    return f"{some}A blank cell is a round in which a client was not asked, or that is to come."


def state_of_turn(why: str) -> str:
    """What became of a client that was not counted, by the reason in the ledger."""
    if why == "late" or why.startswith("late, and "):
        return LATE
    if why == "dropped" or why.startswith(("no answer", "not asked")):
        return DROPPED
    if why.startswith("refused"):
        return REFUSED
    return FAILED if why.startswith("failed") else LEFT


def _states(facts: RunFacts) -> dict[str, dict[int, str]]:
    """Of each client, what became of it in each round that it was asked in."""
    found = dict[str, dict[int, str]]({client: {} for client in facts.roster})
    for record in facts.rounds:
        for client in record.counted:
            found.setdefault(client, {})[record.round] = CAME
        for client, why in record.rejected.items():
            found.setdefault(client, {})[record.round] = state_of_turn(why)
    return found


def _missing(held: Mapping[int, str]) -> int:
    return sum(state != CAME for state in held.values())


def _cells(held: Mapping[int, str]) -> Iterator[GridCell]:
    order = enumerate(sorted(held))
    for (state, _), found in groupby(order, key=lambda each: (held[each[1]], each[1] - each[0])):
        numbers = [number for _, number in found]
        paint, letter = LOOKS[state]
        yield GridCell(numbers[0], numbers[-1], ((paint, 1.0),), state, letter)


def _reasons(facts: RunFacts) -> Iterator[Html]:
    """Why clients were not counted, and what a person should look at."""
    why = Counter(
        f"{client}: {reason}"
        for record in facts.rounds
        for client, reason in record.rejected.items()
        if state_of_turn(reason) not in (LATE, DROPPED)
    )
    if why:
        yield tag("h3", "Why somebody was not counted")
        yield listed(f"{text} ({times} times)" for text, times in why.most_common(TOLD))
    warned = [f"round {r.round}: {text}" for r in facts.rounds for text in r.warnings]
    if warned:
        yield tag("h3", "Warnings")
        yield listed(warned[:TOLD])
    more = max(0, len(why) - TOLD) + max(0, len(warned) - TOLD)
    if more:
        yield tag("p", f"And {more} more: the ledger has all.", class_="faint")
