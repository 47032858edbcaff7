# SPDX-License-Identifier: Apache-2.0
"""Commands of a site: take part in a federation, and review, approve or refuse studies."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from fedplan.cli.console import (
    JsonOption,
    StudyArgument,
    command,
    command_group,
    outlive_viewer,
    print_errors,
    print_json,
    print_result,
)
from fedplan.errors import FedplanError
from fedplan.naming import allow_imports

if TYPE_CHECKING:
    from fedplan.sites.approvals import Approvals

site_commands = command_group(
    "site", "At a site: take part, and approve the studies that may run on its data."
)
SiteOption = Annotated[Path, typer.Option("--site", help="Folder of the site, with site.toml.")]
DigestArgument = Annotated[
    str, typer.Argument(help="First digits of the study's digest; default: the only waiting study.")
]

PersonOption = Annotated[str, typer.Option("--person", help="Name of a person in policy.toml.")]
UntilOption = Annotated[
    str, typer.Option("--until", help="Last day of the approval, as 2027-01-31.")
]


@command(site_commands, "site keys --site sites/north", name="keys")
def site_keys_command(
    site: SiteOption = Path(),
    rotate: Annotated[
        bool, typer.Option("--rotate", help="Replace the node key; the old one becomes old-node.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create the keys of this site, here. Only node.pub is sent away. Existing files are kept."""
    with print_errors():
        from fedplan.runners.flower.keys import make_site_keys, replace_node_key

        make = replace_node_key if rotate else make_site_keys
        files = list(map(str, make(site.absolute())))
    print_result({"files": files}, *files, as_json=as_json)


@command(site_commands, "site peers --site sites/north", name="peers")
def peers_command(site: SiteOption = Path(), as_json: JsonOption = False) -> None:
    """Print fingerprints of all sites' keys, for people to compare. Exit code 1: own is wrong."""
    with print_errors():
        from fedplan.runners.site import read_peer_fingerprints, read_site

        keys = read_peer_fingerprints(read_site(site))
    named = {"this site": keys.own, **keys.peers}
    lines = [f"{name}: {fingerprint}" for name, fingerprint in named.items()]
    end = f"\nAll {len(keys.peers)} keys together, equal at every site:\n{keys.together}"
    print_result(asdict(keys), *lines, end, as_json=as_json)
    if keys.problem:
        Console(stderr=True, soft_wrap=True, highlight=False).print(keys.problem, markup=False)
        raise typer.Exit(1)


@command(site_commands, "site serve --site sites/north")
def serve_command(site: SiteOption = Path()) -> None:
    """Take part: run the node and answer requests of approved studies, until TERM or INT."""
    with outlive_viewer(), print_errors():
        from fedplan.sites.gateway import serve_site

        serve_site(site)


@command(site_commands, "site rejoin 0123456789abcdef")
def rejoin_command(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    site: SiteOption = Path(),
    as_json: JsonOption = False,
) -> None:
    """Let this site rejoin a run once, after its state was restored from a backup."""
    with print_errors():
        from fedplan.runners.site import read_site
        from fedplan.sites.gateway import allow_rejoin

        allow_rejoin(read_site(site), run)
    if as_json:
        print_json({"run": run, "rejoin_allowed": True})


@command(site_commands, "site inbox")
def inbox_command(site: SiteOption = Path(), as_json: JsonOption = False) -> None:
    """List the studies that were offered to this site, and the decision on each."""
    rows = list[dict[str, str]]()
    with print_errors():
        from fedplan.runners.site import read_site  # optional dependency

        read = read_site(site)
        if read.has_offers:
            from fedplan.sites.inbox_rows import inbox_rows

            rows = inbox_rows(read)
    lines = [
        f"{row['study'][:12]}  {row['time'][:16]}  {row['name']}: {row['state']}" for row in rows
    ]
    none = "No study has been offered to this site."
    print_result(rows, *(lines or [none]), as_json=as_json)


@command(site_commands, "site show 3fa9c2")
def show_command(
    digest: DigestArgument = "", site: SiteOption = Path(), as_json: JsonOption = False
) -> None:
    """Show the data that a study would send, and the changes since the last approved study."""
    with print_errors(), _open_approvals(site) as approvals:
        review = approvals.review(digest or _only_waiting_study(approvals))
    if as_json:
        print_json(review.json())
    else:
        Console(highlight=False).print(review)


@command(site_commands, "site statement 3fa9c2 --person ada --until 2027-01-31")
def statement_command(
    person: PersonOption,
    ends: UntilOption,
    digest: DigestArgument = "",
    site: SiteOption = Path(),
    as_json: JsonOption = False,
) -> None:
    """Print the text that a person signs, elsewhere, to approve a study.

    Sign its file with `ssh-keygen -Y sign -n fedplan-approval -f KEY FILE`.
    """
    with print_errors(), _open_approvals(site) as approvals:
        digest = digest or _only_waiting_study(approvals)
        text = approvals.statement(digest, person, ends)
    print_result({"statement": text}, text.rstrip(), as_json=as_json)


@command(site_commands, "site approve 3fa9c2")
def approve_command(
    digest: DigestArgument = "",
    site: SiteOption = Path(),
    person: PersonOption = "",
    ends: UntilOption = "",
    key: Annotated[
        Path | None, typer.Option(help="That person's SSH key: signs the approval here.")
    ] = None,
    signature: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File with that person's signature of the statement."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Approve a study exactly as offered. Any change of the study needs a new approval.

    If policy.toml has [people], the approval needs a signature: by --key, or made elsewhere.
    """
    with print_errors(), _open_approvals(site) as approvals:
        if person and not digest:
            raise FedplanError("give the study's digest, as `fedplan site show` prints it")
        if key is not None and signature is not None:
            raise FedplanError("give --key or --signature: an approval has one signature")
        digest, signed = digest or _only_waiting_study(approvals), ""
        if signature is not None:
            signed = signature.read_text(encoding="ascii", errors="replace")
        elif key is not None:
            from fedplan.sites.signatures import sign_statement

            statement = approvals.statement(digest, person, ends)
            Console(stderr=True, highlight=False).print(statement, markup=False)
            signed = sign_statement(statement, key)
        approval = approvals.approve(digest, ends=ends, person=person, signature=signed)
    value = {"study": approval.study_digest, "approver": approval.approver}
    text = f"Approved by {approval.approver}: {approval.study_digest}"
    if approval.missing:
        text += f". More signatures that it needs: {approval.missing}"
    print_result({**value, "missing": approval.missing}, text, as_json=as_json)


@command(site_commands, "site refuse 3fa9c2 --reason 'not our patients'")
def refuse_command(
    digest: DigestArgument,
    reason: Annotated[
        str, typer.Option(help="Reason, for this site's own record; it is not sent.")
    ] = "",
    site: SiteOption = Path(),
    as_json: JsonOption = False,
) -> None:
    """Refuse a study. The server learns that a person refused it, but not why."""
    with print_errors(), _open_approvals(site) as approvals:
        approvals.refuse(digest, reason)
    print_result({"study": digest, "decision": "refused"}, "Refused.", as_json=as_json)


@command(site_commands, "site withdraw 3fa9c2")
def withdraw_command(
    digest: DigestArgument, site: SiteOption = Path(), as_json: JsonOption = False
) -> None:
    """Withdraw an approval: from now on this site answers no request of the study."""
    with print_errors(), _open_approvals(site) as approvals:
        approvals.withdraw(digest)
    print_result({"study": digest, "decision": "withdrawn"}, "Withdrawn.", as_json=as_json)


@command(site_commands, "site policy")
def policy_command(site: SiteOption = Path(), as_json: JsonOption = False) -> None:
    """Print the site's policy in words, and its verdict on each study in the inbox."""
    with print_errors(), _open_approvals(site) as approvals:
        lines, studies = approvals.policy.summary_lines(), list[dict[str, Any]]()
        for digest in approvals.inbox.digests():
            study = approvals.inbox.read_offer(digest).study
            row = {"study": digest, "name": study.name, "state": approvals.status_text(study)}
            studies.append({**row, "violations": list(approvals.violations(study))})
    verdicts = list[str]()
    for entry in studies:
        verdicts += [f"\n{entry['study'][:12]}  {entry['name']}: {entry['state']}"]
        verdicts += [f"  - {sentence}" for sentence in entry["violations"]]
    print_result({"policy": lines, "studies": studies}, *lines, *verdicts, as_json=as_json)


@command(site_commands, "site doctor --site sites/north")
def doctor_command(site: SiteOption = Path(), as_json: JsonOption = False) -> None:
    """Check whether the site can take part, and how to fix problems. Exit code 1: a check fails."""
    with (
        print_errors(),
        Console(stderr=True).status("Checking: reads the data of approved studies."),
    ):
        from fedplan.runners.site import read_site
        from fedplan.sites.doctor import check_site, doctor_table

        checked_site = read_site(site)
        findings = check_site(checked_site)
    if as_json:
        print_json([finding.json() for finding in findings])
    else:
        Console(highlight=False).print(doctor_table(checked_site, findings))
    if any(finding.state == "fail" for finding in findings):
        raise typer.Exit(1)


@command(site_commands, "site statistics study.toml --site sites/north", name="statistics")
def site_statistics_command(
    study: StudyArgument, site: SiteOption = Path(), as_json: JsonOption = False
) -> None:
    """Check the site's data by a study's data dictionary, and show its counts. Nothing is sent.

    Small counts are joined, as when they leave. Exit code 1: a column does not match.
    """
    with print_errors():
        from fedplan.runners.site import read_site
        from fedplan.sites.statistics import site_statistics
        from fedplan.studies.schema import read_study

        checked_site = read_site(site)
        with allow_imports(checked_site.allow_packages):
            report = site_statistics(checked_site, read_study(study))
    if as_json:
        print_json(report.json())
    else:
        Console(highlight=False).print(report)
    if report.mismatches:
        raise typer.Exit(1)


def _only_waiting_study(approvals: Approvals) -> str:
    """Return the digest of the only study that waits for approval.

    Raises FedplanError if none or several wait.
    """
    rows = [approvals.inbox_row(digest) for digest in approvals.inbox.digests()]
    waiting = [row["study"] for row in rows if row["state"].startswith("waits")]
    if len(waiting) != 1:
        listed = ", ".join(digest[:12] for digest in waiting) or "none"
        raise FedplanError(f"give the study's digest: the waiting studies are {listed}")
    return waiting[0]


@contextmanager
def _open_approvals(folder: Path) -> Generator[Approvals]:
    """Yield the approvals of the site whose site.toml is in `folder`.

    During the body, names in studies may import the packages that the site allows: comparing two
    studies needs the digests of their code.
    """
    from fedplan.runners.site import read_site
    from fedplan.sites.approvals import site_approvals

    site = read_site(folder)
    with allow_imports(site.allow_packages):
        yield site_approvals(site)
