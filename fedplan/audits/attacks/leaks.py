# SPDX-License-Identifier: Apache-2.0
"""Leaks: what an observer finds out here and now, and what privacy buys, as tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.audits.attacks import choices, recovery, worlds
from fedplan.audits.attacks.choices import Observed, seen
from fedplan.audits.attacks.recovery import PARTS, Read, Recovered, recovered
from fedplan.audits.attacks.worlds import Audited, audited

POLLS = 500
EPSILON = 8.0
"""Of the DP-SGD whose updates are attacked."""


@dataclass(frozen=True)
class Leaks:
    """All that was found, in three parts."""

    worlds: list[Audited]
    choices: list[Observed]
    recovery: list[Recovered]

    @property
    def sound(self) -> bool:
        """Whether no audit passed what was claimed."""
        return all(each.sound for each in self.worlds)

    @property
    def width(self) -> int:
        """The columns of a terminal that its tables take."""
        return 118

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        return {
            "sound": self.sound,
            "worlds": [asdict(each) for each in self.worlds],
            "choices": [asdict(each) for each in self.choices],
            "recovery": [
                {**asdict(row), "parts": [asdict(p) | {"beyond": p.beyond} for p in row.parts]}
                for row in self.recovery
            ],
            "chance": recovery.CHANCE,
            "epsilon": EPSILON,
        }

    def __rich__(self) -> RenderableType:
        return Group(
            *_section("What the noisy sum of a round tells of one client", *self._of_worlds()),
            *_section("What the choice of blocks alone tells of one client", *self._of_choices()),
            *_section("What one client's update tells of its texts", *self._of_recovery()),
        )

    def _of_worlds(self) -> tuple[Table, str]:
        table = _table("the client sends", "claimed", "found", "found, if Gaussian", "")
        for each in self.worlds:
            bounds = (f"{value:.2f}" for value in (each.claimed, each.found, each.sharper))
            table.add_row(each.client, *bounds, "" if each.sound else "ABOVE THE CLAIM")
        return table, (
            "Two worlds, with and without the client, are told apart by the releases of the "
            f"shipped aggregate: this proves an epsilon (delta {worlds.DELTA:g}, confidence "
            f"{worlds.CONFIDENCE:.1%}). That the noise is Gaussian, as it is claimed to be, makes "
            "the audit sharper. An epsilon above the claim would be a mistake in the code."
        )

    def _of_choices(self) -> tuple[Table, str]:
        table = _table("blocks", "own choice", "random", "private vote", "vote as without noise")
        for each in self.choices:
            rates = ((each.raw, each.raw_error), (each.random, each.error), (each.vote, each.error))
            cells = (f"{rate:.2f} ± {error:.2f}" for rate, error in rates)
            table.add_row(f"{each.k} of {choices.BLOCKS}", *cells, f"{each.agreed:.0%}")
        alone = ", ".join(f"{each.cohort:.2f}" for each in self.choices)
        return table, (
            "AUC of telling whether the client is of one people or of another; 0.5 is a guess. The "
            f"winners are those of {choices.COHORT} clients' vote at epsilon {choices.EPSILON:g} "
            f"(delta {choices.DELTA:g}). A vote hides a client, not a cohort: where all voters are "
            f"of one people, the winners tell which ({alone})."
        )

    def _of_recovery(self) -> tuple[Table, str]:
        table = _table("method", "training", *map(str, PARTS))
        for before, row in zip([None, *self.recovery], self.recovery, strict=False):
            again = before is not None and before.method == row.method
            if before is not None and not again:
                table.add_section()
            table.add_row("" if again else row.method, row.way, *map(_cell, row.parts))
        return table, (
            "Share of the client's tokens that are read off each part, beyond chance: 0 is a "
            "guess, 100 % all of them. One step of SGD on all rows is the server's best case; "
            "masked, the server has words of each update that are uniform, and sees their sum; ten "
            "steps are AdamW on some of them, with dropout, where the linear test finds little and "
            "the rows of the embedding still tell all; DP-SGD is the one step at epsilon "
            f"{EPSILON:g} (delta {recovery.DELTA:g}) for each row (a standard error there is "
            f"{self._error:.1%} or less). A number in brackets is the block that was read, where "
            "it is not the first. Prompts stand beside pictures: the texts of the classes are "
            "public, and there is no token to look up, which is not to say that they tell nothing "
            "(labels, and who took part, are not measured). All models are as they are drawn. "
            "These attacks are simple: what they find is a floor."
        )

    @property
    def _error(self) -> float:
        """The largest standard error of what is read under privacy."""
        private = (row for row in self.recovery if row.way == "DP-SGD")
        return max(read.error for row in private for read in row.parts)


def _cell(read: Read) -> str:
    if not read.sent:
        return "not sent"
    if read.beyond is None:
        return "no tokens"
    # Never a minus before a zero.
    share = f"{round(100 * read.beyond) + 0} %"
    first = min(read.blocks, default=0)
    return f"{share} ({first})" if first else share


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, justify="left" if name == "training" else "right", no_wrap=True)
    return table


def _section(title: str, table: Table, note: str) -> Iterable[RenderableType]:
    return Text(title, style="bold"), table, Text(note + "\n", style="dim")


def attack(draws: int, clients: int, secret: bytes) -> Leaks:
    """Attack what is shipped, and say what was found."""
    return Leaks(
        audited(draws, secret),
        seen(2 * clients, POLLS, secret),
        list(recovered(clients, EPSILON)),
    )
