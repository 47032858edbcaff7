# SPDX-License-Identifier: Apache-2.0
"""The page of a comparison: its table, and the figures of all groups side by side."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from fedplan.reports.figures.bars import Bar, bar_chart
from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.palette import HUES
from fedplan.reports.figures.series import Series, mean_series
from fedplan.reports.pages.clients import drift_section
from fedplan.reports.pages.facts import facts_of
from fedplan.reports.pages.markup import Html, listed, tag, together
from fedplan.reports.pages.markup import table as html_table
from fedplan.reports.pages.page import Page, PageSection, Shown
from fedplan.reports.pages.roles import roles_section
from fedplan.studies.run import looked_at
from fedplan.sweeps.intervals import interval_chart
from fedplan.sweeps.tables import cells, heads, reading

if TYPE_CHECKING:
    from fedplan.sweeps.comparisons import Comparison, Contrast

CURVES = {
    "loss": "Loss of training",
    "personal.mean": "Clients' own models, mean",
    "personal.worst": "The worst client's own model",
    "sites.spread.own.mean": "Clients' own models, mean",
    "sites.spread.own.worst": "The worst client's own model",
}
"""Numbers of a round that are drawn beside the score, where all groups have them."""
BAND = "A line is the mean over seeds, its band reaches from the lowest to the highest of them."


def page(found: Comparison) -> str:
    """A comparison as one HTML file."""
    seeds = sum(row.score.count for row in found.rows)
    lead = f"{len(found.rows)} groups, {seeds} runs, compared by {found.score}."
    sections = (
        PageSection("The table", words=(_table(found), *_notes(found))),
        PageSection("Differences", figures=tuple(_differences(found))),
        PageSection("Round by round", figures=tuple(_curves(found))),
        PageSection("Costs", figures=tuple(_costs(found))),
        PageSection("Part by part", figures=tuple(_parts(found))),
        PageSection("What differs", words=tuple(_words(found))),
    )
    title = f"Comparison: {found.base.first.study.name}"
    return Page(title, (tag("p", lead),), sections, "Written by fedplan compare.").html()


def _table(found: Comparison) -> Html:
    rows = [cells(found, row) for row in found.rows]
    return html_table(heads(found), rows, numbers=len(rows[0]) - 1)


def _notes(found: Comparison) -> list[Html]:
    return [tag("p", f"Note: {note}.", class_="faint") for note in (*found.notes, reading(found))]


def _differences(found: Comparison) -> Iterator[Shown]:
    rows = [(row.group.label, row.difference) for row in found.rows]
    told = [(label, each) for label, each in rows if each and isfinite(each.mean)]
    if told:
        drawn = interval_chart(f"{found.score} minus that of {found.base.label}", told)
        better = "right" if found.higher else "left"
        caption = (
            f"A dot is the mean difference over seeds, a line its 95 % interval; better is to the "
            f"{better}. Where a line crosses zero, these seeds do not tell the two apart."
        )
        yield Shown("differences", drawn, caption)


def _curves(found: Comparison) -> Iterator[Shown]:
    private = any(row.group.first.study.privacy for row in found.rows)
    beside = {} if private else CURVES  # what is hidden is not drawn, though a simulation has it
    for name, title in {found.score: f"Score: {found.score}", **beside}.items():
        series = [_curve(row, name) for row in found.rows]
        if all(each.points for each in series):
            banded = any(each.band for each in series)
            # Said once: it is so of all of them.
            told = BAND if banded and name == found.score else ""
            yield Shown(name, line_chart(title, series, y=name), told)


def _curve(row: Contrast, name: str) -> Series:
    runs = [
        Series(str(seed), tuple((float(n), score) for n, score in run.curve(name)))
        for seed, run in sorted(row.group.runs.items())
    ]
    return mean_series(row.group.label, runs)


def _costs(found: Comparison) -> Iterator[Shown]:
    for name, title, unit, size in (
        ("up", "Sent by all clients", "MB", 1e6),
        ("down", "Received by all clients", "MB", 1e6),
        ("epsilon", "Privacy spent", "epsilon", 1.0),
        ("seconds", "Time on the machine that ran it", "seconds", 1.0),
    ):
        told = [(row.group.label, row.group.number(name)) for row in found.rows]
        bars = [
            Bar(label, number / size, paint=HUES[place % len(HUES)])
            for place, (label, number) in enumerate(told)
            if number is not None
        ]
        if bars:
            yield Shown(name, bar_chart(title, bars, unit=unit, told=_amount))


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _parts(found: Comparison) -> Iterator[Shown]:
    """Roles by part and round of each group's first run, and then how far its clients drifted."""
    named = [(row.group.label, row.group.first.folder) for row in found.rows]
    facts = [(label, looked_at(folder, facts_of)) for label, folder in named]
    for section in (roles_section, drift_section):
        for label, each in facts:
            yield from section(each, label).figures


def _words(found: Comparison) -> Iterator[Html]:
    for row in found.rows:
        if row.words:
            yield together(tag("h3", row.group.label), listed(row.words))
