# SPDX-License-Identifier: Apache-2.0
"""Commands to operate a run: run, status, stop, attach and logs."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.console import (
    JsonLinesOption,
    JsonOption,
    print_errors,
    print_json,
    replace_nonfinite,
)
from fedplan.errors import FedplanError

RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]


def run_command(
    study: Annotated[Path, typer.Argument(help="A study file (TOML), or the folder of a run.")],
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a field of the study: train.rounds=5; repeatable."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run; default: runs/ and the study's name.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in its folder.")] = False,
    continue_from: Annotated[
        str,
        typer.Option(
            help="Folder or id of an earlier run: start from its clients' personal parameters."
        ),
    ] = "",
    runner: Annotated[
        str,
        typer.Option(
            help="local: simulate clients one after another; pool or ray: simulate in parallel "
            "workers; flower: train at real sites."
        ),
    ] = "local",
    workers: Annotated[
        int | None, typer.Option(help="For pool and ray: number of workers; default: one per core.")
    ] = None,
    gpus_per_worker: Annotated[
        float, typer.Option(help="For ray: fraction of a GPU per worker.")
    ] = 0.0,
    ray_address: Annotated[
        str, typer.Option(help="For ray: address of a cluster; default: start Ray here.")
    ] = "",
    server: Annotated[
        Path, typer.Option(help="For flower: folder of the federation's server.")
    ] = Path("server"),
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics and /health on this port of localhost.")
    ] = None,
    webhook: Annotated[
        list[str] | None, typer.Option(help="URL that is notified of problems; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a study. It can be stopped at any moment; --resume continues with identical results.

    With --json, rounds are printed to stderr and the final status to stdout.
    """
    from fedplan.reports.monitoring import MonitoringConfig
    from fedplan.reports.progress import run_flower_with_progress, run_with_progress
    from fedplan.reports.status import run_snapshot
    from fedplan.runners.executors.config import make_pool_config
    from fedplan.studies.resume import open_study

    with print_errors():
        monitoring = MonitoringConfig(metrics_port, tuple(webhook or ()))
        console = Console(highlight=False, stderr=as_json)
        opened_study, folder = open_study(
            study, change or [], output, resume=resume, earlier=continue_from
        )
        if runner == "flower":
            monitoring = replace(monitoring, certificates=server.absolute().parent)
            run_flower_with_progress(
                opened_study, folder, server=server, monitoring=monitoring, console=console
            )
        elif runner in ("local", "pool", "ray"):
            pool = make_pool_config(runner, workers, gpus_per_worker, ray_address)
            run_with_progress(
                opened_study,
                folder,
                earlier=continue_from,
                monitoring=monitoring,
                workers=pool,
                console=console,
            )
        else:
            raise FedplanError(f"--runner must be local, pool, ray or flower, not {runner!r}")
        if as_json:
            print_json({"folder": str(folder), **run_snapshot(folder).json()})


def status_command(
    folder: RunFolder,
    as_json: JsonLinesOption = False,
    refresh: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False,
) -> None:
    """Print the status of a run: round, loss, time left, and each site with its last error."""
    from rich.live import Live

    from fedplan.reports.status import make_console, run_snapshot, watch

    with print_errors():
        if as_json:
            for snapshot in watch(folder) if refresh else [run_snapshot(folder)]:
                print(json.dumps(replace_nonfinite(snapshot.json())), flush=True)
        elif refresh:
            with Live(console=make_console(), refresh_per_second=2) as live:
                try:
                    for snapshot in watch(folder):
                        live.update(snapshot)
                except KeyboardInterrupt:
                    raise typer.Exit(0) from None
        else:
            make_console().print(run_snapshot(folder))


def stop_command(
    folder: RunFolder,
    now: Annotated[
        bool, typer.Option("--now", help="Abort the open round; --resume repeats it.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask a run to stop after its open round. --resume continues with identical results."""
    from fedplan.reports.status import stop_run

    with print_errors():
        snapshot = stop_run(folder, at_once=now)
    if as_json:
        return print_json({"stop": "now" if now else "after_round", **snapshot.json()})
    when = "at once" if now else f"after round {min(snapshot.round + 1, snapshot.status.rounds)}"
    message = f"Asked to stop {when}. Watch it end: fedplan attach {folder}"
    Console(soft_wrap=True, highlight=False).print(message, markup=False)


def attach_command(folder: RunFolder, as_json: JsonOption = False) -> None:
    """Follow a run's rounds to its end. Ctrl-C stops following, not the run."""
    from fedplan.reports.status import follow_run

    console = Console(highlight=False, stderr=as_json)
    with print_errors():
        try:
            snapshot = follow_run(folder, console.print)
        except KeyboardInterrupt:
            console.print(f"Stopped following; the run in {folder} continues.", markup=False)
            raise typer.Exit(130) from None
        if as_json:
            return print_json(snapshot.json())
        reason = f": {snapshot.status.reason}" if snapshot.status.reason else ""
        console.print(
            f"The run is {snapshot.state}, after round {snapshot.round}{reason}.", markup=False
        )


def logs_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or a site's state folder.")],
    site: Annotated[str, typer.Option(help="Only events of this site.")] = "",
    since: Annotated[
        str,
        typer.Option(help="Only events since then: 10m, 2h, 3d, or a time as 2026-11-16T09:00."),
    ] = "",
    follow: Annotated[bool, typer.Option("--follow", help="Keep printing new events.")] = False,
    as_json: JsonLinesOption = False,
) -> None:
    """Print the events of a run or of a site: time, round, site, event and text."""
    from fedplan.reports.log_lines import format_log_entry, parse_since
    from fedplan.storage.logs import follow_log, read_log

    console = Console(highlight=False, soft_wrap=True)
    with print_errors():
        entries = (follow_log if follow else read_log)(folder, site=site, since=parse_since(since))
        any_entry = False
        try:
            for entry in entries:
                any_entry = True
                if as_json:
                    print(json.dumps(asdict(entry)), flush=True)
                else:
                    console.print(format_log_entry(entry))
        except KeyboardInterrupt:
            raise typer.Exit(0) from None
        if site and not any_entry:
            sites = sorted({entry.site for entry in read_log(folder)} - {""})
            raise FedplanError(
                f"no event of {site!r} in that time; there are events of {', '.join(sites)}"
            )
