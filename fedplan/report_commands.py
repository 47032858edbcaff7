# SPDX-License-Identifier: Apache-2.0
"""Command to write an HTML report of runs, or the compliance report of a site."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import JsonOption, print_errors
from fedplan.errors import FedplanError


def report_command(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs and sweeps; or a site's state folder, for its compliance report."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    watch: Annotated[
        float,
        typer.Option(
            help="Rewrite the report every so many seconds, until the run ends; 0: once.", min=0
        ),
    ] = 0.0,
    csv: Annotated[
        Path | None, typer.Option(help="Folder for the numbers of each figure, as CSV.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="Folder for each figure as PNG (needs matplotlib).")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML file that reports on runs, or on the data that left a site.

    The file is self-contained: open it in any browser, without a server or network. The exit code
    is 1 if the compliance report of a site lists faults.
    """
    from fedplan.sites.compliance_report import compliance_page
    from fedplan.sites.egress_audit import is_site_state

    with print_errors():
        if not isfinite(watch):
            raise FedplanError(f"--watch is {watch}: give a number of seconds, as in --watch 10")
        faults: tuple[str, ...] = ()
        if any(map(is_site_state, runs)):
            if len(runs) > 1:
                raise FedplanError(f"{runs[0]} is a site's state folder: report it alone")
            if watch:
                raise FedplanError(f"--watch is for runs, but {runs[0]} is a site's state folder")
            page = compliance_page(runs[0])
            page.write(output, csv=csv, png=png)
            faults = page.faults
        else:
            _report_runs(runs, output, watch, csv, png)
    if as_json:
        print(json.dumps({"file": str(output), "fault_count": len(faults)}))
    else:
        fault_count = f"; it lists {len(faults)} faults" if faults else ""
        Console(soft_wrap=True, highlight=False).print(
            f"Written: {output}{fault_count}", markup=False
        )
    if faults:
        raise typer.Exit(1)


def _report_runs(
    runs: Sequence[Path], output: Path, watch: float, csv: Path | None, png: Path | None
) -> None:
    """Write the HTML report of runs to `output`, once or every `watch` seconds until the runs end.

    Folders of sweeps stand for their runs. `csv` and `png` are folders for the numbers and images
    of the figures. Ctrl-C while watching raises typer.Exit(0).
    """
    from fedplan.reports.figures.drawing import replace_control_chars
    from fedplan.reports.pages.run_report import report, watch_report
    from fedplan.sweeps.records import is_sweep
    from fedplan.sweeps.results import find_run_folders

    if any(map(is_sweep, runs)):
        runs, notes = find_run_folders(runs)
        for note in notes:
            Console(stderr=True, soft_wrap=True).print(
                f"Note: {replace_control_chars(note)}.", markup=False
            )
    if not watch:
        report(runs, output, csv=csv, png=png)
        return
    try:
        for _ in watch_report(runs, output, watch, csv=csv, png=png):
            pass
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
