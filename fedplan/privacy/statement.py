# SPDX-License-Identifier: Apache-2.0
"""Privacy statement of a run: its guarantee and the epsilon spent, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedplan.privacy.accounting.accountant import accountant_version
from fedplan.privacy.accounting.budget import Budget, EpsilonCap
from fedplan.privacy.accounting.events import Charge, charge_to_json
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.guarantee import Guarantee, vote_name
from fedplan.privacy.guard import CHARGES_FILE

# The texts below are written into files of a run: they change with the formats, not with the code.

DISTRIBUTED = "client, in shares"
"""Kind of client-level DP whose noise the clients add in shares, under secure aggregation."""
NEIGHBOURS = {
    "client": "two federations of one public roster, in one of which one client never answers",
    "example": "two federations, in one of which one client lacks one row",
    DISTRIBUTED: "two federations of the same clients, in one of which all that one of them adds "
    "to any sum is its noise,",
}
"""Definition of neighbouring data sets, by kind of guarantee."""
TRUST = {
    "client": "the server sees each client's update without noise, adds the noise, and keeps to "
    "itself who was drawn: its folder, with the ledger, is no part of what is released",
    "example": "nobody but the site sees anything of its rows without noise",
    DISTRIBUTED: "its own site, to clip and to add noise; the folder of keys, which came by hand; "
    "and that no more sites than were said work with the server, or add no noise. Not the server: "
    "it opens sums that have their noise, and a lie of it over rounds is within epsilon",
}
"""Trust assumptions, by kind of guarantee."""
EXCLUDED = (
    "models that a client keeps for itself: who gets one can learn from it",
    "scores of tests on clients' rows, printed by a simulation",
    "how the settings were found, if private rows were used to find them",
    "how long a turn or a round takes, and the sizes of messages, for who watches the line",
)
"""What no guarantee covers."""
EXCLUDED_DISTRIBUTED = (
    "who takes part, fails or refuses, and which rounds are given up: the roster tells it"
)
"""What distributed DP does not cover in addition."""


@dataclass(frozen=True)
class Statement:
    """The guarantee of a run, and the epsilon spent by the client that has spent most.

    rounds: rounds of the whole run; charges: that client's charges, as JSON; noise_shares: with
    distributed DP, a text that says how much noise each client adds, else "".
    """

    guarantee: Guarantee
    rounds: int
    epsilon_spent: float
    charges: Sequence[dict[str, Any]]
    noise_shares: str = ""

    @staticmethod
    def of(
        guarantee: Guarantee,
        rounds: int,
        folder: Path | None = None,
        *,
        run: str = "",
        noise_shares: str = "",
    ) -> Statement:
        """Statement of a run by the charge files in and below a folder; without one, nothing spent.

        run: prefix of the names of this run's charges, where a file has those of many runs.
        Raises a PrivacyError if a charge does not follow from the guarantee.
        """
        cap = EpsilonCap(guarantee.epsilon, guarantee.delta, run)
        files = sorted(folder.rglob(CHARGES_FILE)) if folder else []
        budgets = [Budget(file, delta=guarantee.delta, unit=guarantee.unit) for file in files]
        largest = max(budgets, key=lambda budget: budget.epsilon_spent_under(cap), default=None)
        if largest is None:
            return Statement(guarantee, rounds, 0.0, [], noise_shares)
        charges = [charge for charge in largest.charges if charge.name.startswith(run)]
        for charge in charges:
            _require_promised(guarantee, charge)
        spent, lines = largest.epsilon_spent_under(cap), [charge_to_json(c) for c in charges]
        return Statement(guarantee, rounds, spent, lines, noise_shares)

    @property
    def _kind(self) -> str:
        return DISTRIBUTED if self.noise_shares else self.guarantee.unit

    @property
    def excluded(self) -> tuple[str, ...]:
        """What the guarantee does not cover, one sentence each."""
        return (*EXCLUDED, EXCLUDED_DISTRIBUTED) if self.noise_shares else EXCLUDED

    @property
    def sampler(self) -> str:
        """How clients or examples are sampled, in words."""
        guarantee = self.guarantee
        if guarantee.sampling_rate is None:
            return "all clients in every round: nothing is claimed of chance"
        if guarantee.unit == "client":
            sampled = "each client of the roster"
            return f"Poisson: {sampled}, by a secret, with chance {guarantee.sampling_rate:g}"
        sampled = "each row into each step"
        return f"Poisson: {sampled}, by a secret, with chance {guarantee.sampling_rate:.4g}"

    @property
    def clipping(self) -> str:
        """The clipping norm, in words."""
        guarantee = self.guarantee
        if guarantee.clipping_quantile:
            share = f"{guarantee.clipping_quantile:g} of the lengths, counted with noise"
            return f"starts at {guarantee.clipping_norm:g} and follows the quantile {share}"
        return f"fixed, {guarantee.clipping_norm:g}, over all that is sent, as one vector"

    @property
    def vote(self) -> str:
        """How blocks are voted on, in words."""
        guarantee = self.guarantee
        if not guarantee.vote_noise_multiplier:
            return "no layers are chosen by private rows"
        each = f"each {guarantee.unit} has a ballot, every {guarantee.vote_every} rounds"
        return f"{each}; counts have noise of {guarantee.vote_noise_multiplier:g} times a ballot"

    def json(self) -> dict[str, Any]:
        """The statement as a JSON object: `privacy.json` of a run."""
        guarantee = self.guarantee
        return {
            "unit": guarantee.unit,
            "neighbours": NEIGHBOURS[self._kind],
            "epsilon": self.epsilon_spent,
            "budget": guarantee.epsilon,
            "forecast": guarantee.forecast_epsilon(self.rounds),
            "delta": guarantee.delta,
            "rounds": self.rounds,
            "mechanism": asdict(guarantee),
            "clip": self.clipping,
            **({"shares": self.noise_shares} if self.noise_shares else {}),
            "vote": self.vote,
            "weights": f"by rows, up to {guarantee.max_weight}"
            if guarantee.max_weight
            else "all alike",
            "sampler": {"used": self.sampler, "assumed": self.sampler},
            "accountant": accountant_version(),
            "trust": TRUST[self._kind],
            "charged": list(self.charges),
            "excluded": list(self.excluded),
            "randomness": "AES-256 in counter mode, keyed by 32 bytes of the system's source",
        }

    def text(self) -> str:
        """The statement as lines of text."""
        guarantee = self.guarantee
        forecast = guarantee.forecast_epsilon(self.rounds)
        return "\n".join(
            (
                f"This run hides each {guarantee.unit}: {NEIGHBOURS[self._kind]} can be told "
                f"apart no better than epsilon {guarantee.epsilon:g} at delta {guarantee.delta:g} "
                "allows.",
                f"Spent so far: epsilon {self.epsilon_spent:.4f}, {len(self.charges)} charges. "
                f"All {self.rounds} rounds: {forecast:.4f}.",
                f"How: Gaussian noise of {guarantee.noise_multiplier:.4g} times the clip, which is "
                f"{self.clipping}.",
                *([f"In shares: {self.noise_shares}."] if self.noise_shares else []),
                f"Layers: {self.vote}.",
                f"Who is drawn: {self.sampler}.",
                f"Whom one must trust: {TRUST[self._kind]}.",
                f"Accounted by {accountant_version()}.",
                "Not covered:",
                *(f"  - {each}" for each in self.excluded),
            )
        )


def _require_promised(guarantee: Guarantee, charge: Charge) -> None:
    """Raise a PrivacyError if a charge's event is not the guarantee's event of that release."""
    name = charge.name.removesuffix(vote_name(""))
    promised = guarantee.round_events(1, name).get(charge.name)
    if charge.event != promised:
        raise PrivacyError(
            f"{charge.name} was charged as {charge.event}, and the study promises "
            f"{promised}: this is the folder of another study, or it was changed"
        )
