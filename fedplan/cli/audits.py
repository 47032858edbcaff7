# SPDX-License-Identifier: Apache-2.0
"""Commands about what leaves a run or a site: export, privacy, egress and faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan.cli.console import JsonOption, app, command, print_errors, print_json, print_result


@command(
    app,
    "export run model",
    "export run model --global",
    "export run model-of-north --client north",
    "export run adapters --all-clients --adapters",
)
def export_command(
    folder: Annotated[Path, typer.Argument(help="Folder of a run, or of a site's experiment.")],
    output: Annotated[Path, typer.Argument(help="Folder to write: new or empty.")],
    client: Annotated[
        str, typer.Option(help="Export this client's personal model instead of the global model.")
    ] = "",
    global_model: Annotated[
        bool,
        typer.Option(
            "--global", help="Export the global model although clients keep parts of their own."
        ),
    ] = False,
    key: Annotated[
        Path | None, typer.Option(help="At a site: key file of its encrypted state.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", "--adapters", help="Write only the peft adapter.")
    ] = False,
    all_clients: Annotated[
        bool,
        typer.Option(
            "--all-clients",
            help="With --adapters: the shared adapter, each client's, and a manifest.json.",
        ),
    ] = False,
    best: Annotated[
        bool,
        typer.Option("--best", help="Export the best round (the study sets evaluate.keep_best)."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model of a run as a Hugging Face folder: safetensors, configuration, model card.

    If clients keep parts of their own, name one by --client, or take --global. An engine that
    serves many adapters on one base model takes --all-clients --adapters.
    """
    from fedplan.studies.export import export_run
    from fedplan.studies.model_card import describe_export

    with print_errors():
        loading_code = export_run(
            folder,
            output,
            client,
            key,
            adapter=adapter,
            best=best,
            global_model=global_model,
            all_clients=all_clients,
        )
        about = describe_export(folder, client, best=best)
    value = {"folder": str(output), "loading_code": loading_code, "about": about}
    lines = (f"Written: {output}", *about, f"Load it: {loading_code}")
    print_result(value, *lines, as_json=as_json)


@command(app, "privacy study.toml", "privacy run")
def privacy_command(
    place: Annotated[Path, typer.Argument(help="A study file (TOML), or the folder of a run.")],
    as_json: JsonOption = False,
) -> None:
    """Print the differential-privacy guarantee of a study, or the epsilon that a run has spent.

    Lists what the guarantee does not cover, too.
    """
    from fedplan.reports.study_explanation import read_privacy_statement

    with print_errors():
        statement = read_privacy_statement(place)
        print_result(statement.json(), statement.text(), as_json=as_json)


@command(app, "egress state")
def egress_command(
    folder: Annotated[Path, typer.Argument(help="A site's state folder.")],
    as_json: JsonOption = False,
) -> None:
    """At a site: list the bytes that left the site, by round and part, and the agreed plan.

    The site's egress log is verified first; if its hash chain is broken, only that is reported.
    """
    from fedplan.sites.egress import read_egress_report

    with print_errors():
        reports = read_egress_report(folder)
    if as_json:
        return print_json([report.json() for report in reports])
    for report in reports:
        # Never cut a column: a table of bytes must be complete.
        Console(width=max(Console().width, report.width)).print(report)


@command(app, "faults state --key state.key")
def faults_command(
    folder: Annotated[Path, typer.Argument(help="A site's state folder.")],
    key: Annotated[
        Path | None, typer.Option(help="Key file of the site's state, if it is encrypted.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """At a site: print its errors in full. The server has received only an error code for each."""
    from fedplan.federation.ledger.faults import read_faults
    from fedplan.storage.encryption import Encryption

    with print_errors():
        faults = list(read_faults(folder, Encryption.from_file(key) if key else None))
        print_result(faults, *faults, as_json=as_json)
