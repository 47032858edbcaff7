# SPDX-License-Identifier: Apache-2.0
"""A comparison as one HTML page: its table, and figures with all groups."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import TYPE_CHECKING

from fedplan.reports.figures.charts import (
    Bar,
    Series,
    bar_chart,
    interval_chart,
    line_chart,
    mean_series,
)
from fedplan.reports.figures.drawing import HUES
from fedplan.reports.pages.facts import read_run_facts
from fedplan.reports.pages.page import Page, PageFigure, PageSection, block
from fedplan.reports.pages.round_grids import roles_section
from fedplan.reports.pages.scores import drift_section
from fedplan.studies.run import read_consistently

if TYPE_CHECKING:
    from fedplan.sweeps.comparisons import Comparison

CURVES = {
    "personal.{}": "Personal models, mean over clients",
    "personal.{}_worst": "Personal model of the worst client",
    "sites.spread.personal.{}": "Personal models, mean over clients",
    "sites.spread.personal.{}_worst": "Personal model of the worst client",
    "global.{}": "Global model",
    "sites.global.{}": "Global model",
    "loss": "Training loss",
}
"""Metrics that are drawn beside the score, if all groups have them, with their titles.

`{}` stands for the task's primary metric."""
BAND_CAPTION = "A line is the mean over seeds; its band spans the lowest and the highest seed."


def comparison_page(comparison: Comparison) -> str:
    """Return a comparison as one HTML document; ConfigError if a run cannot be read."""
    rows, every = comparison.rows, (comparison, *comparison.others)
    runs, scores = sum(row.score.count for row in rows), " and ".join(e.score for e in every)
    lead = f"{len(rows)} groups, {runs} runs, compared by {scores}."
    tables = (
        block("table", columns=names, rows=cells, numbers=len(names) - 1)
        for names, cells in comparison.tables
    )
    notes = (
        block("note", text=f"Note: {note}.")
        for note in (*comparison.notes, *comparison.table_explanations)
    )
    sentences = (
        block("bullets", title=row.group.label, items=row.differences)
        for row in rows
        if row.differences
    )
    differences = tuple(figure for each in every for figure in _difference_figures(each))
    sections = (
        PageSection("Table", intro=(*tables, *notes)),
        PageSection("Differences", figures=differences),
        PageSection("By round", figures=tuple(_curve_figures(comparison))),
        PageSection("Costs", figures=tuple(_cost_figures(comparison))),
        PageSection("By part of the model", figures=tuple(_part_figures(comparison))),
        PageSection("Differences in words", intro=tuple(sentences)),
    )
    title = f"Comparison: {comparison.baseline.first.study.name}"
    return Page(title, (lead,), sections, "Written by fedplan compare.").html()


def _difference_figures(comparison: Comparison) -> Iterator[PageFigure]:
    """Yield one chart of the groups' differences from the baseline, if any is finite."""
    rows = [(row.group.label, row.difference) for row in comparison.rows]
    finite = [(label, interval) for label, interval in rows if interval and isfinite(interval.mean)]
    if finite:
        title = f"{comparison.score} minus that of {comparison.baseline.label}"
        better = "right" if comparison.higher_is_better else "left"
        caption = (
            f"A dot is the mean difference over seeds, a line its 95 % confidence interval; better "
            f"is to the {better}. Where a line crosses zero, the seeds show no detectable "
            "difference."
        )
        intervals = [(label, each.mean, each.low, each.high) for label, each in finite]
        yield PageFigure(
            f"differences-{comparison.score}", interval_chart(title, intervals), caption=caption
        )


def _curve_figures(comparison: Comparison) -> Iterator[PageFigure]:
    """Yield line charts by round: of the score, and of metrics in CURVES that all groups have."""
    private = any(row.group.first.study.privacy for row in comparison.rows)
    primary = comparison.rows[0].group.first.rules.metric
    # A simulation has these metrics, but DP hides them.
    others = {} if private else {name.format(primary): title for name, title in CURVES.items()}
    scores = {each.score: f"Score: {each.score}" for each in (comparison, *comparison.others)}
    for name, title in {**scores, **others}.items():
        series = list[Series]()
        for row in comparison.rows:
            by_seed = [
                Series(str(seed), tuple((float(n), score) for n, score in run.curve(name)))
                for seed, run in sorted(row.group.runs.items())
            ]
            series.append(mean_series(row.group.label, by_seed))
        if all(each.points for each in series):
            has_band = any(each.band for each in series)
            caption = BAND_CAPTION if has_band and name in scores else ""
            yield PageFigure(name, line_chart(title, series, y=name), caption=caption)


def _cost_figures(comparison: Comparison) -> Iterator[PageFigure]:
    """Yield bar charts of the groups' mean upload, download, epsilon and time, where known."""

    def amount_text(number: float) -> str:
        return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"

    for name, title, unit, divisor in (
        ("upload_bytes", "Upload of all clients", "MB", 1e6),
        ("download_bytes", "Download of all clients", "MB", 1e6),
        ("epsilon_spent", "Epsilon spent", "epsilon", 1.0),
        ("seconds", "Time on the machine that ran it", "seconds", 1.0),
    ):
        means = [(row.group.label, row.group.mean_of(name)) for row in comparison.rows]
        bars = [
            Bar(label, value / divisor, paint=HUES[place % len(HUES)])
            for place, (label, value) in enumerate(means)
            if value is not None
        ]
        if bars:
            yield PageFigure(name, bar_chart(title, bars, unit=unit, format_value=amount_text))


def _part_figures(comparison: Comparison) -> Iterator[PageFigure]:
    """Yield figures of roles by part and round, then of drift, for each group's first run."""
    firsts = [(row.group.label, row.group.first.folder) for row in comparison.rows]
    facts = [(label, read_consistently(folder, read_run_facts)) for label, folder in firsts]
    for section in (roles_section, drift_section):
        for label, run_facts in facts:
            yield from section(run_facts, label).figures
