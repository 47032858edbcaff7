# SPDX-License-Identifier: Apache-2.0
"""Verdicts: what `verify` says of a run, for a page."""

from __future__ import annotations

from collections.abc import Sequence

from fedplan.audits.run import verify_run
from fedplan.errors import FedplanError
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import Html, listed, tag
from fedplan.reports.pages.page import PageSection

MOST = 20
"""Faults that a page lists."""


def verdict_section(facts: RunFacts) -> PageSection:
    """Whether the run's folder holds what its plan explains, and nothing else."""
    title = "Verdict"
    if facts.look.live:
        words = tag("p", "The run goes on. It is verified when it has ended.")
        return PageSection(title, (words,))
    if not facts.run.round:
        return PageSection(title)
    return PageSection(title, (badge(*_told(facts)),))


def _told(facts: RunFacts) -> tuple[list[str], str]:
    """The faults, and what was checked; where clients are hidden, neither tells of one."""
    folder = facts.run.folder
    try:
        faults, checked = verify_run(folder)
    except FedplanError as error:
        faults, checked = [str(error)], ""  # what cannot be checked is no verdict of soundness
    if not facts.hides_clients:
        return faults, checked
    # Who was drawn, and how many were, is the server's own secret.
    named = [f"{len(faults)} in all: fedplan verify {folder} names them"] if faults else []
    return named, (
        f"{facts.run.round} rounds: nothing that rests moved, every byte is explained by the plan "
        f"{facts.agreement.method.plan.fingerprint}, and no client's own param went up."
    )


def badge(faults: Sequence[str], checked: str, what: str = "This run") -> Html:
    """A verdict: that all is as it should be, or every fault."""
    if not faults:
        words = tag("p", tag("span", "verified", class_="state good"), " ", checked)
        return tag("div", words, class_="verdict")
    told = [*faults[:MOST], *([f"and {len(faults) - MOST} more"] if len(faults) > MOST else [])]
    said = f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}"
    head = tag("p", tag("span", said, class_="state bad"), f" {what} does not hold together:")
    return tag("div", head, listed(told), class_="verdict")
