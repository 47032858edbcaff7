# SPDX-License-Identifier: Apache-2.0
"""Reports: what became of runs, as one page that a person reads."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.reports.pages.attendance import attendance_section
from fedplan.reports.pages.clients import clients_section, drift_section
from fedplan.reports.pages.curves import curves_section, groups_of, run_names
from fedplan.reports.pages.facts import RunFacts, facts_of
from fedplan.reports.pages.markup import Html, table, tag
from fedplan.reports.pages.opening import opening
from fedplan.reports.pages.page import Page, PageSection
from fedplan.reports.pages.roles import roles_section
from fedplan.reports.pages.spending import spending_section
from fedplan.reports.pages.traffic import traffic_section
from fedplan.reports.pages.verdict import verdict_section
from fedplan.reports.units import megabytes
from fedplan.runners.simulation import Simulation
from fedplan.storage.logs import now
from fedplan.studies.run import Run, looked_at

AGAIN = 10
"""Seconds after which a browser looks again at the page of a run that goes on."""
AnyRun = str | Path | Run | Simulation
"""A run: by its folder, as it was opened, or as it was simulated."""


def report(
    runs: AnyRun | Sequence[AnyRun],
    file: str | Path = "report.html",
    *,
    csv: str | Path | None = None,
    png: str | Path | None = None,
) -> Path:
    """Write what became of runs into one HTML file that needs nothing beside it.

    `csv` and `png` are folders for the numbers and the pictures of its figures.
    """
    page, file = page_of([runs] if isinstance(runs, AnyRun) else runs), Path(file)
    page.write(file, csv=Path(csv) if csv else None, png=Path(png) if png else None)
    return file


def page_of(runs: Sequence[AnyRun], *, again: int = AGAIN) -> Page:
    """The page of some runs. Nothing of them is changed, and one that goes on may be read."""
    if not runs:
        raise FedplanError("a report is of one run or more: name the folder of one")
    folders = [each if isinstance(each, str | Path) else each.folder for each in runs]
    facts = [looked_at(Path(folder), facts_of) for folder in folders]
    live = any(each.look.live for each in facts)
    return Page(
        _title(facts),
        tuple(_lead(facts)),
        tuple(_sections(facts)),
        f"Written by fedplan {now()[:16].replace('T', ' ')} UTC from the folders of the runs."
        + (" A run goes on: this page looks again by itself." if live else ""),
        again if live else 0,
    )


def _title(facts: Sequence[RunFacts]) -> str:
    names = ", ".join(dict.fromkeys(each.study.name for each in facts))
    if len(facts) > 1:
        return f"{names}: {len(facts)} runs"
    method, rounds = facts[0].study.method.name, facts[0].study.train.rounds
    return f"{names}: {f'{method}, ' if method else ''}{rounds} rounds"


def watched(
    runs: Sequence[AnyRun],
    file: Path,
    seconds: float,
    *,
    csv: Path | None = None,
    png: Path | None = None,
) -> Iterator[Page]:
    """Write a page again and again, until none of its runs goes on."""
    while True:
        page = page_of(runs, again=max(1, round(seconds)))
        page.write(file, csv=csv, png=png)
        yield page
        if not page.renewed:
            return
        time.sleep(seconds)


def _lead(facts: Sequence[RunFacts]) -> Iterator[Html]:
    """What was asked: of each group of runs that differ by their seed alone, by its first."""
    groups = groups_of(facts)
    if len(facts) > 1:
        yield _table(facts)
    for group in groups:
        if len(groups) > 1:
            yield tag("h3", group.name)
        yield from opening(group.runs[0])


def _table(facts: Sequence[RunFacts]) -> Html:
    """The runs in a line each."""
    rows = [
        (
            name,
            each.look.state,
            f"{each.run.round} of {each.study.train.rounds}",
            _last(each.world_scores("").last),
            _last(each.own_scores("").last),
            *_sums(each),
        )
        for name, each in zip(run_names(facts), facts, strict=True)
    ]
    score = facts[0].score[0]
    columns = ("run", "state", "rounds", f"world {score}", f"own {score}", "MB up", "MB down")
    return table(columns, rows, numbers=5)


def _sums(facts: RunFacts) -> tuple[str, str]:
    """MB up and down; where clients are hidden they would tell how many were drawn."""
    if facts.hides_clients:
        return "", ""
    up, down = (sum(r.up for r in facts.rounds), sum(r.down for r in facts.rounds))
    return megabytes(up), megabytes(down)


def _last(number: float | None) -> str:
    return "" if number is None else f"{number:.4g}"


def _sections(facts: Sequence[RunFacts]) -> Iterator[PageSection]:
    """What is told of all together, and then of each run."""
    groups = groups_of(facts)
    for group in groups:
        name = group.name if len(groups) > 1 else ""
        yield _titled(roles_section(group.runs[0], name), name)
    yield curves_section(facts)
    for name, each in zip(run_names(facts), facts, strict=True):
        for section in (
            clients_section(each),
            drift_section(each, name),
            traffic_section(each),
            spending_section(each),
            attendance_section(each),
            verdict_section(each),
        ):
            yield _titled(section, name)


def _titled(section: PageSection, name: str) -> PageSection:
    """A section that says in its heading of which run it is, where there are several."""
    return replace(section, title=f"{section.title}, {name}") if name else section
