# SPDX-License-Identifier: Apache-2.0
"""What a person opens in a browser: the report of runs, and the officer's page of a site."""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import Json, told
from fedplan.errors import FedplanError


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders of runs and sweeps; or the home of one site, for its officer."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The HTML file to write.")] = Path(
        "report.html"
    ),
    watch: Annotated[
        float, typer.Option(help="Write it again after so many seconds, until the run ends.", min=0)
    ] = 0.0,
    csv: Annotated[
        Path | None, typer.Option(help="A folder for the numbers of each figure.")
    ] = None,
    png: Annotated[
        Path | None, typer.Option(help="A folder for each figure as PNG (matplotlib).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML file that shows what became of runs, or what left a site.

    It needs no server and no network: open it in any browser, print it, or send it.
    """
    from fedplan.sites.officer import is_home, officer_page

    with told():
        if not isfinite(watch):
            raise FedplanError(f"--watch is {watch}: say how many seconds, as --watch 10")
        faults: tuple[str, ...] = ()
        if any(map(is_home, runs)):
            if len(runs) > 1:
                raise FedplanError(f"{runs[0]} and others: a site's home is reported by itself")
            if watch:
                raise FedplanError(f"--watch is for runs, and {runs[0]} is a site's home")
            page = officer_page(runs[0])
            page.write(output, csv=csv, png=png)
            faults = page.faults
        else:
            _report(runs, output, watch, csv, png)
    if as_json:
        print(json.dumps({"written": str(output), "faults": len(faults)}))
    else:
        told_of = f"; {len(faults)} faults are told in it" if faults else ""
        Console(soft_wrap=True, highlight=False).print(f"Written: {output}{told_of}", markup=False)
    if faults:
        raise typer.Exit(1)


def _report(
    runs: Sequence[Path], output: Path, watch: float, csv: Path | None, png: Path | None
) -> None:
    from fedplan.reports.figures.drawing import printable
    from fedplan.reports.pages.reporting import report as reported
    from fedplan.reports.pages.reporting import watched
    from fedplan.sweeps.records import is_sweep
    from fedplan.sweeps.results import runs_in

    if any(map(is_sweep, runs)):
        runs, notes = runs_in(runs)
        for note in notes:
            Console(stderr=True, soft_wrap=True).print(f"Note: {printable(note)}.", markup=False)
    if not watch:
        reported(runs, output, csv=csv, png=png)
        return
    try:
        for _ in watched(runs, output, watch, csv=csv, png=png):
            pass
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
