# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a run: to begin, how it stands, to stop, its rounds and its log."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import Json, JsonLines, finite, print_json, told
from fedplan.errors import FedplanError

RunFolder = Annotated[Path, typer.Argument(help="The folder of a run.")]


def run(
    study: Annotated[Path, typer.Argument(help="A study file (TOML), or the folder of a run.")],
    change: Annotated[
        list[str] | None, typer.Option("--set", help="Override a field: train.rounds=5.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Where the run is kept.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run.")] = False,
    continue_from: Annotated[
        str,
        typer.Option(help="An earlier run's folder or id: begin with what clients kept there."),
    ] = "",
    runner: Annotated[
        str,
        typer.Option(
            help="local: here, one client after the other; pool or ray: by workers, many at once; "
            "flower: by the sites of a federation."
        ),
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="For pool and ray: how many; else a core each.")
    ] = None,
    gpus_per_worker: Annotated[
        float, typer.Option(help="For ray: what each worker has of a GPU.")
    ] = 0.0,
    ray_address: Annotated[
        str, typer.Option(help="For ray: a cluster's address; else Ray is started here.")
    ] = "",
    server: Annotated[
        Path, typer.Option(help="For flower: the folder of the federation's server.")
    ] = Path("server"),
    metrics_port: Annotated[
        int | None, typer.Option(help="Answer /metrics and /health here, on this machine.")
    ] = None,
    webhook: Annotated[
        list[str] | None, typer.Option(help="An address that is told of trouble; repeat it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a study. Stop it at any moment: --resume goes on with the same bits.

    With --json its rounds go to stderr, and how the run stands at its end to stdout.
    """
    from fedplan.reports.operation import Operation
    from fedplan.reports.progress import follow, follow_flower
    from fedplan.reports.status import status_of
    from fedplan.runners.crews.workers import workers_of
    from fedplan.studies.continuation import open_study

    with told():
        watched = Operation(metrics_port, tuple(webhook or ()))
        console = Console(highlight=False, stderr=as_json)
        opened = open_study(study, change or [], output, resume=resume, earlier=continue_from)
        if runner == "flower":
            watched = replace(watched, certificates=server.absolute().parent)
            follow_flower(*opened, server=server, operation=watched, console=console)
        elif runner in ("local", "pool", "ray"):
            hired = workers_of(runner, workers, gpus_per_worker, ray_address)
            follow(
                *opened, earlier=continue_from, operation=watched, workers=hired, console=console
            )
        else:
            raise FedplanError(f"--runner is local, pool, ray or flower, not {runner!r}")
        if as_json:
            print_json({"folder": str(opened[1]), **status_of(opened[1]).json()})


def status(
    folder: RunFolder,
    as_json: JsonLines = False,
    follow: Annotated[bool, typer.Option("--watch", help="Again and again, to its end.")] = False,
) -> None:
    """Say how a run stands: round, loss, time left, and each site with its last fault."""
    from rich.live import Live

    from fedplan.reports.status import screen, status_of, watch

    with told():
        if as_json:
            for found in watch(folder) if follow else [status_of(folder)]:
                print(json.dumps(finite(found.json())), flush=True)
        elif follow:
            with Live(console=screen(), refresh_per_second=2) as live:
                try:
                    for found in watch(folder):
                        live.update(found)
                except KeyboardInterrupt:
                    raise typer.Exit(0) from None
        else:
            screen().print(status_of(folder))


def stop(
    folder: RunFolder,
    now: Annotated[
        bool, typer.Option("--now", help="Without the open round, which is asked again later.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a run to end after its open round. --resume goes on with the same bits."""
    from fedplan.reports.status import stop_run

    with told():
        found = stop_run(folder, at_once=now)
    if as_json:
        return print_json({"asked": "now" if now else "round", **found.json()})
    when = "at once" if now else f"after round {min(found.round + 1, found.told.rounds)}"
    words = f"Asked to stop {when}. See it end: fedplan attach {folder}"
    Console(soft_wrap=True, highlight=False).print(words, markup=False)


def attach(folder: RunFolder, as_json: Json = False) -> None:
    """Follow a run's rounds to its end, as `run` tells them. Ctrl-C leaves the run alone."""
    from fedplan.reports.status import attach as attached

    console = Console(highlight=False, stderr=as_json)
    with told():
        try:
            found = attached(folder, console.print)
        except KeyboardInterrupt:
            console.print(f"No longer followed; the run in {folder} goes on.", markup=False)
            raise typer.Exit(130) from None
        if as_json:
            return print_json(found.json())
        why = f": {found.told.why}" if found.told.why else ""
        console.print(f"It is {found.state}, after round {found.round}{why}.", markup=False)


def logs(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, or a site's home.")],
    site: Annotated[str, typer.Option(help="Only what is of this site.")] = "",
    since: Annotated[
        str, typer.Option(help="From then on: 10m, 2h, 3d, or a time as 2026-11-16T09:00.")
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="And each line as it comes.")] = False,
    as_json: JsonLines = False,
) -> None:
    """Print what happened in a run, or at a site: time, round, site, event and words."""
    from fedplan.reports.log_lines import log_line, moment
    from fedplan.storage.logs import follow_log, read_log

    console = Console(highlight=False, soft_wrap=True)
    with told():
        lines = (follow_log if follow else read_log)(folder, site=site, since=moment(since))
        found = False
        try:
            for entry in lines:
                found = True
                if as_json:
                    print(json.dumps(asdict(entry)), flush=True)
                else:
                    console.print(log_line(entry))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        if site and not found:
            there = sorted({entry.site for entry in read_log(folder)} - {""})
            raise FedplanError(f"no line is of {site!r} then; lines are of {', '.join(there)}")
