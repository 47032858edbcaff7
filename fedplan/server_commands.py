# SPDX-License-Identifier: Apache-2.0
"""What an operator asks of a federation's server: to run, to let a site in, to let it go."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedplan.console import told

server_commands = typer.Typer(
    help="Run a federation's server, and say whom it lets in.", no_args_is_help=True
)
Server = Annotated[Path, typer.Option("--server", help="The server's folder.")]


@server_commands.command()
def link(server: Server = Path("server")) -> None:
    """Run the SuperLink. Only who can read the operator's token may ask it for anything."""
    with told():
        from fedplan.runners.flower.link import run_link

        run_link(server.absolute())


@server_commands.command()
def register(
    name: Annotated[str, typer.Argument(help="The site's name, as the study says it.")],
    key: Annotated[Path, typer.Argument(help="The public half of its key: node.pub.")],
    server: Server = Path("server"),
) -> None:
    """Let a site in: its name belongs to this key from now on."""
    with told():
        from fedplan.runners.flower.link import link_in, public_key

        link_in(server.absolute()).register(name, public_key(key))
    print(f"{name} is known by {key}")


@server_commands.command()
def revoke(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    server: Server = Path("server"),
) -> None:
    """Let a site in no longer. What it has sent before stays in the world."""
    with told():
        from fedplan.runners.flower.link import link_in

        count = link_in(server.absolute()).revoke(name)
    print(f"{name}: {count} of its keys are let in no longer")


@server_commands.command()
def sites(server: Server = Path("server")) -> None:
    """List the sites that are let in, and whether each is there."""
    with told():
        from fedplan.runners.flower.link import link_in

        for node in link_in(server.absolute()).nodes():
            since = f"since {node.last_activated_at}" if node.last_activated_at else "has not come"
            print(f"{node.name or node.node_id}  {node.status}  {since}")
