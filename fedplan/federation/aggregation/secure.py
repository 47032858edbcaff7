# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation at the server: it sees sums over the clients, no single update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from fedplan.errors import FedplanError, PrivacyError
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.aggregation.protocol import (
    Aggregation,
    AggregationResult,
    Aggregator,
    PollScores,
)
from fedplan.federation.aggregation.secure_input import (
    COUNTS_SLOT,
    SCORES_SLOT,
    SQUARE_PREFIX,
    STEPS_PER_UNIT,
    VALUE_PREFIX,
    client_words,
    counts_slots,
    round_terms,
    score_steps,
    sum_from_words,
    weighted_words,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.records import WHOLE_SUM, SecAggRecord
from fedplan.models.params import Block
from fedplan.secagg.crypto import SecAggError
from fedplan.secagg.round import ClientInput, simulate_secagg_round
from fedplan.secagg.server import UnmaskedSums
from fedplan.secagg.terms import Slot, Terms
from fedplan.tensors.named import Tensors, full_digest
from fedplan.tensors.ring import Words, add_words, ints_from_words, widen_words


class SecureAggregation(Aggregation):
    """Aggregation of a run by secure aggregation: the server sees sums over clients only.

    The new global values equal the plain weighted means bit by bit. Spends no privacy budget.
    """

    def sample_clients(self, number: int, roster: Sequence[str]) -> list[str]:
        """Return the clients of round `number`, the same as without secure aggregation.

        Raises FedplanError if the threshold settings do not allow a sum of so many clients.
        """
        cohort = super().sample_clients(number, roster)
        self.agreement.secagg.resolve_threshold(len(cohort))
        return cohort

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return by block the sum of the scores in `polled`, each rounded to a multiple of GRID.

        Does not depend on the round `number`. Leaves out a client with a score that is NaN, or
        above MAX_SECURE_SCORE in magnitude.
        """
        sums = dict[Block, int]()
        for scores in polled.values():
            for block, steps in score_steps(scores).items():
                sums[block] = sums.get(block, 0) + steps
        return {block: steps / STEPS_PER_UNIT for block, steps in sums.items()}

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> Aggregator:
        """Return an empty aggregator for the round after `global_state`.

        `shared` is not called. Raises FedplanError as `sample_clients` does.
        """
        number = global_state.round + 1
        cohort = self.sample_clients(number, [str(n) for n in range(roster)])
        threshold = self.agreement.secagg.resolve_threshold(len(cohort))
        return SecureAggregator(self.agreement, global_state.values, roster, number, threshold)


@dataclass
class SecureSum:
    """A secure sum of round `round_number`: of updates, of layer scores, or of score counts.

    The transport runs the protocol with `terms`, and sets `unmasked` (the sums) and `sites` (the
    clients in the sums), or `failure` (why the sums could not be unmasked), `faults` (by client,
    what it did wrong), and `discarded` (by client, its masked inputs in attempts that failed).
    `base`: global values before the round. `threshold`: clients that are needed to unmask. `slots`:
    of layer scores before the round, with `scores` as the result, or of score counts after the
    round, with `counts`; empty for updates.
    """

    agreement: Agreement
    base: Tensors
    round_number: int
    threshold: int
    slots: tuple[Slot, ...] = ()
    unmasked: UnmaskedSums | None = None
    sites: tuple[str, ...] = ()
    failure: str = ""
    faults: dict[str, str] = field(default_factory=dict[str, str])
    discarded: dict[str, int] = field(default_factory=dict[str, int])

    @cached_property
    def base_digests(self) -> dict[str, str]:
        """Full digest of each global value before the round."""
        return {key: full_digest(value) for key, value in sorted(self.base.items())}

    def terms(self, turn_digest: str = "", attempt: int = 1) -> Terms:
        """Return the protocol terms that server and clients must have in common: `round_terms`."""
        return round_terms(
            self.agreement,
            self.round_number,
            self.threshold,
            self.base_digests,
            turn_digest=turn_digest,
            attempt=attempt,
            slots=self.slots,
        )

    @property
    def scores(self) -> dict[Block, float]:
        """The sum of all clients' scores by block; empty if the sum was not unmasked."""
        if self.unmasked is None or SCORES_SLOT not in self.unmasked.numbers:
            return {}
        steps = ints_from_words(self.unmasked.numbers[SCORES_SLOT])
        sums = zip(self.agreement.blocks, steps, strict=True)
        return {block: total / STEPS_PER_UNIT for block, total in sums}

    @property
    def counts(self) -> NDArray[np.int64] | None:
        """The sum of all clients' score counts; None if the sum was not unmasked."""
        if self.unmasked is None or COUNTS_SLOT not in self.unmasked.numbers:
            return None
        return self.unmasked.numbers[COUNTS_SLOT].view(np.int64)

    def simulate(self, counts: Mapping[str, NDArray[np.int64]]) -> None:
        """Sum score counts by client with the protocol in this process; set sum or failure."""
        inputs = {
            name: ClientInput({COUNTS_SLOT: each.view(np.uint64)}, 1)
            for name, each in counts.items()
        }
        try:
            self.unmasked = simulate_secagg_round(self.terms(), inputs)
            self.sites = tuple(sorted(counts))
        except SecAggError as error:
            self.failure = str(error)


def open_counts_sum(
    agreement: Agreement, global_state: GlobalState, clients: int, size: int
) -> SecureSum:
    """Return an empty sum of score counts after the last round, of all `clients` of a run.

    `size`: numbers of a client. Raises FedplanError as `resolve_threshold`.
    """
    threshold = agreement.secagg.resolve_threshold(clients)
    values, number = global_state.values, global_state.round
    return SecureSum(agreement, values, number, threshold, counts_slots(size))


@dataclass
class SecureAggregator(Aggregator):
    """Aggregator of round `round_number` by secure aggregation; it has no partial sums.

    Between machines, the transport sets the result of `secure_sum`. In a simulation, `add` collects
    the clients' inputs in `contributions`. Then `close` returns the result; in a simulation `close`
    runs the protocol in this process. `base`: global values before the round. `roster`: number of
    clients of the run. `threshold`: clients that are needed to unmask.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    round_number: int
    threshold: int
    contributions: dict[str, ClientInput] = field(default_factory=dict[str, ClientInput])
    secure_sum: SecureSum = field(init=False)

    def __post_init__(self) -> None:
        settings = self.agreement, self.base, self.round_number, self.threshold
        self.secure_sum = SecureSum(*settings)

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        MeanAggregator(self.agreement, self.base, self.roster).require(values, aux, weight)

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Keep one client's update, as integers, for the simulated protocol."""
        own = MeanAggregator(self.agreement, self.base, self.roster)
        own.add(client, values, aux, weight)
        words = client_words(own, self.base, wide=self.agreement.secagg.wide_integers)
        self.contributions[client] = ClientInput(words, weight)

    def close(self) -> AggregationResult:
        """Return the means of the round; in a simulation, run the protocol first.

        If the sums cannot be unmasked, the result has no means, and the field `secagg` has the
        reason; a FedplanError of the protocol is such a reason. Under distributed DP charges the
        privacy budget, and raises PrivacyError if the budget does not allow the release.
        """
        total = self.secure_sum
        sites = total.sites or tuple(sorted(self.contributions))
        try:
            if total.unmasked is None and total.failure:
                raise SecAggError(total.failure)
            unmasked = total.unmasked or simulate_secagg_round(total.terms(), self.contributions)
            result = self._aggregate(unmasked)
        except PrivacyError:
            raise
        except FedplanError as error:  # invalid input of one site ends the round, not the run
            reason = {WHOLE_SUM: str(error)}
            record = SecAggRecord(self.threshold, sites, reason, total.faults, total.discarded)
            return AggregationResult({}, secagg=record)
        reasons = {
            name.removeprefix(VALUE_PREFIX): reason
            for name, reason in sorted(unmasked.withheld.items())
        }
        withheld = {n: reason for n, reason in reasons.items() if n in self.base or n == WHOLE_SUM}
        record = SecAggRecord(self.threshold, sites, withheld, total.faults, total.discarded)
        return replace(result, secagg=record)

    def _aggregate(self, unmasked: UnmaskedSums) -> AggregationResult:
        """Return the means of the unmasked sums: adds the weighted base to each sum of changes."""
        wide = self.agreement.secagg.wide_integers
        total, sums = MeanAggregator(self.agreement, self.base, self.roster), dict[str, Words]()
        for name, words in unmasked.numbers.items():
            if (key := name.removeprefix(VALUE_PREFIX)) != name:
                sums[key] = words if wide else widen_words(words)
                add_words(sums[key], weighted_words(self.base[key], unmasked.weights[name]))
            elif (key := name.removeprefix(SQUARE_PREFIX)) != name:
                (total.drift.squares[key],) = ints_from_words(words)
        total.values = sum_from_words(sums, unmasked, self.base)
        total.weight = unmasked.weights.get(WHOLE_SUM, 0)
        return total.close()
