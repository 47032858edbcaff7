# SPDX-License-Identifier: Apache-2.0
"""The `fedplan` command: all subcommands, with examples."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan import __version__
from fedplan.audit_commands import (
    attack_command,
    egress_command,
    export_command,
    faults_command,
    privacy_command,
    verify_command,
)
from fedplan.console import (
    Group,
    JsonOption,
    SitesOption,
    command,
    command_group,
    print_errors,
    print_json,
)
from fedplan.model_commands import (
    draw_command,
    explain_command,
    methods_command,
    parts_command,
    propose_command,
)
from fedplan.operation_commands import (
    attach_command,
    logs_command,
    run_command,
    status_command,
    stop_command,
)
from fedplan.report_commands import report_command
from fedplan.server_commands import server_commands
from fedplan.site_commands import site_commands
from fedplan.study_commands import data_command, digest_command, study_command
from fedplan.sweep_commands import compare_command, sweep_command

app = typer.Typer(
    help="Federated fine-tuning of Transformers: plan which part each client trains and shares.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
new_commands = command_group("Write a study file, or the folders of a federation.")


def _print_version(requested: bool) -> None:
    """Print the version and exit, if --version was given."""
    if requested:
        print(f"fedplan {__version__}")
        raise typer.Exit


@app.callback()
def main_callback(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Federated fine-tuning of Transformers: plan which part each client trains and shares."""


command(app, "parts vit-base-16")(parts_command)
command(
    app,
    "explain vit-base-16 'chain(share(), keep(head))'",
    "explain bert-base --method fedfrozen --setting warmup=5",
    "explain study.toml",
)(explain_command)
command(app, "propose granite")(propose_command)
command(app, "draw vit-base-16 'chain(share(), keep(head))' roles.svg")(draw_command)
command(app, "methods", "methods fedper")(methods_command)
command(app, "data study.toml", "data study.toml --svg who.svg")(data_command)
command(app, "digest study.toml")(digest_command)
command(
    app, "run study.toml --output run", "run study.toml --set train.rounds=5", "run run --resume"
)(run_command)
command(app, "status run", "status run --watch")(status_command)
command(app, "stop run")(stop_command)
command(app, "attach run")(attach_command)
command(app, "logs run --since 10m --follow")(logs_command)
command(app, "verify run")(verify_command)
command(app, "report run -o report.html", "report state -o compliance.html")(report_command)
command(app, "sweep study.toml --set method.name=fedavg,fedper --seeds 3 -o sweep")(sweep_command)
command(app, "compare sweep", "compare sweep --html comparison.html")(compare_command)
command(app, "export run model", "export run model-of-north --client north")(export_command)
command(app, "privacy study.toml", "privacy run")(privacy_command)
command(app, "egress state")(egress_command)
command(app, "faults state --key state.key")(faults_command)
command(app, "attack --clients 8")(attack_command)


@command(app, "keys federation --host fl.example.org --site north --site south")
def keys_command(
    folder: Annotated[Path, typer.Argument(help="Folder of the keys, or of a federation.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Host name or address of the server; repeatable.")
    ] = None,
    site: SitesOption = None,
    days: Annotated[int, typer.Option(help="Validity of the server's certificate, in days.")] = 365,
    as_json: JsonOption = False,
) -> None:
    """Create the missing keys of a federation. Existing files are kept: repeat it to add sites."""
    with print_errors():
        from fedplan.runners.flower.keys import make_keys

        files = list(map(str, make_keys(folder, host or [], site or [], days)))
    if as_json:
        return print_json({"files": files})
    for path in files:
        print(path)


command(
    new_commands,
    "new study reviews.csv --model ./model",
    "new study scans.parquet --model vit-base-16 --client hospital -o scans.toml",
)(study_command)


@command(new_commands, "new federation ward --site north --site south --host fl.example.org")
def federation_command(
    folder: Annotated[Path, typer.Argument(help="Folder to write: new or empty.")],
    site: SitesOption = None,
    host: Annotated[str, typer.Option(help="Host name or address of the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="Port of the server for the sites.")] = 9100,
    inner: Annotated[
        int, typer.Option(help="Internal port of the SuperLink; 0: the next after --port.")
    ] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="For this machine only: without TLS and keys.")
    ] = False,
    no_keys: Annotated[
        bool, typer.Option("--no-keys", help="Do not create keys: bring your own.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the folders of a federation: the server and its sites. Start with its README."""
    with print_errors():
        from fedplan.runners.flower.starter import new_federation

        new_federation(
            folder,
            site or [],
            host=host,
            port=port,
            inner=inner,
            insecure=insecure,
            keys=not no_keys,
        )
    if as_json:
        return print_json({"folder": str(folder), "readme": str(folder / "README.md")})
    Console(soft_wrap=True).print(f"Written. Continue with {folder / 'README.md'}", highlight=False)


@command(new_commands, "new site west --federation ward")
def site_command(
    name: Annotated[str, typer.Argument(help="Name of the site.")],
    federation: Annotated[Path, typer.Option(help="Folder of the federation.")] = Path(),
    as_json: JsonOption = False,
) -> None:
    """Add the folder of one more site to a federation."""
    with print_errors():
        from fedplan.runners.flower.starter import new_site

        new_site(federation, name)
    site_folder = federation / "sites" / name
    if as_json:
        return print_json({"folder": str(site_folder)})
    print(f"Written. Copy {site_folder} to the site, and follow its README.")


app.add_typer(new_commands, name="new")
app.add_typer(server_commands, name="server")
app.add_typer(site_commands, name="site")


def main() -> None:
    """Run the `fedplan` command and exit with its status."""
    sys.exit(app())
