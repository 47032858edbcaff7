# SPDX-License-Identifier: Apache-2.0
"""What a person at a site asks: to serve, to see what was offered, to approve it or not."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedplan.console import Json, command, group, print_json, told
from fedplan.errors import FedplanError
from fedplan.naming import allowing

if TYPE_CHECKING:
    from fedplan.sites.approvals import Approvals

site_commands = group("At a site: nothing runs, leaves or is counted without its approval.")
SiteFolder = Annotated[Path, typer.Option("--site", help="The site's folder, with site.toml.")]
Digest = Annotated[
    str, typer.Argument(help="How the study's digest begins; without it, the only one that waits.")
]


@command(site_commands, "site keys --site sites/north")
def keys(site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Make the keys of this site, here. Only node.pub is sent away. Nothing is overwritten."""
    with told():
        from fedplan.runners.flower.keys import make_site_keys

        made = list(map(str, make_site_keys(site.absolute())))
    if as_json:
        return print_json({"files": made})
    for path in made:
        print(path)


@command(site_commands, "site serve --site sites/north")
def serve(site: SiteFolder = Path()) -> None:
    """Take part: keep the node running, and answer what was approved. Ends with TERM or INT."""
    with told():
        from fedplan.sites.serving import serve_site

        serve_site(site)


@command(site_commands, "site rejoin 0123456789abcdef")
def rejoin(
    run: Annotated[str, typer.Argument(help="The id of the run.")],
    site: SiteFolder = Path(),
    as_json: Json = False,
) -> None:
    """Let a run go on from a home that was put back from a copy. Good for once."""
    with told():
        from fedplan.runners.site import read_site
        from fedplan.sites.desk import rejoin as rejoined

        rejoined(read_site(site), run)
    if as_json:
        print_json({"run": run, "rejoins": True})


@command(site_commands, "site inbox")
def inbox(site: SiteFolder = Path(), as_json: Json = False) -> None:
    """List the studies that were offered here, and what was said to each."""
    with told(), _approvals(site) as approvals:
        rows = [approvals.listed(whole) for whole in approvals.inbox.wholes()]
    if as_json:
        return print_json(rows)
    for row in rows:
        line = f"{row['study'][:12]}  {row['time'][:16]}  {row['name']}: {row['state']}"
        Console(soft_wrap=True, highlight=False).print(line, markup=False)
    if not rows:
        print("No study was offered here.")


@command(site_commands, "site show 3fa9c2")
def show(digest: Digest = "", site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Say what a study would let leave, and what is new against the last that was approved."""
    with told(), _approvals(site) as approvals:
        notice = approvals.shown(digest or _waiting(approvals))
    if as_json:
        print_json(notice.json())
    else:
        Console(highlight=False).print(notice)


@command(site_commands, "site approve 3fa9c2")
def approve(digest: Digest = "", site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Say yes to a study, as it stands, word for word. It is good for this study alone."""
    with told(), _approvals(site) as approvals:
        found = approvals.approve(digest or _waiting(approvals))
    if as_json:
        return print_json({"study": found.study, "approver": found.approver})
    print(f"Approved by {found.approver}: {found.study}")


@command(site_commands, "site refuse 3fa9c2 --why 'not our patients'")
def refuse(
    digest: Digest,
    why: Annotated[str, typer.Option(help="For this site's own record; it does not leave.")] = "",
    site: SiteFolder = Path(),
    as_json: Json = False,
) -> None:
    """Say no to a study. Who asks for it hears that a person has refused it, and not why."""
    with told(), _approvals(site) as approvals:
        approvals.refuse(digest, why)
    if as_json:
        return print_json({"study": digest, "said": "refused"})
    print("Refused.")


@command(site_commands, "site withdraw 3fa9c2")
def withdraw(digest: Digest, site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Take an approval back. The next request of the study is not answered."""
    with told(), _approvals(site) as approvals:
        approvals.withdraw(digest)
    if as_json:
        return print_json({"study": digest, "said": "withdrawn"})
    print("Withdrawn.")


@command(site_commands, "site policy")
def policy(site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Say the policy in words, and what it says to each study in the inbox."""
    with told(), _approvals(site) as approvals:
        lines, studies = approvals.policy.lines(), list[dict[str, Any]]()
        for whole in approvals.inbox.wholes():
            study = approvals.inbox.read(whole).study
            said = {"study": whole, "name": study.name, "state": approvals.state(study)}
            studies.append({**said, "against": list(approvals.against(study))})
    if as_json:
        return print_json({"policy": lines, "studies": studies})
    for each in studies:
        lines += [f"\n{each['study'][:12]}  {each['name']}: {each['state']}"]
        lines += [f"  - {sentence}" for sentence in each["against"]]
    for line in lines:
        Console(soft_wrap=True, highlight=False).print(line, markup=False)


@command(site_commands, "site doctor --site sites/north")
def doctor(site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Look whether the site can take part, and say what to mend. Ends with 1 if something fails."""
    with told(), Console(stderr=True).status("Looking: the rows of approved studies are read."):
        from fedplan.runners.site import read_site
        from fedplan.sites.doctor import examine, screen

        found = read_site(site)
        findings = examine(found)
    if as_json:
        print_json([finding.json() for finding in findings])
    else:
        Console(highlight=False).print(screen(found, findings))
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


@command(site_commands, "site lock --site sites/north")
def lock(site: SiteFolder = Path(), as_json: Json = False) -> None:
    """Write what is installed here as requirements.lock, by hashes, and the wheels beside it."""
    with told(), Console(stderr=True).status("Asking pip for the wheels."):
        from fedplan.sites.lock import write_lock

        file = write_lock(site)
    if as_json:
        return print_json({"file": str(file)})
    print(f"Written: {file}")


def _waiting(approvals: Approvals) -> str:
    """The only study that waits for a person."""
    rows = [approvals.listed(whole) for whole in approvals.inbox.wholes()]
    found = [row["study"] for row in rows if row["state"].startswith("waits")]
    if len(found) != 1:
        some = ", ".join(whole[:12] for whole in found) or "none"
        raise FedplanError(f"say which study is meant: those that wait are {some}")
    return found[0]


@contextmanager
def _approvals(folder: Path) -> Generator[Approvals]:
    """The approvals of a site, while the code that its studies name may be found.

    Even to tell two studies apart is to find it.
    """
    from fedplan.runners.site import read_site
    from fedplan.sites.desk import approvals_of

    site = read_site(folder)
    with allowing(site.allow):
        yield approvals_of(site)
