# SPDX-License-Identifier: Apache-2.0
"""Attack noisy sums and choices of blocks, and print how much leaks with and without privacy.

python research/attack.py --draws 200000 --clients 32

What updates tell is measured by research/leaks.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kit"))

from attacks import block_choice, neighbors
from attacks.block_choice import ChoiceLeak, attack_block_choices
from attacks.neighbors import EpsilonAudit, audit_epsilon

VOTES = 500
"""Votes simulated per population, in the attack on block selection."""


@dataclass(frozen=True)
class AttackReport:
    """Results of all attacks; prints as two tables with rich.

    epsilon_audits: epsilon proven from noisy sums; choice_leaks: population inferred from chosen
    blocks.
    """

    epsilon_audits: list[EpsilonAudit]
    choice_leaks: list[ChoiceLeak]

    @property
    def sound(self) -> bool:
        """Whether no audit found an epsilon above the claimed one."""
        return all(audit.sound for audit in self.epsilon_audits)

    def __rich__(self) -> RenderableType:
        return Group(
            *_section("What the noisy sum of a round reveals of one client", *self._audits()),
            *_section("What the choice of blocks alone reveals of one client", *self._choices()),
        )

    def _audits(self) -> tuple[Table, str]:
        """Table of the epsilon audits, and the note to print below the table."""
        table = _table("the client sends", "claimed", "proven", "proven, if Gaussian", "")
        for audit in self.epsilon_audits:
            values = (audit.claimed, audit.lower_bound, audit.gaussian_lower_bound)
            verdict = "" if audit.sound else "ABOVE THE CLAIM"
            table.add_row(audit.client, *(f"{value:.2f}" for value in values), verdict)
        return table, (
            "Two neighbouring data sets, with and without the client, are distinguished by the "
            "releases of the shipped mechanism: this proves an epsilon (delta "
            f"{neighbors.DELTA:g}, confidence {neighbors.CONFIDENCE:.1%}). That the noise is "
            "Gaussian, as it is claimed to be, makes the audit sharper. An epsilon above the claim "
            "would be a mistake in the code."
        )

    def _choices(self) -> tuple[Table, str]:
        """Table of the attacks on block selection, and the note to print below the table."""
        table = _table("blocks", "own choice", "random", "private vote", "vote as without noise")
        for leak in self.choice_leaks:
            aucs = ((leak.raw, leak.raw_error), (leak.random, leak.error), (leak.vote, leak.error))
            cells = (f"{auc:.2f} ± {error:.2f}" for auc, error in aucs)
            table.add_row(f"{leak.k} of {block_choice.BLOCKS}", *cells, f"{leak.agreed:.0%}")
        alone = ", ".join(f"{leak.cohort:.2f}" for leak in self.choice_leaks)
        return table, (
            "AUC of inferring which of two populations the client belongs to; 0.5 is a guess. The "
            f"winners are those of a vote of {block_choice.COHORT} clients at epsilon "
            f"{block_choice.EPSILON:g} (delta {block_choice.DELTA:g}). A vote hides a client, not "
            "a cohort: where all voters are of one population, the winners reveal which "
            f"({alone})."
        )


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _section(title: str, table: Table, note: str) -> Iterable[RenderableType]:
    return Text(title, style="bold"), table, Text(note + "\n", style="dim")


def main() -> None:
    """Run all attacks and print the report; exit with 1 if an attack contradicts a guarantee."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=50_000, help="releases with and without one")
    parser.add_argument("--clients", type=int, default=8, help="attacked clients of each method")
    options = parser.parse_args()
    secret = os.urandom(32)
    report = AttackReport(
        audit_epsilon(options.draws, secret),
        attack_block_choices(2 * options.clients, VOTES, secret),
    )
    Console(width=118, highlight=False).print(report)
    sys.exit(not report.sound)


if __name__ == "__main__":
    main()
