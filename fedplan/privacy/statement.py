# SPDX-License-Identifier: Apache-2.0
"""Statements: what a run promises and has spent, for machines and in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedplan.privacy.accounting.accountant import version
from fedplan.privacy.accounting.budget import Budget, Cap
from fedplan.privacy.accounting.events import Spent, written_spent
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.guarantee import Guarantee, voted
from fedplan.privacy.guard import CHARGES

SHARED = "client, in shares"
"""A client that is hidden from the server too: under masks each adds a share of the noise."""
NEIGHBOURS = {
    "client": "two federations of one public roster, in one of which one client never answers",
    "example": "two federations, in one of which one client lacks one row",
    SHARED: "two federations of the same clients, in one of which all that one of them adds to "
    "any sum is its noise,",
}
TRUST = {
    "client": "the server sees each client's update without noise, adds the noise, and keeps to "
    "itself who was drawn: its folder, with the ledger, is no part of what is released",
    "example": "nobody but the site sees anything of its rows without noise",
    SHARED: "its own site, to clip and to add noise; the folder of keys, which came by hand; and "
    "that no more sites than were said work with the server, or add no noise. Not the server: it "
    "opens sums that have their noise, and a lie of it over rounds is within epsilon",
}
EXCLUDED = (
    "models that a client keeps for itself: who gets one can learn from it",
    "scores of tests on clients' rows, printed by a simulation",
    "how the settings were found, if private rows were used to find them",
    "how long a turn or a round takes, and the sizes of messages, for who watches the line",
)

SEEN = "who takes part, fails or refuses, and which rounds are given up: the roster tells it"
"""What noise in shares does not cover beside that."""


@dataclass(frozen=True)
class Statement:
    """A guarantee, and what a run has spent of it: by the client that has spent most.

    `shares` says in words what each client adds, where the noise is added in shares.
    """

    guarantee: Guarantee
    rounds: int
    spent: float
    charges: Sequence[dict[str, Any]]
    shares: str = ""

    @staticmethod
    def of(
        guarantee: Guarantee,
        rounds: int,
        folder: Path | None = None,
        *,
        run: str = "",
        shares: str = "",
    ) -> Statement:
        """The statement of a run in a folder; without one, that of a run to come.

        Of the charges of many runs, as a site's account has them, it takes those of `run`.
        """
        cap = Cap(guarantee.epsilon, guarantee.delta, run)
        files = sorted(folder.rglob(CHARGES)) if folder else []
        found = [Budget(file, delta=guarantee.delta, unit=guarantee.unit) for file in files]
        most = max(found, key=lambda budget: budget.spent_of(cap), default=None)
        charges = [each for each in most.charges if each.about.startswith(run)] if most else []
        for each in charges:
            _require_promised(guarantee, each)
        said = [written_spent(each) for each in charges]
        return Statement(guarantee, rounds, most.spent_of(cap) if most else 0.0, said, shares)

    @property
    def _kind(self) -> str:
        return SHARED if self.shares else self.guarantee.unit

    @property
    def excluded(self) -> tuple[str, ...]:
        """What is not covered."""
        return (*EXCLUDED, SEEN) if self.shares else EXCLUDED

    @property
    def sampler(self) -> str:
        """How units are drawn: what is assumed is what is done."""
        guarantee = self.guarantee
        if guarantee.rate is None:
            return "all clients in every round: nothing is claimed of chance"
        if guarantee.unit == "client":
            return (
                f"Poisson: each client of the roster, by a secret, with chance {guarantee.rate:g}"
            )
        return f"Poisson: each row into each step, by a secret, with chance {guarantee.rate:.4g}"

    @property
    def clip(self) -> str:
        """How long a unit's part may be."""
        guarantee = self.guarantee
        if guarantee.quantile:
            share = f"{guarantee.quantile:g} of the lengths, counted with noise"
            return f"starts at {guarantee.clip:g} and follows the quantile {share}"
        return f"fixed, {guarantee.clip:g}, over all that is sent, as one vector"

    @property
    def vote(self) -> str:
        """How layers are chosen."""
        guarantee = self.guarantee
        if not guarantee.vote:
            return "no layers are chosen by private rows"
        each = f"each {guarantee.unit} has a ballot, every {guarantee.period} rounds"
        return f"{each}; counts have noise of {guarantee.vote:g} times a ballot"

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        guarantee = self.guarantee
        return {
            "unit": guarantee.unit,
            "neighbours": NEIGHBOURS[self._kind],
            "epsilon": self.spent,
            "budget": guarantee.epsilon,
            "forecast": guarantee.forecast(self.rounds),
            "delta": guarantee.delta,
            "rounds": self.rounds,
            "mechanism": asdict(guarantee),
            "clip": self.clip,
            **({"shares": self.shares} if self.shares else {}),
            "vote": self.vote,
            "weights": f"by rows, up to {guarantee.cap}" if guarantee.cap else "all alike",
            "sampler": {"used": self.sampler, "assumed": self.sampler},
            "accountant": version(),
            "trust": TRUST[self._kind],
            "charged": list(self.charges),
            "excluded": list(self.excluded),
            "randomness": "AES-256 in counter mode, keyed by 32 bytes of the system's source",
        }

    def text(self) -> str:
        """It as a person reads it."""
        guarantee = self.guarantee
        forecast = guarantee.forecast(self.rounds)
        return "\n".join(
            (
                f"This run hides each {guarantee.unit}: {NEIGHBOURS[self._kind]} can be told "
                f"apart no better than epsilon {guarantee.epsilon:g} at delta {guarantee.delta:g} "
                "allows.",
                f"Spent so far: epsilon {self.spent:.4f}, {len(self.charges)} charges. "
                f"All {self.rounds} rounds: {forecast:.4f}.",
                f"How: Gaussian noise of {guarantee.noise:.4g} times the clip, which is "
                f"{self.clip}.",
                *([f"In shares: {self.shares}."] if self.shares else []),
                f"Layers: {self.vote}.",
                f"Who is drawn: {self.sampler}.",
                f"Whom one must trust: {TRUST[self._kind]}.",
                f"Accounted by {version()}.",
                "Not covered:",
                *(f"  - {each}" for each in self.excluded),
            )
        )


def _require_promised(guarantee: Guarantee, charge: Spent) -> None:
    """What was drawn and charged is what is stated: another rate or noise is another guarantee."""
    votes = charge.about.endswith(voted(""))
    about = charge.about.removesuffix(voted("")) if votes else charge.about
    bill = guarantee.bill(1, about)
    if charge.event != bill.get(charge.about):
        raise PrivacyError(
            f"{charge.about} was charged as {charge.event}, and the study promises "
            f"{bill.get(charge.about)}: this is the folder of another study, or it was changed"
        )
