# SPDX-License-Identifier: Apache-2.0
"""What a researcher asks of many runs: to sweep over settings, to compare, and to rehearse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import Json, JsonLines, told
from fedplan.errors import FedplanError

StudyFile = Annotated[Path, typer.Argument(help="A study file (TOML).")]


def sweep(
    study: StudyFile,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="A field with its values: method.name=fedavg,fedper; repeat."),
    ] = None,
    seeds: Annotated[
        str, typer.Option(help="How many, from the study's own on; or which: 0,3,7.")
    ] = "1",
    parallel: Annotated[int, typer.Option(help="Runs at once, a process each.", min=1)] = 1,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Its folder; else sweeps/ and its name.")
    ] = None,
    as_json: JsonLines = False,
) -> None:
    """Run a study for every combination of settings and seeds. The same command goes on with it.

    A run that ended is not run again, one that was stopped goes on, and one that fails is kept
    apart with its error while the others go on. The exit code is 1 if any failed.
    """
    from dataclasses import asdict

    from fedplan.sweeps.following import follow_sweep
    from fedplan.sweeps.sweeping import sweep as swept
    from fedplan.sweeps.trials import ground_of

    with told():
        if as_json:
            place = output or Path("sweeps") / ground_of(study).study({}).name
            found = swept(
                study, change, folder=place, seeds=seeds, parallel=parallel,
                tell=lambda news: print(json.dumps(asdict(news)), flush=True),
            )  # fmt: skip
        else:
            found = follow_sweep(study, change or (), folder=output, seeds=seeds, parallel=parallel)
    if found.failures:
        raise typer.Exit(1)


def compare(
    places: Annotated[list[Path], typer.Argument(help="Folders of runs, and of sweeps.")],
    score: Annotated[
        str, typer.Option(help="The number to compare by: world.loss; else the task's own score.")
    ] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: plain numbers.")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Write one page with figures into this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs by their scores: groups that differ only in seed, each against the first.

    Prints Markdown: means with intervals over seeds, differences paired by seed with p values
    corrected for many comparisons, bytes, epsilon, time, and what differs in words.
    """
    from fedplan.storage.files import put_file
    from fedplan.sweeps.comparisons import compare as compared

    with told():
        if as_csv and as_json:
            raise FedplanError("--csv and --json are two ways to print one thing: give one of them")
        found = compared(places, score=score)
        if html is not None:
            put_file(html, found.html())
        if as_json:
            print(json.dumps(found.json(), indent=1))
        elif as_csv:
            print(found.csv(), end="")
        elif html is not None:
            Console(soft_wrap=True, highlight=False).print(f"Written: {html}", markup=False)
        else:
            print(found.markdown(), end="")


def rehearse(
    study: StudyFile,
    methods: Annotated[
        str, typer.Option(help="Names with commas: fedavg,fedper; else the study's own.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="How many are played of each.", min=1)] = 2,
    line: Annotated[
        str, typer.Option(help="How fast a site's line is: 10Mbit, 100Mbit, 1Gbit.")
    ] = "100Mbit",
    as_json: Json = False,
) -> None:
    """Play a few rounds of each method here, and say what the whole study would cost under it.

    A price list: the score so far, bytes, epsilon, time and memory. Nothing is kept.
    """
    from fedplan.sweeps.rehearsals import rehearse as rehearsed

    with told():
        with Console(stderr=True).status("Rehearsing"):
            found = rehearsed(study, methods or (), rounds=rounds, line=line)
        print(json.dumps(found.json(), indent=1) if as_json else found.markdown().rstrip())
    if any(price.error for price in found.prices):
        raise typer.Exit(1)
