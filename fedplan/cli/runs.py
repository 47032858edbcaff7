# SPDX-License-Identifier: Apache-2.0
"""Commands of a run: run, status, stop, attach, logs, verify, evaluate and report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.cli.console import (
    JsonLinesOption,
    JsonOption,
    app,
    command,
    outlive_viewer,
    print_errors,
    print_json,
    print_lines,
    print_result,
    replace_nonfinite,
)
from fedplan.errors import FedplanError, printable

RunFolder = Annotated[Path, typer.Argument(help="Folder of a run.")]


@command(
    app, "run study.toml --output run", "run study.toml --set train.rounds=5", "run run --resume"
)
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
    same_environment: Annotated[
        bool,
        typer.Option(
            "--same-environment",
            help="With --resume: refuse other versions, device or threads than the run had.",
        ),
    ] = False,
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
        int | None,
        typer.Option(help="For pool and ray: number of workers; default: one per GPU or core."),
    ] = None,
    gpus_per_worker: Annotated[
        float, typer.Option(help="For ray: fraction of a GPU per worker.")
    ] = 0.0,
    ray_address: Annotated[
        str, typer.Option(help="For ray: address of a cluster; default: start Ray here.")
    ] = "",
    devices_per_client: Annotated[
        int,
        typer.Option(
            min=1, help="For local: number of GPUs that train each client's model together."
        ),
    ] = 1,
    server: Annotated[
        Path, typer.Option(help="For flower: folder of the federation's server.")
    ] = Path("server"),
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve /metrics and /health on this port of localhost.")
    ] = None,
    strict: Annotated[
        bool,
        typer.Option("--strict", help="Treat warnings as errors: exit code 1, or no run at all."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a study. It can be stopped at any moment; --resume continues with identical results.

    A closed pipe or terminal ends the display, not the run.

    Warnings name reasons to doubt the result, each with its remedy. With --strict the run does not
    start if some are known before, and the exit code is 1 if there are any at its end. With --json,
    rounds are printed to stderr and the final status with all warnings to stdout. A run in which no
    update was aggregated has failed: its exit code is 1.
    """
    from fedplan.federation.ledger.status import RunState
    from fedplan.reports.progress import run_flower_with_progress, run_with_progress
    from fedplan.reports.status import run_snapshot
    from fedplan.runners.executors.executor import make_pool_config
    from fedplan.studies.resume import open_study

    with outlive_viewer(), print_errors():
        console = Console(highlight=False, stderr=as_json)
        opened_study, folder = open_study(
            study,
            change or [],
            output,
            resume=resume,
            earlier=continue_from,
            same_environment=same_environment,
        )
        if runner == "flower":
            if devices_per_client > 1:
                raise FedplanError(
                    "--devices-per-client is for simulations: a site sets devices_per_client in "
                    "its site.toml"
                )
            warnings = run_flower_with_progress(
                opened_study,
                folder,
                server=server,
                metrics_port=metrics_port,
                console=console,
                strict=strict,
            )
        elif runner in ("local", "pool", "ray"):
            pool = make_pool_config(runner, workers, gpus_per_worker, ray_address)
            warnings = run_with_progress(
                opened_study,
                folder,
                earlier=continue_from,
                metrics_port=metrics_port,
                workers=pool,
                devices_per_client=devices_per_client,
                console=console,
                strict=strict,
            )
        else:
            raise FedplanError(f"--runner must be local, pool, ray or flower, not {runner!r}")
        snapshot = run_snapshot(folder)
        if as_json:
            status = {"folder": str(folder), **snapshot.json()}
            print_json({**status, "warnings": [warning.json() for warning in warnings]})
    if snapshot.state == RunState.FAILED or (strict and warnings):
        raise typer.Exit(1)


@command(app, "status run", "status run --watch")
def status_command(
    folder: RunFolder,
    as_json: JsonLinesOption = False,
    refresh: Annotated[bool, typer.Option("--watch", help="Refresh until the run ends.")] = False,
) -> None:
    """Print the status of a run: round, loss, time left, warnings, and each site's last error."""
    from rich.live import Live

    from fedplan.reports.plan_warnings import warnings_text
    from fedplan.reports.status import make_console, run_snapshot, snapshot_warnings, watch

    with print_errors():
        if as_json:
            for snapshot in watch(folder) if refresh else [run_snapshot(folder)]:
                # While it is watched, a run in progress is not read from its start each second.
                skip = refresh and snapshot.live and snapshot.warnings is None
                warnings = () if skip else snapshot_warnings(snapshot)
                status = {**snapshot.json(), "warnings": [each.json() for each in warnings]}
                print(json.dumps(replace_nonfinite(status)), flush=True)
            return
        console, snapshot = make_console(), run_snapshot(folder)
        if refresh:
            with Live(console=console, refresh_per_second=2) as live:
                try:
                    for snapshot in watch(folder):
                        live.update(snapshot)
                except KeyboardInterrupt:
                    raise typer.Exit(0) from None
        else:
            console.print(snapshot)
        for text in warnings_text(snapshot_warnings(snapshot)):
            console.print(text, soft_wrap=True)


@command(app, "stop run")
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
    when = "at once" if now else f"after round {min(snapshot.round + 1, snapshot.status.rounds)}"
    text = f"Asked to stop {when}. Watch it end: fedplan attach {folder}"
    value = {"stop": "now" if now else "after_round", **snapshot.json()}
    print_result(value, text, as_json=as_json)


@command(app, "attach run")
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


@command(app, "logs run --since 10m --follow")
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
    from fedplan.reports.formats import format_log_entry, parse_since
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


@command(app, "verify run", "verify run --repair")
def verify_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a run.")],
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Restore damaged files of a simulation: run rounds again."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Verify a run: frozen tensors unchanged, trained ones moved, private ones not sent.

    The exit code is 1 if a check fails. A tensor that was trained and did not move is listed, and
    is no failure: its gradient may be zero.
    """
    from fedplan.audits.run import audit_run

    with print_errors():
        if repair:
            from fedplan.audits.repair import repair_run

            restored = repair_run(folder)
            if not as_json:
                print("\n".join(f"Restored: {name}" for name in restored) or "Nothing is damaged.")
        audit = audit_run(folder)
    faults, summary, unmoved = list(audit.faults), audit.summary, list(audit.unmoved)
    if as_json:
        passed = not faults
        print_json({"passed": passed, "faults": faults, "summary": summary, "unmoved": unmoved})
    else:
        console = Console(stderr=bool(faults))
        for fault in faults[:20]:
            console.print(fault, style="red", markup=False)
        if len(faults) > 20:
            console.print(f"and {len(faults) - 20} more: --json lists all")
        console.print(summary, markup=False)
    if faults:
        raise typer.Exit(1)


@command(app, "evaluate run", "evaluate run --predictions predictions.csv")
def evaluate_command(
    folder: RunFolder,
    client: Annotated[str, typer.Option(help="Evaluate on one client's examples only.")] = "",
    predictions: Annotated[
        Path | None, typer.Option(help="CSV file to write, with a row for each prediction.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate a run's models on all test examples again, from its folder and its study's files.

    Prints the test scores of the report, with 95 % bootstrap intervals.
    """
    from fedplan.reports.pages.test_scores import evaluation_lines
    from fedplan.studies.evaluation import evaluate_run

    with print_errors():
        evaluated = evaluate_run(folder, client)
        tables = evaluated.tables()
        count = evaluated.write_csv(predictions) if predictions else 0
    written = [f"Written: {predictions} ({count:,} predictions)"] if predictions else []
    print_result(tables, *evaluation_lines(tables), *written, as_json=as_json)


@command(app, "report run -o report.html", "report state -o compliance.html")
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
    png: Annotated[Path | None, typer.Option(help="Folder for each figure as PNG.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Write one HTML file that reports on runs, or on the data that left a site.

    The file is self-contained: open it in any browser, without a server or network. The exit code
    is 1 if the compliance report of a site lists faults.
    """
    from fedplan.sites.compliance_report import compliance_page
    from fedplan.sites.egress import is_site_state

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
        print_lines(f"Written: {output}" + (f"; it lists {len(faults)} faults" if faults else ""))
    if faults:
        raise typer.Exit(1)


def _report_runs(
    runs: Sequence[Path], output: Path, watch: float, csv: Path | None, png: Path | None
) -> None:
    """Write the HTML report of runs to `output`, once or every `watch` seconds until the runs end.

    Folders of sweeps stand for their runs. `csv` and `png` are folders for the numbers and images
    of the figures. Ctrl-C while watching raises typer.Exit(0).
    """
    from fedplan.reports.pages.run_report import report, watch_report
    from fedplan.sweeps.records import is_sweep
    from fedplan.sweeps.results import find_run_folders

    if any(map(is_sweep, runs)):
        runs, notes = find_run_folders(runs)
        for note in notes:
            Console(stderr=True, soft_wrap=True).print(f"Note: {printable(note)}.", markup=False)
    if not watch:
        report(runs, output, csv=csv, png=png)
        return
    try:
        for _ in watch_report(runs, output, watch, csv=csv, png=png):
            pass
    except KeyboardInterrupt:
        raise typer.Exit(0) from None
