# SPDX-License-Identifier: Apache-2.0
"""The audit section of a report: the result of `fedplan verify`."""

from __future__ import annotations

from collections.abc import Sequence

from fedplan.audits.run import verify_run
from fedplan.errors import FedplanError
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import Html, html_list, tag
from fedplan.reports.pages.page import PageSection

MAX_FAULTS = 20
"""The most faults listed on a page."""


def audit_section(facts: RunFacts) -> PageSection:
    """Return the section with the result of verifying the run; it is empty before round 1."""
    title = "Audit"
    if facts.snapshot.live:
        text = tag("p", "The run is in progress. It is verified when it has ended.")
        return PageSection(title, (text,))
    if not facts.run.round:
        return PageSection(title)
    return PageSection(title, (audit_badge(*_verify(facts)),))


def _verify(facts: RunFacts) -> tuple[list[str], str]:
    """Return the faults found in the run and a text on the checks; verification errors count.

    Under client-level differential privacy neither of them names a client.
    """
    folder = facts.run.folder
    try:
        faults, checked = verify_run(folder)
    except FedplanError as error:
        faults, checked = [str(error)], ""  # a run that cannot be checked is not verified
    if not facts.client_level_dp:
        return faults, checked
    # The clients that were sampled, and their number, are a secret of the server.
    count = [f"{len(faults)} in all: fedplan verify {folder} lists them"] if faults else []
    return count, (
        f"{facts.run.round} rounds: no frozen tensor changed, every byte is explained by the plan "
        f"{facts.agreement.method.plan.fingerprint}, and no personal param was uploaded."
    )


def audit_badge(faults: Sequence[str], checked: str, subject: str = "This run") -> Html:
    """Return a "verified" badge with the text on the checks, or the list of faults found.

    `subject` is the checked thing, for the sentence above the faults.
    """
    if not faults:
        text = tag("p", tag("span", "verified", class_="state good"), " ", checked)
        return tag("div", text, class_="audit")
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    count = f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}"
    head = tag("p", tag("span", count, class_="state bad"), f" {subject} failed the audit:")
    return tag("div", head, html_list([*faults[:MAX_FAULTS], *more]), class_="audit")
