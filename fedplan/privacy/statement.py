# SPDX-License-Identifier: Apache-2.0
"""Statements: what a run promises and has spent, for machines and in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedplan.privacy.accountant import version
from fedplan.privacy.budget import Budget, Cap
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.events import Spent, written_spent
from fedplan.privacy.guard import CHARGES
from fedplan.privacy.promise import Promise, voted

NEIGHBOURS = {
    "client": "two federations of one public roster, in one of which one client never answers",
    "example": "two federations, in one of which one client lacks one row",
}
TRUST = {
    "client": "the server sees each client's update without noise, adds the noise, and keeps to "
    "itself who was drawn: its folder, with the ledger, is no part of what is released",
    "example": "nobody but the site sees anything of its rows without noise",
}
EXCLUDED = (
    "models that a client keeps for itself: who gets one can learn from it",
    "scores of tests on clients' rows, printed by a simulation",
    "how the settings were found, if private rows were used to find them",
    "how long a turn or a round takes, and the sizes of messages, for who watches the line",
)


@dataclass(frozen=True)
class Statement:
    """A promise, and what a run has spent of it: by the client that has spent most."""

    promise: Promise
    rounds: int
    spent: float
    charges: Sequence[dict[str, Any]]

    @staticmethod
    def of(
        promise: Promise, rounds: int, folder: Path | None = None, *, run: str = ""
    ) -> Statement:
        """The statement of a run in a folder; without one, that of a run to come.

        Of the charges of many runs, as a site's account has them, it takes those of `run`.
        """
        cap = Cap(promise.epsilon, promise.delta, run)
        files = sorted(folder.rglob(CHARGES)) if folder else []
        found = [Budget(file, delta=promise.delta, unit=promise.unit) for file in files]
        most = max(found, key=lambda budget: budget.spent_of(cap), default=None)
        charges = [each for each in most.charges if each.about.startswith(run)] if most else []
        for each in charges:
            _require_promised(promise, each)
        said = [written_spent(each) for each in charges]
        return Statement(promise, rounds, most.spent_of(cap) if most else 0.0, said)

    @property
    def sampler(self) -> str:
        """How units are drawn: what is assumed is what is done."""
        promise = self.promise
        if promise.rate is None:
            return "all clients in every round: nothing is claimed of chance"
        if promise.unit == "client":
            return f"Poisson: each client of the roster, by a secret, with chance {promise.rate:g}"
        return f"Poisson: each row into each step, by a secret, with chance {promise.rate:.4g}"

    @property
    def clip(self) -> str:
        """How long a unit's part may be."""
        promise = self.promise
        if promise.quantile:
            share = f"{promise.quantile:g} of the lengths, counted with noise"
            return f"starts at {promise.clip:g} and follows the quantile {share}"
        return f"fixed, {promise.clip:g}, over all that is sent, as one vector"

    @property
    def vote(self) -> str:
        """How layers are chosen."""
        promise = self.promise
        if not promise.vote:
            return "no layers are chosen by private rows"
        each = f"each {promise.unit} has a ballot, every {promise.period} rounds"
        return f"{each}; counts have noise of {promise.vote:g} times a ballot"

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        promise = self.promise
        return {
            "unit": promise.unit,
            "neighbours": NEIGHBOURS[promise.unit],
            "epsilon": self.spent,
            "budget": promise.epsilon,
            "forecast": promise.forecast(self.rounds),
            "delta": promise.delta,
            "rounds": self.rounds,
            "mechanism": asdict(promise),
            "clip": self.clip,
            "vote": self.vote,
            "weights": f"by rows, up to {promise.cap}" if promise.cap else "all alike",
            "sampler": {"used": self.sampler, "assumed": self.sampler},
            "accountant": version(),
            "trust": TRUST[promise.unit],
            "charged": list(self.charges),
            "excluded": list(EXCLUDED),
            "randomness": "AES-256 in counter mode, keyed by 32 bytes of the system's source",
        }

    def text(self) -> str:
        """It as a person reads it."""
        promise = self.promise
        forecast = promise.forecast(self.rounds)
        return "\n".join(
            (
                f"This run hides each {promise.unit}: {NEIGHBOURS[promise.unit]} can be told apart "
                f"no better than epsilon {promise.epsilon:g} at delta {promise.delta:g} allows.",
                f"Spent so far: epsilon {self.spent:.4f}, {len(self.charges)} charges. "
                f"All {self.rounds} rounds: {forecast:.4f}.",
                f"How: Gaussian noise of {promise.noise:.4g} times the clip, which is {self.clip}.",
                f"Layers: {self.vote}.",
                f"Who is drawn: {self.sampler}.",
                f"Whom one must trust: {TRUST[promise.unit]}.",
                f"Accounted by {version()}.",
                "Not covered:",
                *(f"  - {each}" for each in EXCLUDED),
            )
        )


def _require_promised(promise: Promise, charge: Spent) -> None:
    """What was drawn and charged is what is stated: another rate or noise is another promise."""
    votes = charge.about.endswith(voted(""))
    about = charge.about.removesuffix(voted("")) if votes else charge.about
    bill = promise.bill(1, about)
    if charge.event != bill.get(charge.about):
        raise PrivacyError(
            f"{charge.about} was charged as {charge.event}, and the study promises "
            f"{bill.get(charge.about)}: this is the folder of another study, or it was changed"
        )
