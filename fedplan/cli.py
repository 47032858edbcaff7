# SPDX-License-Identifier: Apache-2.0
"""The command line: what a person asks of fedplan, each a short function with an example."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedplan import __version__
from fedplan.audit_commands import attack, egress, export, faults, privacy, verify
from fedplan.console import Group, Json, Sites, command, group, print_json, told
from fedplan.model_commands import draw, explain, methods, parts, propose
from fedplan.operation_commands import attach, logs, run, status, stop
from fedplan.report_commands import report
from fedplan.server_commands import server_commands
from fedplan.site_commands import site_commands
from fedplan.study_commands import data, digest, study
from fedplan.sweep_commands import compare, rehearse, sweep

app = typer.Typer(
    help="Say which part of a Transformer each client trains, shares and keeps, round by round.",
    cls=Group,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
new = group("Write a study or a folder to start from.")


def _version(asked: bool) -> None:
    if asked:
        print(f"fedplan {__version__}")
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool,
        typer.Option("--version", help="Say the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Say which part of a Transformer each client trains, shares and keeps, round by round."""


command(app, "parts vit-base-16")(parts)
command(
    app,
    "explain vit-base-16 'chain(share(), keep(head))'",
    "explain bert-base --method fedfrozen --setting warmup=5",
    "explain study.toml",
)(explain)
command(app, "propose granite")(propose)
command(app, "draw vit-base-16 'chain(share(), keep(head))' roles.svg")(draw)
command(app, "methods", "methods fedper")(methods)
command(app, "data study.toml", "data study.toml --svg who.svg")(data)
command(app, "digest study.toml")(digest)
command(
    app, "run study.toml --output run", "run study.toml --set train.rounds=5", "run run --resume"
)(run)
command(app, "status run", "status run --watch")(status)
command(app, "stop run")(stop)
command(app, "attach run")(attach)
command(app, "logs run --since 10m --follow")(logs)
command(app, "verify run")(verify)
command(app, "report run -o report.html", "report home -o officer.html")(report)
command(app, "sweep study.toml --set method.name=fedavg,fedper --seeds 3 -o sweep")(sweep)
command(app, "compare sweep", "compare sweep --html comparison.html")(compare)
command(app, "rehearse study.toml --methods fedavg,fedper --rounds 2")(rehearse)
command(app, "export run model", "export run model-of-north --client north")(export)
command(app, "privacy study.toml", "privacy run")(privacy)
command(app, "egress home")(egress)
command(app, "faults home --key home.key")(faults)
command(app, "attack --clients 8")(attack)


@command(app, "keys federation --host fl.example.org --site north --site south")
def keys(
    folder: Annotated[Path, typer.Argument(help="The folder of the keys, or of a federation.")],
    host: Annotated[
        list[str] | None, typer.Option(help="How sites reach the server: a name or an address.")
    ] = None,
    site: Sites = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate lasts.")] = 365,
    as_json: Json = False,
) -> None:
    """Make the keys that a federation lacks. Nothing is overwritten: call it again to add sites."""
    with told():
        from fedplan.runners.flower.keys import make_keys

        made = list(map(str, make_keys(folder, host or [], site or [], days)))
    if as_json:
        return print_json({"files": made})
    for path in made:
        print(path)


command(
    new,
    "new study reviews.csv --model ./model",
    "new study scans.parquet --model vit-base-16 --client hospital -o scans.toml",
)(study)


@command(new, "new federation ward --site north --site south --host fl.example.org")
def federation(
    folder: Annotated[Path, typer.Argument(help="The folder to write, empty or new.")],
    site: Sites = None,
    host: Annotated[str, typer.Option(help="How sites reach the server.")] = "localhost",
    port: Annotated[int, typer.Option(help="Where they reach it.")] = 9100,
    inner: Annotated[int, typer.Option(help="The SuperLink's own port; 0 is the next.")] = 0,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="On this machine alone, without TLS and keys.")
    ] = False,
    no_keys: Annotated[bool, typer.Option("--no-keys", help="Without keys: bring yours.")] = False,
    as_json: Json = False,
) -> None:
    """Write all that a federation of real sites is started from. Its README says what to do."""
    with told():
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
    Console(soft_wrap=True).print(f"Written. Go on with {folder / 'README.md'}", highlight=False)


@command(new, "new site west --federation ward")
def site(
    name: Annotated[str, typer.Argument(help="The name of the site.")],
    federation: Annotated[Path, typer.Option(help="The folder of the federation.")] = Path(),
    as_json: Json = False,
) -> None:
    """Write the folder of one more site of a federation."""
    with told():
        from fedplan.runners.flower.starter import new_site

        new_site(federation, name)
    written = federation / "sites" / name
    if as_json:
        return print_json({"folder": str(written)})
    print(f"Written. Bring {written} to the site; its README says the rest.")


app.add_typer(new, name="new")
app.add_typer(server_commands, name="server")
app.add_typer(site_commands, name="site")


def main() -> None:
    """The entry point of the `fedplan` command."""
    sys.exit(app())
