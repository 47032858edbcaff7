# SPDX-License-Identifier: Apache-2.0
"""The HTML report of one or several runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedplan.errors import FedplanError
from fedplan.reports.pages.audit import audit_section
from fedplan.reports.pages.clients import clients_section, drift_section
from fedplan.reports.pages.curves import curves_section, group_runs, run_names
from fedplan.reports.pages.facts import RunFacts, read_run_facts
from fedplan.reports.pages.markup import Html, html_table, tag
from fedplan.reports.pages.page import Page, PageSection
from fedplan.reports.pages.participation import participation_section
from fedplan.reports.pages.privacy import privacy_section
from fedplan.reports.pages.roles import roles_section
from fedplan.reports.pages.summary import run_summary
from fedplan.reports.pages.traffic import traffic_section
from fedplan.reports.units import megabytes
from fedplan.runners.simulation import Simulation
from fedplan.storage.logs import utc_now
from fedplan.studies.run import Run, read_consistently

REFRESH_SECONDS = 10
"""Seconds after which a browser reloads the page of a run in progress."""
AnyRun = str | Path | Run | Simulation
"""A run: its folder, an opened run, or a simulation."""


def report(
    runs: AnyRun | Sequence[AnyRun],
    file: str | Path = "report.html",
    *,
    csv: str | Path | None = None,
    png: str | Path | None = None,
) -> Path:
    """Write the report of one or several runs to a self-contained HTML file; return its path.

    `csv` and `png` are folders for the numbers and the images of its figures. Raises FedplanError
    if there is no run, or a folder is not one of a run.
    """
    page, file = report_page([runs] if isinstance(runs, AnyRun) else runs), Path(file)
    page.write(file, csv=Path(csv) if csv else None, png=Path(png) if png else None)
    return file


def report_page(runs: Sequence[AnyRun], *, refresh: int = REFRESH_SECONDS) -> Page:
    """Build the report of runs without changing them; they may be in progress.

    The page of a run in progress reloads every `refresh` seconds. Raises FedplanError if `runs` is
    empty.
    """
    if not runs:
        raise FedplanError("a report needs at least one run: give the folder of a run")
    folders = [run if isinstance(run, str | Path) else run.folder for run in runs]
    facts = [read_consistently(Path(folder), read_run_facts) for folder in folders]
    live = any(each.snapshot.live for each in facts)
    return Page(
        _title(facts),
        tuple(_lead(facts)),
        tuple(_sections(facts)),
        f"Written by fedplan {utc_now()[:16].replace('T', ' ')} UTC from the folders of the runs."
        + (" A run is in progress: this page reloads by itself." if live else ""),
        refresh if live else 0,
    )


def _title(facts: Sequence[RunFacts]) -> str:
    """Return the page's title: studies and number of runs, or study, method and rounds."""
    names = ", ".join(dict.fromkeys(each.study.name for each in facts))
    if len(facts) > 1:
        return f"{names}: {len(facts)} runs"
    method, rounds = facts[0].study.method.name, facts[0].study.train.rounds
    return f"{names}: {f'{method}, ' if method else ''}{rounds} rounds"


def watch_report(
    runs: Sequence[AnyRun],
    file: Path,
    seconds: float,
    *,
    csv: Path | None = None,
    png: Path | None = None,
) -> Iterator[Page]:
    """Write the report every `seconds` until no run is in progress; yield each page written."""
    while True:
        page = report_page(runs, refresh=max(1, round(seconds)))
        page.write(file, csv=csv, png=png)
        yield page
        if not page.refresh_seconds:
            return
        time.sleep(seconds)


def _lead(facts: Sequence[RunFacts]) -> Iterator[Html]:
    """Yield a table of several runs, and a summary of the first run of each group."""
    groups = group_runs(facts)
    if len(facts) > 1:
        yield _table(facts)
    for group in groups:
        if len(groups) > 1:
            yield tag("h3", group.name)
        yield from run_summary(group.runs[0])


def _table(facts: Sequence[RunFacts]) -> Html:
    """Return a table with a row per run: state, rounds, scores and traffic."""
    rows = [
        (
            name,
            each.snapshot.state,
            f"{each.run.round} of {each.study.train.rounds}",
            _format_score(each.global_scores("").last),
            _format_score(each.personal_scores("").last),
            *_traffic(each),
        )
        for name, each in zip(run_names(facts), facts, strict=True)
    ]
    score = facts[0].score[0]
    scores = (f"global {score}", f"personal {score}")
    columns = ("run", "state", "rounds", *scores, "upload MB", "download MB")
    return html_table(columns, rows, numbers=5)


def _traffic(facts: RunFacts) -> tuple[str, str]:
    """Return the upload and download in MB; empty under client-level differential privacy.

    There they would reveal how many clients were sampled.
    """
    if facts.client_level_dp:
        return "", ""
    up, down = (sum(r.up for r in facts.rounds), sum(r.down for r in facts.rounds))
    return megabytes(up), megabytes(down)


def _format_score(number: float | None) -> str:
    """Return a score with four digits; empty for None."""
    return "" if number is None else f"{number:.4g}"


def _sections(facts: Sequence[RunFacts]) -> Iterator[PageSection]:
    """Yield the sections of roles and learning curves over all runs, then those of each run."""
    groups = group_runs(facts)
    for group in groups:
        name = group.name if len(groups) > 1 else ""
        yield _add_name(roles_section(group.runs[0], name), name)
    yield curves_section(facts)
    for name, each in zip(run_names(facts), facts, strict=True):
        for section in (
            clients_section(each),
            drift_section(each, name),
            traffic_section(each),
            privacy_section(each),
            participation_section(each),
            audit_section(each),
        ):
            yield _add_name(section, name)


def _add_name(section: PageSection, name: str) -> PageSection:
    """Return a section with the name of its run in the title; unchanged for an empty name."""
    return replace(section, title=f"{section.title}, {name}") if name else section
