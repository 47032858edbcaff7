# SPDX-License-Identifier: Apache-2.0
"""The HTML report of one or several runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from fedplan.errors import FedplanError
from fedplan.reports.formats import megabytes
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
from fedplan.storage.logs import utc_now
from fedplan.studies.run import read_consistently

REFRESH_SECONDS = 10
"""Seconds after which a browser reloads the page of a run in progress."""


class HasFolder(Protocol):
    """A run, opened or running."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        ...


AnyRun = str | Path | HasFolder
"""A run or its folder."""


def report(
    runs: AnyRun | Sequence[AnyRun],
    file: str | Path = "report.html",
    *,
    csv: str | Path | None = None,
    png: str | Path | None = None,
) -> Path:
    """Write the report of one or several runs to a self-contained HTML file; return its path.

    Runs may be in progress and are not changed. `csv` and `png` are folders for the numbers and the
    images of the figures, created if missing; files there are overwritten. Raises FedplanError if
    `runs` is empty, a folder has no run, or matplotlib is missing for `png`.
    """
    page = report_page(runs if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs])
    file = Path(file)
    page.write(file, csv=Path(csv) if csv else None, png=Path(png) if png else None)
    return file


def report_page(runs: Sequence[AnyRun], *, refresh: int = REFRESH_SECONDS) -> Page:
    """Build the report of one or several runs, which may be in progress and are not changed.

    The page of a run in progress reloads in a browser every `refresh` seconds. Raises FedplanError
    if `runs` is empty or a folder has no run.
    """
    if not runs:
        raise FedplanError("a report needs at least one run: give the folder of a run")
    folders = [run if isinstance(run, str | Path) else run.folder for run in runs]
    facts = [read_consistently(Path(folder), read_run_facts) for folder in folders]
    live = any(each.snapshot.live for each in facts)
    title = ", ".join(dict.fromkeys(each.study.name for each in facts))
    method, rounds = facts[0].study.method.name, facts[0].study.train.rounds
    about = f"{method}, {rounds} rounds" if method else f"{rounds} rounds"
    return Page(
        f"{title}: {about if len(facts) == 1 else f'{len(facts)} runs'}",
        tuple(_lead(facts)),
        tuple(_sections(facts)),
        f"Written by fedplan {utc_now()[:16].replace('T', ' ')} UTC from the folders of the runs."
        + (" A run is in progress: this page reloads by itself." if live else ""),
        refresh if live else 0,
    )


def watch_report(
    runs: Sequence[AnyRun],
    file: Path,
    seconds: float,
    *,
    csv: Path | None = None,
    png: Path | None = None,
) -> Iterator[Page]:
    """Write the report of runs to a file every `seconds`; yield each page after it is written.

    Ends when no run is in progress. `csv` and `png` are folders for the numbers and images of the
    figures.
    """
    while True:
        page = report_page(runs, refresh=max(1, round(seconds)))
        page.write(file, csv=csv, png=png)
        yield page
        if not page.refresh_seconds:
            return
        time.sleep(seconds)


def _lead(facts: Sequence[RunFacts]) -> Iterator[Html]:
    """Yield a table of the runs, if there are several, and a summary of each group's first run.

    A group is the runs that differ only in their seed. Under client-level differential privacy the
    table leaves out traffic, which would reveal how many clients were sampled.
    """
    groups, rows, score = group_runs(facts), list[tuple[str, ...]](), facts[0].score[0]
    for name, each in zip(run_names(facts), facts, strict=True) if len(facts) > 1 else ():
        rounds = f"{each.run.round} of {each.study.train.rounds}"
        scores = (each.global_scores("").last, each.personal_scores("").last)
        texts = ("" if number is None else f"{number:.4g}" for number in scores)
        traffic = (
            sum(r.upload_bytes for r in each.rounds),
            sum(r.download_bytes for r in each.rounds),
        )
        sizes = ("" if each.client_level_dp else megabytes(count) for count in traffic)
        rows.append((name, each.snapshot.state, rounds, *texts, *sizes))
    if rows:
        columns = ("run", "state", "rounds", f"global {score}", f"personal {score}")
        yield html_table((*columns, "upload MB", "download MB"), rows, numbers=5)
    for group in groups:
        if len(groups) > 1:
            yield tag("h3", group.name)
        yield from run_summary(group.runs[0])


def _sections(facts: Sequence[RunFacts]) -> Iterator[PageSection]:
    """Yield the sections on roles and learning curves over all runs, then the sections per run.

    Titles end in the name of the run or group if there are several.
    """
    groups = group_runs(facts)
    for group in groups:
        name = group.name if len(groups) > 1 else ""
        yield _add_name(roles_section(group.runs[0], name), name)
    yield curves_section(facts)
    for name, each in zip(run_names(facts), facts, strict=True):
        yield _add_name(clients_section(each), name)
        yield _add_name(drift_section(each, name), name)
        for make_section in (
            traffic_section,
            privacy_section,
            participation_section,
            audit_section,
        ):
            yield _add_name(make_section(each), name)


def _add_name(section: PageSection, name: str) -> PageSection:
    """Return a section with `name` added to its title; unchanged for an empty name."""
    return replace(section, title=f"{section.title}, {name}") if name else section
