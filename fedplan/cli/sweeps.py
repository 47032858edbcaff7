# SPDX-License-Identifier: Apache-2.0
"""Commands about several runs: sweep and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedplan.cli.console import (
    JsonLinesOption,
    JsonOption,
    StudyArgument,
    app,
    command,
    outlive_viewer,
    print_errors,
    print_lines,
)
from fedplan.errors import FedplanError


@command(app, "sweep study.toml --set method.name=fedavg,fedper --seeds 3 -o sweep")
def sweep_command(
    study: StudyArgument,
    change: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A field with its values: method.name=fedavg,fedper; repeatable."
        ),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="Number of seeds, counted from the study's seed; or a list: 0,3,7.")
    ] = "1",
    parallel: Annotated[
        int, typer.Option(help="Number of parallel runs, each in its own process.", min=1)
    ] = 1,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of the sweep; default: sweeps/ and the study's name."
        ),
    ] = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Run a study for every combination of settings and seeds. The same command resumes a sweep.

    Finished runs are not repeated, stopped runs are resumed, and failed runs are recorded with
    their error while the others continue. The exit code is 1 if any run failed. A closed pipe or
    terminal ends the display, not the sweep.
    """
    from fedplan.sweeps.progress import sweep_with_progress
    from fedplan.sweeps.sweeping import sweep
    from fedplan.sweeps.trials import read_base_study

    with outlive_viewer(), print_errors():
        if as_json:
            folder = output or Path("sweeps") / read_base_study(study).with_changes({}).name
            result = sweep(
                study, change, folder=folder, seeds=seeds, parallel=parallel,
                on_trial_end=lambda event: print(json.dumps(event.json()), flush=True),
            )  # fmt: skip
        else:
            result = sweep_with_progress(
                study, change or (), folder=output, seeds=seeds, parallel=parallel
            )
    if result.failures:
        raise typer.Exit(1)


@command(app, "compare sweep", "compare sweep --html comparison.html")
def compare_command(
    places: Annotated[list[Path], typer.Argument(help="Folders of runs and of sweeps.")],
    score: Annotated[
        str,
        typer.Option(
            help="Metric to compare, such as global.loss; default: the task's primary metric."
        ),
    ] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print plain numbers as CSV.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write an HTML page with figures to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs: groups of runs that differ only in their seed, each against the first group.

    Prints Markdown: means with confidence intervals over seeds, differences paired by seed,
    p-values corrected for multiple comparisons, bytes, epsilon, time, and a summary in words.
    """
    from fedplan.storage.files import SHARED, write_atomic
    from fedplan.sweeps.comparisons import compare

    with print_errors():
        if as_csv and as_json:
            raise FedplanError("--csv and --json exclude each other: give one of them")
        comparison = compare(places, score=score)
        if html is not None:
            write_atomic(html, comparison.html(), mode=SHARED)
        if as_json:
            print(json.dumps(comparison.json(), indent=1))
        elif as_csv:
            print(comparison.csv(), end="")
        elif html is not None:
            print_lines(f"Written: {html}")
        else:
            print(comparison.markdown(), end="")
