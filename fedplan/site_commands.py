# SPDX-License-Identifier: Apache-2.0
"""What a person at a site asks: to serve, to see what was offered, to approve it or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from rich.console import Console

from fedplan.console import Json, told
from fedplan.errors import FedplanError
from fedplan.naming import allowing

if TYPE_CHECKING:
    from fedplan.sites.approvals import Approvals

site_commands = typer.Typer(
    help="At a site: nothing runs, leaves or is counted without its approval.",
    no_args_is_help=True,
)
SiteFolder = Annotated[Path, typer.Option("--site", help="The site's folder, with site.toml.")]
Digest = Annotated[
    str, typer.Argument(help="How the study's digest begins; without it, the only one that waits.")
]


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


@site_commands.command()
def inbox(site: SiteFolder = Path(), as_json: Json = False) -> None:
    """List the studies that were offered here, and what was said to each."""
    with told():
        approvals = _approvals(site)
        rows = [approvals.listed(whole) for whole in approvals.inbox.wholes()]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        line = f"{row['study'][:12]}  {row['time'][:16]}  {row['name']}: {row['state']}"
        Console(soft_wrap=True, highlight=False).print(line, markup=False)
    if not rows:
        print("No study was offered here.")


@site_commands.command()
def show(digest: Digest = "", site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Say what a study would let leave, and what is new against the last that was approved."""
    with told():
        approvals = _approvals(site)
        notice = approvals.shown(digest or _waiting(approvals))
    if as_json:
        print(json.dumps(notice.json()))
    else:
        Console(highlight=False).print(notice)


@site_commands.command()
def approve(digest: Digest = "", site: SiteFolder = Path()) -> None:
    """Say yes to a study, as it stands, word for word. It is good for this study alone."""
    with told():
        approvals = _approvals(site)
        found = approvals.approve(digest or _waiting(approvals))
    print(f"Approved by {found.approver}: {found.study}")


@site_commands.command()
def refuse(
    digest: Digest,
    why: Annotated[str, typer.Option(help="For this site's own record; it does not leave.")] = "",
    site: SiteFolder = Path(),
) -> None:
    """Say no to a study. Who asks for it hears that a person has refused it, and not why."""
    with told():
        _approvals(site).refuse(digest, why)
    print("Refused.")


@site_commands.command()
def withdraw(digest: Digest, site: SiteFolder = Path()) -> None:
    """Take an approval back. The next request of the study is not answered."""
    with told():
        _approvals(site).withdraw(digest)
    print("Withdrawn.")


@site_commands.command()
def policy(site: SiteFolder = Path()) -> None:
    """Say the policy in words, and what it says to each study in the inbox."""
    with told():
        approvals = _approvals(site)
        lines = approvals.policy.lines()
        for whole in approvals.inbox.wholes():
            study = approvals.inbox.read(whole).study
            lines += [f"\n{whole[:12]}  {study.name}: {approvals.state(study)}"]
            lines += [f"  - {sentence}" for sentence in approvals.against(study)]
    for line in lines:
        Console(soft_wrap=True, highlight=False).print(line, markup=False)


@site_commands.command()
def doctor(site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Look whether the site can take part, and say what to mend. Ends with 1 if something fails."""
    with told(), Console(stderr=True).status("Looking: the rows of approved studies are read."):
        from fedplan.runners.site import read_site
        from fedplan.sites.doctor import examine, screen

        found = read_site(site)
        findings = examine(found)
    if as_json:
        print(json.dumps([finding.json() for finding in findings], indent=1))
    else:
        Console(highlight=False).print(screen(found, findings))
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


@site_commands.command()
def lock(site: SiteFolder = Path()) -> None:
    """Write what is installed here as requirements.lock, by hashes, and the wheels beside it."""
    with told(), Console(stderr=True).status("Asking pip for the wheels."):
        from fedplan.sites.lock import write_lock

        file = write_lock(site)
    print(f"Written: {file}")


def _waiting(approvals: Approvals) -> str:
    """The only study that waits for a person."""
    rows = [approvals.listed(whole) for whole in approvals.inbox.wholes()]
    found = [row["study"] for row in rows if row["state"].startswith("waits")]
    if len(found) != 1:
        some = ", ".join(whole[:12] for whole in found) or "none"
        raise FedplanError(f"say which study is meant: those that wait are {some}")
    return found[0]


def _approvals(folder: Path) -> Approvals:
    from fedplan.runners.site import read_site
    from fedplan.sites.desk import approvals_of

    site = read_site(folder)
    # Even to tell two studies apart is to find the code that they name.
    click.get_current_context().with_resource(allowing(site.allow))
    return approvals_of(site)
