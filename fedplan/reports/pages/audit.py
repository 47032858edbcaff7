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
    """Verify a run and return the section with the result; empty if the run ended in round 1.

    For a run in progress, the section only says that the run is verified later. An error of the
    verification counts as a fault. Under client-level differential privacy no client is named.
    """
    title, folder = "Audit", facts.run.folder
    if facts.snapshot.live:
        text = tag("p", "The run is in progress. It is verified when it has ended.")
        return PageSection(title, (text,))
    if not facts.run.round:
        return PageSection(title)
    try:
        faults, checked = verify_run(folder)
    except FedplanError as error:
        faults, checked = [str(error)], ""  # a run that cannot be checked is not verified
    if facts.client_level_dp:
        # The clients that were sampled, and their number, are a secret of the server.
        count = f"{len(faults)} in all: fedplan verify {folder} lists them"
        faults = [count] if faults else []
        checked = (
            f"{facts.run.round} rounds: no frozen tensor changed, every byte is explained by the "
            f"plan {facts.agreement.method.plan.fingerprint}, and no personal param was uploaded."
        )
    return PageSection(title, (audit_badge(faults, checked),))


def audit_badge(faults: Sequence[str], checked: str, subject: str = "This run") -> Html:
    """Return a "verified" badge with the text `checked`; if there are faults, their list instead.

    `subject` is the checked thing, for the sentence above the faults; at most MAX_FAULTS are
    listed.
    """
    if not faults:
        text = tag("p", tag("span", "verified", class_="state good"), " ", checked)
        return tag("div", text, class_="audit")
    more = [f"and {len(faults) - MAX_FAULTS} more"] if len(faults) > MAX_FAULTS else []
    count = f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}"
    head = tag("p", tag("span", count, class_="state bad"), f" {subject} failed the audit:")
    return tag("div", head, html_list([*faults[:MAX_FAULTS], *more]), class_="audit")
