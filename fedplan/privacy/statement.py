# SPDX-License-Identifier: Apache-2.0
"""Privacy statement of a run: its guarantee and the epsilon spent, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import fsum, inf
from pathlib import Path
from typing import Any, Literal, cast, get_args

from fedplan.errors import PrivacyError
from fedplan.privacy.accounting.accountant import Charge, accountant_version, charge_to_json
from fedplan.privacy.accounting.budget import Budget, EpsilonCap, Unit
from fedplan.privacy.guarantee import Guarantee, evaluation_name, vote_name
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
    "metrics on the clients' examples that have no noise: those that a simulation prints, and "
    "those that a site's policy lets leave",
    "the common test set and the scores on it: its examples are public",
    "the choice among several runs or settings by private examples; the epsilon of runs that were "
    "compared adds up, as `fedplan compare` and the export of a sweep's run show",
    "what the initial model has learned before, unless its folder has fedplan's privacy.json, "
    "whose epsilon is added",
    "copies of the run's folder: each copy that is continued has an account of its own, so "
    "continue only one; sites refuse a copy that is behind",
    "that a site does not answer, or refuses a study or a request: the server sees that it does, "
    "not why",
    "the size of messages and the time that an answer takes, which the server and observers of the "
    "network see; the time depends on the number and the lengths of examples",
    "what the study itself says, such as labels, names of clients and numbers of examples: these "
    "are public",
)
"""What no guarantee covers."""
GHOST_CLIPPING = (
    "a server that chooses values to amplify rounding: with ghost_clipping several examples run at "
    "a time, and such values let one of them change the gradients of others by more than is charged"
)
"""What example-level DP with ghost clipping does not cover in addition."""
EXCLUDED_CLIENT = (
    "participation, for whoever sees the server's ledger or the network: the ledger lists the "
    "clients of each round, so keep it secret"
)
"""What client-level DP by the server does not cover in addition."""
EXCLUDED_DISTRIBUTED = (
    "participation: which clients take part, drop out or refuse, and which rounds fail, is public"
)
"""What distributed DP does not cover in addition."""
PRIVACY_FILE = "privacy.json"
"""File with a privacy statement, in the folder of a run and of an exported model."""
HISTORY = "history"
"""Key of an exported PRIVACY_FILE: the expenses of all runs that the model came from."""
MOST_EXPENSES = 1000
"""Largest number of earlier expenses that a file may list."""


@dataclass(frozen=True)
class Expense:
    """What a run has cost in privacy, as the models that came out of it carry it along.

    source: the run, in a few words. unit: of its guarantee; "" for a run or model that no
    differential privacy protects, which has neither epsilon nor delta.
    """

    # The field names are the keys of the JSON form.
    source: str
    unit: Unit | Literal[""]
    epsilon: float = 0.0
    delta: float = 0.0

    @property
    def text(self) -> str:
        """The expense as words, without a full stop."""
        if not self.unit:
            return f"{self.source}: no differential privacy; what was learned there is not covered"
        return f"{self.source}: epsilon {self.epsilon:.4f}, delta {self.delta:g}, {self.unit}-level"


def expenses_from_json(data: object, file: str) -> tuple[Expense, ...]:
    """Read a list of expenses; `file` names its origin. Raises a PrivacyError for other `data`."""
    try:
        entries = [Expense(**entry) for entry in cast("list[dict[str, Any]]", data)]
        for entry in entries:
            if entry.unit not in ("", *get_args(Unit)) or not entry.source.isprintable():
                raise ValueError(f"{entry.unit!r} of {entry.source!r}")
            if not (0 <= entry.epsilon < inf and 0 <= entry.delta < inf):
                raise ValueError(f"epsilon {entry.epsilon!r} and delta {entry.delta!r}")
        if len(entries) > MOST_EXPENSES:
            raise ValueError(f"{len(entries)} entries")
    except (TypeError, ValueError, AttributeError) as error:
        raise PrivacyError(
            f"{file} does not say what the model has cost in privacy ({error}): restore the file "
            "of the export, or name another model"
        ) from error
    return tuple(entries)


@dataclass(frozen=True)
class Statement:
    """Privacy statement of a run: the guarantee, and the epsilon spent so far. Made by `of`.

    epsilon_spent: the largest epsilon of all privacy budgets (the server's one, or one per client).
    charges: the run's entries in the privacy budget with this epsilon, as JSON. noise_shares: with
    distributed DP, a text on how much noise each client adds, else "". earlier: expenses that come
    in addition: those of the initial model, and of the other runs of a sweep.
    """

    guarantee: Guarantee
    rounds: int
    epsilon_spent: float
    charges: Sequence[dict[str, Any]]
    noise_shares: str = ""
    earlier: tuple[Expense, ...] = ()

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

        run: prefix of the names of this run's charges. Raises a PrivacyError if a file is damaged
        or of another unit, or has a charge of the run that the guarantee does not promise.
        """
        cap = EpsilonCap(guarantee.epsilon, guarantee.delta, run)
        spent, charges = 0.0, list[Charge]()
        for file in sorted(folder.rglob(CHARGES_FILE)) if folder else []:
            budget = Budget(file, delta=guarantee.delta, unit=guarantee.unit)
            of_run = [charge for charge in budget.charges if charge.name.startswith(run)]
            for charge in of_run:
                name = charge.name.removesuffix(vote_name("")).removesuffix(evaluation_name(""))
                events = guarantee.round_events(1, name) | guarantee.evaluation_events(name)
                promised = events.get(charge.name)
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

    def expense(self, source: str) -> Expense:
        """The run's own expense: epsilon spent or, where the charges are at sites, promised."""
        epsilon = self.epsilon_spent if self.charges else self.guarantee.epsilon
        return Expense(source, self.guarantee.unit, epsilon, self.guarantee.delta)

    @property
    def total(self) -> Expense | None:
        """The run's expense and all earlier ones of the same unit, added; None if there are none.

        A client-level epsilon says nothing of single examples, nor an example-level one of clients.
        """
        same = [each for each in self.earlier if each.unit == self.guarantee.unit]
        if not same:
            return None
        every = [*same, self.expense("")]
        epsilon, delta = fsum(e.epsilon for e in every), fsum(e.delta for e in every)
        return Expense("In total", self.guarantee.unit, epsilon, delta)

    @property
    def _kind(self) -> str:
        return DISTRIBUTED if self.noise_shares else self.guarantee.unit

    @property
    def excluded(self) -> tuple[str, ...]:
        """What the guarantee does not cover, one sentence each."""
        ghost = (GHOST_CLIPPING,) if self.guarantee.ghost_clipping else ()
        participation = {"client": (EXCLUDED_CLIENT,), DISTRIBUTED: (EXCLUDED_DISTRIBUTED,)}
        return (*EXCLUDED, *ghost, *participation.get(self._kind, ()))

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
    def evaluation(self) -> str:
        """How models are evaluated on the clients' examples, in words."""
        guarantee = self.guarantee
        if not guarantee.evaluation_noise_multiplier:
            return "not on the clients' examples, or not covered"
        return (
            f"after every {guarantee.evaluate_every} rounds and after the last, each client counts "
            "right and wrong predictions and probabilities on its test examples, and adds Gaussian "
            "noise with a noise multiplier of "
            f"{guarantee.evaluation_noise_multiplier:g}; epsilon covers these counts"
        )

    @property
    def weights(self) -> str:
        """How clients are weighted, in words."""
        cap = self.guarantee.max_weight
        return f"by number of examples, at most {cap}" if cap else "equal weights"

    def json(self) -> dict[str, Any]:
        """Contents of a run's `privacy.json`; raises a PrivacyError without dp-accounting."""
        guarantee, total = self.guarantee, self.total
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
            "evaluation": self.evaluation,
            "weights": self.weights,
            "sampler": {"used": self.sampler, "assumed": self.sampler},
            "accountant": accountant_version(),
            "trust": TRUST[self._kind],
            "charges": list(self.charges),
            "earlier": [asdict(each) for each in self.earlier],
            "total": {"epsilon": total.epsilon, "delta": total.delta} if total else None,
            "excluded": list(self.excluded),
            "randomness": "AES-256 in counter mode, with a 32-byte key from the operating system's "
            "random number generator",
        }

    def text(self) -> str:
        """The main facts of `json` as lines of text for people. Raises as `json` does."""
        guarantee = self.guarantee
        forecast, total = guarantee.forecast_epsilon(self.rounds), self.total
        return "\n".join(
            (
                f"{guarantee.unit.capitalize()}-level differential privacy: epsilon at most "
                f"{guarantee.epsilon:g}, delta {guarantee.delta:g}.",
                f"This bounds how well anybody can tell apart {NEIGHBOURS[self._kind]}.",
                f"{SPENT}: {self.epsilon_spent:.4f}, in {len(self.charges)} charges. Forecast for "
                f"all {self.rounds} rounds: {forecast:.4f}.",
                *(f"In addition, {each.text}." for each in self.earlier),
                *(
                    [
                        f"{total.text}: plain addition, for the same {guarantee.unit} in all of "
                        f"them{'' if self.charges else ', if this run spends all that it may'}."
                    ]
                    if total
                    else []
                ),
                "Mechanism: Gaussian noise with a noise multiplier of "
                f"{guarantee.noise_multiplier:.4g}; {self.clipping}.",
                *([f"Distributed noise: {self.noise_shares}."] if self.noise_shares else []),
                f"Layer selection: {self.layer_selection}.",
                *(
                    [f"Evaluation: {self.evaluation}."]
                    if guarantee.evaluation_noise_multiplier
                    else []
                ),
                f"{self.sampler[0].upper()}{self.sampler[1:]}.",
                f"Trust: {TRUST[self._kind]}.",
                f"Accountant: {accountant_version()}.",
                "Not covered:",
                *(f"  - {each}" for each in self.excluded),
            )
        )
