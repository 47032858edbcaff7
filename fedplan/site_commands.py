# SPDX-License-Identifier: Apache-2.0
"""What a person at a site asks: to serve, to see what was offered, to approve it or not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedplan.console import told

site_commands = typer.Typer(
    help="At a site: nothing runs, leaves or is counted without its approval.",
    no_args_is_help=True,
)
SiteFolder = Annotated[Path, typer.Option("--site", help="The site's folder, with site.toml.")]


@site_commands.command()
def keys(site: SiteFolder = Path()) -> None:
    """Make the keys of this site, here. Only node.pub is sent away. Nothing is overwritten."""
    with told():
        from fedplan.runners.flower.keys import make_site_keys

        for path in make_site_keys(site.absolute()):
            print(path)


@site_commands.command()
def serve(site: SiteFolder = Path()) -> None:
    """Take part: keep the node running, and answer what was approved. Ends with TERM or INT."""
    with told():
        from fedplan.sites.serving import serve_site

        serve_site(site)


@site_commands.command()
def rejoin(
    run: Annotated[str, typer.Argument(help="The id of the run.")],
    site: SiteFolder = Path(),
) -> None:
    """Let a run go on from a home that was put back from a copy. Good for once."""
    with told():
        from fedplan.runners.site import read_site
        from fedplan.sites.desk import rejoin as rejoined

        rejoined(read_site(site), run)
