# SPDX-License-Identifier: Apache-2.0
"""Commands of a federation's operator: run the SuperLink, register and revoke sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedplan.console import JsonOption, command, command_group, print_errors, print_json

server_commands = command_group("Run the server of a federation, and register its sites.")
ServerOption = Annotated[Path, typer.Option("--server", help="Folder of the server.")]


@command(server_commands, "server link --server server")
def link_command(server: ServerOption = Path("server")) -> None:
    """Run Flower's SuperLink. Only users who can read the operator's token may control it."""
    with print_errors():
        from fedplan.runners.flower.superlink import run_superlink

        run_superlink(server.absolute())


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
    if as_json:
        return print_json({"site": name, "key": str(key)})
    print(f"{name} is registered with {key}")


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
    if as_json:
        return print_json({"site": name, "revoked_keys": revoked})
    print(f"{name}: {revoked} keys revoked")


@command(server_commands, "server sites")
def sites_command(server: ServerOption = Path("server"), as_json: JsonOption = False) -> None:
    """List the registered sites, and whether each is connected."""
    with print_errors():
        from fedplan.runners.flower.superlink import read_superlink

        nodes = read_superlink(server.absolute()).nodes()
        if as_json:
            named = [(node.name or str(node.node_id), node) for node in nodes]
            return print_json(
                [
                    {"site": name, "state": node.status, "since": node.last_activated_at}
                    for name, node in named
                ]
            )
        for node in nodes:
            since = (
                f"since {node.last_activated_at}" if node.last_activated_at else "never connected"
            )
            print(f"{node.name or node.node_id}  {node.status}  {since}")
