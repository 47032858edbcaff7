# SPDX-License-Identifier: Apache-2.0
"""Commands of a federation's operator: new federation, new site, keys and server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedplan.cli.console import (
    JsonOption,
    SitesOption,
    StudyArgument,
    app,
    command,
    command_group,
    outlive_viewer,
    print_errors,
    print_result,
)
from fedplan.cli.studies import new_commands

server_commands = command_group("server", "Run the server of a federation, and register its sites.")
ServerOption = Annotated[Path, typer.Option("--server", help="Folder of the server.")]


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
    print_result({"files": files}, *files, as_json=as_json)


@command(new_commands, "new federation ward --site north --site south --host fl.example.org")
def federation_command(
    folder: Annotated[Path, typer.Argument(help="Folder to write: new or empty.")],
    site: SitesOption = None,
    host: Annotated[str, typer.Option(help="Host name or address of the server.")] = "localhost",
    port: Annotated[
        int, typer.Option(help="Port for the sites; 0: from 9100 to 9998, by the folder's name.")
    ] = 0,
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
    readme = str(folder / "README.md")
    value = {"folder": str(folder), "readme": readme}
    print_result(value, f"Written. Continue with {readme}", as_json=as_json)


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
    text = f"Written. Copy {site_folder} to the site, and follow its README."
    print_result({"folder": str(site_folder)}, text, as_json=as_json)


@command(app, "statistics study.toml --server server")
def statistics_command(
    study: StudyArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="JSON file to write.")] = Path(
        "statistics.json"
    ),
    server: ServerOption = Path("server"),
    as_json: JsonOption = False,
) -> None:
    """Ask the sites of a study for counts of their data, by its data dictionary.

    A site answers an approved study if its policy allows counts, and each column once. Exit code 1:
    a site has not answered, or a column does not match the dictionary.
    """
    with outlive_viewer(), print_errors():
        from fedplan.runners.flower.statistics import statistics_on_superlink
        from fedplan.runners.flower.superlink import read_superlink
        from fedplan.storage.files import write_atomic
        from fedplan.studies.schema import read_study

        result = statistics_on_superlink(read_superlink(server.absolute()), read_study(study))
        write_atomic(output, json.dumps(result.json(), indent=1) + "\n")
    print_result(result.json(), *result.lines(), f"Written: {output}", as_json=as_json)
    if result.missing or any(result.mismatches.values()):
        raise typer.Exit(1)


@command(server_commands, "server link --server server")
def link_command(server: ServerOption = Path("server")) -> None:
    """Run Flower's SuperLink. Only users who can read the operator's token may control it."""
    with outlive_viewer(), print_errors():
        from fedplan.runners.flower.superlink import run_superlink

        run_superlink(server.absolute())


@command(server_commands, "server edge --server east/server --site sites/east")
def edge_command(
    server: ServerOption = Path("server"),
    site: Annotated[
        Path, typer.Option(help="Folder with the site.toml by which the edge is a site.")
    ] = Path(),
) -> None:
    """Serve an edge: sum the updates of the sites of --server for the server above."""
    with outlive_viewer(), print_errors():
        from fedplan.runners.flower.edge import serve_edge
        from fedplan.runners.flower.superlink import read_superlink
        from fedplan.runners.site import read_site

        serve_edge(read_superlink(server.absolute()), read_site(site))


@command(server_commands, "server register north north/node.pub")
def register_command(
    name: Annotated[str, typer.Argument(help="Name of the site, as in the study's clients.names.")],
    key: Annotated[Path, typer.Argument(help="Public key of the site: node.pub.")],
    server: ServerOption = Path("server"),
    as_json: JsonOption = False,
) -> None:
    """Register a site: its name belongs to this key from now on."""
    with print_errors():
        from fedplan.runners.flower.superlink import read_public_key, read_superlink

        read_superlink(server.absolute()).register(name, read_public_key(key))
    value = {"site": name, "key": str(key)}
    print_result(value, f"{name} is registered with {key}", as_json=as_json)


@command(server_commands, "server revoke north")
def revoke_command(
    name: Annotated[str, typer.Argument(help="Name of the site.")],
    server: ServerOption = Path("server"),
    as_json: JsonOption = False,
) -> None:
    """Revoke a site's keys: it can no longer connect. Its past updates stay in the global model."""
    with print_errors():
        from fedplan.runners.flower.superlink import read_superlink

        revoked = read_superlink(server.absolute()).revoke(name)
    value = {"site": name, "revoked_keys": revoked}
    print_result(value, f"{name}: {revoked} keys revoked", as_json=as_json)


@command(server_commands, "server sites")
def sites_command(server: ServerOption = Path("server"), as_json: JsonOption = False) -> None:
    """List the registered sites, and whether each is connected."""
    with print_errors():
        from fedplan.runners.flower.superlink import read_superlink

        nodes = read_superlink(server.absolute()).nodes()
        rows = list[dict[str, str]]()
        lines = list[str]()
        for node in nodes:
            name, since = node.name or str(node.node_id), node.last_activated_at
            rows.append({"site": name, "state": node.status, "since": since})
            lines.append(
                f"{name}  {node.status}  {f'since {since}' if since else 'never connected'}"
            )
        print_result(rows, *lines, as_json=as_json)
