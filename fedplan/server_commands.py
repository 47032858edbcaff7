# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a federation's server: to run, to let a site in, to let it go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedplan.console import Json, command, group, print_json, told

server_commands = group("Run a federation's server, and say whom it lets in.")
Server = Annotated[Path, typer.Option("--server", help="The server's folder.")]


@command(server_commands, "server link --server server")
def link(server: Server = Path("server")) -> None:
    """Run the SuperLink. Only who can read the operator's token may ask it for anything."""
    with told():
        from fedplan.runners.flower.link import run_link

        run_link(server.absolute())


@command(server_commands, "server register north north/node.pub")
def register(
    name: Annotated[str, typer.Argument(help="The site's name, as the study says it.")],
    key: Annotated[Path, typer.Argument(help="The public half of its key: node.pub.")],
    server: Server = Path("server"),
    as_json: Json = False,
) -> None:
    """Let a site in: its name belongs to this key from now on."""
    with told():
        from fedplan.runners.flower.link import link_in, public_key

        link_in(server.absolute()).register(name, public_key(key))
    if as_json:
        return print_json({"site": name, "key": str(key)})
    print(f"{name} is known by {key}")


@command(server_commands, "server revoke north")
def revoke(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    server: Server = Path("server"),
    as_json: Json = False,
) -> None:
    """Let a site in no longer. What it has sent before stays in the world."""
    with told():
        from fedplan.runners.flower.link import link_in

        count = link_in(server.absolute()).revoke(name)
    if as_json:
        return print_json({"site": name, "revoked": count})
    print(f"{name}: {count} of its keys are let in no longer")


@command(server_commands, "server sites")
def sites(server: Server = Path("server"), as_json: Json = False) -> None:
    """List the sites that are let in, and whether each is there."""
    with told():
        from fedplan.runners.flower.link import link_in

        found = link_in(server.absolute()).nodes()
        if as_json:
            told_of = [(node.name or str(node.node_id), node) for node in found]
            return print_json(
                [{"site": n, "state": e.status, "since": e.last_activated_at} for n, e in told_of]
            )
        for node in found:
            since = f"since {node.last_activated_at}" if node.last_activated_at else "has not come"
            print(f"{node.name or node.node_id}  {node.status}  {since}")
