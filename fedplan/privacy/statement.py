# SPDX-License-Identifier: Apache-2.0
"""Privacy statement of a run: its guarantee and the epsilon spent, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedplan.errors import PrivacyError
from fedplan.privacy.accounting.accountant import Charge, accountant_version, charge_to_json
from fedplan.privacy.accounting.budget import Budget, EpsilonCap
from fedplan.privacy.guarantee import Guarantee, vote_name
from fedplan.privacy.guard import CHARGES_FILE

DISTRIBUTED = "client, distributed"
"""Kind of client-level DP whose noise the clients add in shares, under secure aggregation."""
NEIGHBOURS = {
    "client": "two federations with the same public roster of clients that differ in one client: "
    "it responds in the one and never in the other (add or remove one client)",
    "example": "two federations that differ in one example of one client (add or remove one "
    "example)",
    DISTRIBUTED: "two federations with the same clients that differ in one client: in one of them "
    "it contributes only its noise to every sum (zero out one client)",
}
"""Definition of neighbouring data sets, by kind of guarantee."""
TRUST = {
    "client": "the server is trusted. It sees each client's update without noise, adds the noise, "
    "and keeps secret which clients were sampled. Its run folder with the ledger is not part of "
    "the release and must stay secret",
    "example": "only the client itself sees values without noise. The server and the other clients "
    "see noisy values only",
    DISTRIBUTED: "each client relies on its own software to clip its update and to add its noise. "
    "The clients' public keys, which were exchanged without the server, are trusted to be genuine. "
    "At most the stated number of clients collude with the server or leave out their noise. The "
    "server is not trusted: it can unmask only sums that contain noise, and what it learns over "
    "all rounds, even if it deviates from the protocol, is within epsilon",
}
"""Trust assumptions, by kind of guarantee."""
SPENT = "Epsilon spent"
"""Start of the line of a statement's text that has the epsilon spent."""
EXCLUDED = (
    "personal models and parameters that a client keeps, for anyone who obtains them",
    "metrics on the clients' examples that a simulation prints",
    "the choice of settings (hyperparameter tuning), if private examples were used for it",
    "the time that an answer takes, which the server and observers of the network see, and which "
    "depends on the number and the lengths of examples",
)
"""What no guarantee covers."""
GHOST_CLIPPING = (
    "a server that chooses values to amplify rounding: with ghost_clipping several examples run at "
    "a time, and such values let one of them change the gradients of others by more than is charged"
)
"""What example-level DP with ghost clipping does not cover in addition."""
EXCLUDED_DISTRIBUTED = (
    "participation: which clients take part, drop out or refuse, and which rounds fail, is public"
)
"""What distributed DP does not cover in addition."""


@dataclass(frozen=True)
class Statement:
    """Privacy statement of a run: the guarantee, and the epsilon spent so far.

    rounds: rounds of the whole run.
    epsilon_spent: the largest epsilon of all privacy budgets (the server's one, or one per client).
    charges: the run's entries in the privacy budget with this epsilon, as JSON.
    noise_shares: with distributed DP, a text on how much noise each client adds, else "".
    Make one with `of`; `json` and `text` give the two forms for readers.
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
        """Make the statement of a run from the privacy budget files in and below `folder`.

        Without a folder or files nothing is spent. rounds, noise_shares: as the fields. run: prefix
        of the names of this run's charges, in files with charges of many runs. Reads only. Raises a
        PrivacyError if a file is damaged or of another unit, or if a charge of the run, in any of
        the files, is not one that the guarantee promises.
        """
        cap = EpsilonCap(guarantee.epsilon, guarantee.delta, run)
        spent, charges = 0.0, list[Charge]()
        for file in sorted(folder.rglob(CHARGES_FILE)) if folder else []:
            budget = Budget(file, delta=guarantee.delta, unit=guarantee.unit)
            of_run = [charge for charge in budget.charges if charge.name.startswith(run)]
            for charge in of_run:
                name = charge.name.removesuffix(vote_name(""))
                promised = guarantee.round_events(1, name).get(charge.name)
                if charge.event != promised:
                    raise PrivacyError(
                        f"{file}: {charge.name} was charged as {charge.event}, and the study "
                        f"promises {promised}: this is the folder of another study, or it was "
                        "changed"
                    )
            if not charges or budget.epsilon_spent_under(cap) > spent:
                spent, charges = budget.epsilon_spent_under(cap), of_run
        lines = [charge_to_json(charge) for charge in charges]
        return Statement(guarantee, rounds, spent, lines, noise_shares)

    @property
    def _kind(self) -> str:
        return DISTRIBUTED if self.noise_shares else self.guarantee.unit

    @property
    def excluded(self) -> tuple[str, ...]:
        """What the guarantee does not cover, one sentence each."""
        ghost = (GHOST_CLIPPING,) if self.guarantee.ghost_clipping else ()
        distributed = (EXCLUDED_DISTRIBUTED,) if self.noise_shares else ()
        return (*EXCLUDED, *ghost, *distributed)

    @property
    def sampler(self) -> str:
        """How clients or examples are sampled, in words."""
        rate = self.guarantee.sampling_rate
        if rate is None:
            return (
                "no sampling: all clients take part in every round, and no privacy amplification "
                "is claimed"
            )
        unit, period = (
            ("client", "round") if self.guarantee.unit == "client" else ("example", "step")
        )
        return (
            f"Poisson sampling: each {unit} joins each {period} with probability {rate:.4g}, drawn "
            "from a secret key"
        )

    @property
    def clipping(self) -> str:
        """The clipping norm, in words."""
        guarantee = self.guarantee
        value = "each client's update" if guarantee.unit == "client" else "each example's gradient"
        if guarantee.clipping_quantile:
            return (
                f"{value} is clipped to an L2 norm that starts at {guarantee.clipping_norm:g} and "
                f"follows the {guarantee.clipping_quantile:g} quantile of the norms, estimated "
                "from noisy counts"
            )
        norm = f"an L2 norm of {guarantee.clipping_norm:g}"
        return f"{value} is clipped to {norm}, over all params together"

    @property
    def layer_selection(self) -> str:
        """How blocks are voted on, in words."""
        guarantee = self.guarantee
        if not guarantee.vote_noise_multiplier:
            return "does not depend on private examples"
        return (
            f"by a vote every {guarantee.vote_every} rounds, in which each {guarantee.unit} has "
            "one ballot; the counts have Gaussian noise with a noise multiplier of "
            f"{guarantee.vote_noise_multiplier:g}"
        )

    @property
    def weights(self) -> str:
        """How clients are weighted, in words."""
        cap = self.guarantee.max_weight
        return f"by number of examples, at most {cap}" if cap else "equal weights"

    def json(self) -> dict[str, Any]:
        """Contents of a run's `privacy.json`, as a JSON object.

        Raises a PrivacyError if dp-accounting is not installed.
        """
        guarantee = self.guarantee
        return {
            "unit": guarantee.unit,
            "neighbours": NEIGHBOURS[self._kind],
            "epsilon": guarantee.epsilon,
            "epsilon_spent": self.epsilon_spent,
            "epsilon_forecast": guarantee.forecast_epsilon(self.rounds),
            "delta": guarantee.delta,
            "rounds": self.rounds,
            "mechanism": asdict(guarantee),
            "clipping": self.clipping,
            **({"noise_shares": self.noise_shares} if self.noise_shares else {}),
            "layer_selection": self.layer_selection,
            "weights": self.weights,
            "sampler": {"used": self.sampler, "assumed": self.sampler},
            "accountant": accountant_version(),
            "trust": TRUST[self._kind],
            "charges": list(self.charges),
            "excluded": list(self.excluded),
            "randomness": "AES-256 in counter mode, with a 32-byte key from the operating system's "
            "random number generator",
        }

    def text(self) -> str:
        """The main facts of `json` as lines of text for people. Raises as `json` does."""
        guarantee = self.guarantee
        forecast = guarantee.forecast_epsilon(self.rounds)
        return "\n".join(
            (
                f"{guarantee.unit.capitalize()}-level differential privacy: epsilon "
                f"{guarantee.epsilon:g}, delta {guarantee.delta:g}.",
                f"Neighbours: {NEIGHBOURS[self._kind]}.",
                f"{SPENT}: {self.epsilon_spent:.4f}, in {len(self.charges)} charges. Forecast for "
                f"all {self.rounds} rounds: {forecast:.4f}.",
                "Mechanism: Gaussian noise with a noise multiplier of "
                f"{guarantee.noise_multiplier:.4g}; {self.clipping}.",
                *([f"Distributed noise: {self.noise_shares}."] if self.noise_shares else []),
                f"Layer selection: {self.layer_selection}.",
                f"{self.sampler[0].upper()}{self.sampler[1:]}.",
                f"Trust: {TRUST[self._kind]}.",
                f"Accountant: {accountant_version()}.",
                "Not covered:",
                *(f"  - {each}" for each in self.excluded),
            )
        )
