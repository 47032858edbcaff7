# SPDX-License-Identifier: Apache-2.0
"""Secure aggregation at the server: it sees the sum of a round and its clients, no single update.

Each client masks its own weighted sum, as integers, so the unmasked sum equals the plain sum bit by
bit. Clients mask weighted changes, which fit one word; the server adds the weighted base back.
Only one linear sum of each change is unmasked: two sums of two clients would reveal both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.aggregation import (
    AggregationResult,
    MeanAggregator,
    PlainAggregation,
    PollScores,
)
from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.federation.messages import UpdateRejected
from fedplan.federation.participation import Participation
from fedplan.federation.record import WHOLE_SUM, SecAggRecord
from fedplan.models.params import Block
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.secagg.crypto import SecAggError, sha256_of
from fedplan.privacy.secagg.server import UnmaskedSums
from fedplan.privacy.secagg.simulation import ClientInput, simulate_secagg_round
from fedplan.privacy.secagg.terms import Slot, Terms
from fedplan.tensors.accumulator import CARRY_BITS, GRID, dtype_name
from fedplan.tensors.named import Tensors, full_digest
from fedplan.tensors.ring import (
    Words,
    add_words,
    counts_from_words,
    ints_from_words,
    subtract_words,
    widen_words,
    words_from_counts,
    words_from_ints,
)
from fedplan.tensors.sums import MAX_SUM_STEPS, MAX_WEIGHT, ExactSum

SCORES_SLOT = "scores"
"""Slot name of layer scores, with one integer for each block."""
STEPS_PER_UNIT, MAX_SECURE_SCORE = round(1 / GRID), 2.0**60
"""Grid steps in 1.0, and the largest score that can be summed securely."""
VALUE_PREFIX, SQUARE_PREFIX = "value/", "square/"
"""Prefixes of slot names: the weighted change of a param, and its squared norm."""
MAX_SQUARE_STEPS = 2**120
"""Limit of one client's weighted squared change in steps of 2**-80, which is 2**40: the sum over a
hundred clients fits two words."""


@dataclass(frozen=True)
class SecureAggregation:
    """Aggregation by secure sums; the result equals the plain weighted mean of the senders."""

    agreement: Agreement
    participation: Participation
    hides_clients: ClassVar[bool] = False

    @property
    def guard(self) -> None:
        """None: no privacy budget is spent."""
        return None

    def checkpoint_meta(self) -> dict[str, Any]:
        """Return an empty dict: there is no state to save."""
        return {}

    def sample_clients(self, number: int, roster: Sequence[str]) -> list[str]:
        """Return the clients of round `number`, drawn as without secure aggregation.

        Raises FedplanError if the threshold settings do not allow a sum of so many clients.
        """
        plain = PlainAggregation(self.agreement, self.participation)
        cohort = plain.sample_clients(number, roster)
        self.agreement.secagg.resolve_threshold(len(cohort))
        return cohort

    def joint_scores(self, number: int, polled: PollScores) -> dict[Block, float]:
        """Return the sum of the clients' block scores, each rounded once to the grid."""
        sums = dict[Block, int]()
        for scores in polled.values():
            for block, steps in score_steps(scores).items():
                sums[block] = sums.get(block, 0) + steps
        return {block: steps / STEPS_PER_UNIT for block, steps in sums.items()}

    def open_round(
        self, global_state: GlobalState, shared: Callable[[], Tensors], roster: int
    ) -> SecureAggregator:
        """Return the aggregator of the next round for a roster of so many clients."""
        number = global_state.round + 1
        cohort = self.sample_clients(number, [str(n) for n in range(roster)])
        threshold = self.agreement.secagg.resolve_threshold(len(cohort))
        return SecureAggregator(self.agreement, global_state.values, roster, number, threshold)


@dataclass
class SecureScoring:
    """Secure sum of the clients' layer scores before a round.

    `base_digests`: full digest of each global value. `unmasked`: the sums, once they are unmasked
    over `sites`; `failure`: the reason if they cannot be.
    """

    agreement: Agreement
    base_digests: dict[str, str]
    round_number: int
    threshold: int
    unmasked: UnmaskedSums | None = None
    sites: tuple[str, ...] = ()
    failure: str = ""

    def terms(self, turn_digest: str, attempt: int = 1) -> Terms:
        """Return the terms that all clients of this scoring must agree on."""
        return scoring_terms(
            self.agreement,
            self.round_number,
            self.threshold,
            self.base_digests,
            turn_digest=turn_digest,
            attempt=attempt,
        )

    @property
    def scores(self) -> dict[Block, float]:
        """The sum of all clients' scores by block; empty if it was not unmasked."""
        if self.unmasked is None or SCORES_SLOT not in self.unmasked.numbers:
            return {}
        steps = ints_from_words(self.unmasked.numbers[SCORES_SLOT])
        sums = zip(self.agreement.blocks, steps, strict=True)
        return {block: total / STEPS_PER_UNIT for block, total in sums}


@dataclass
class SecureAggregator:
    """Secure sum of one round.

    Between machines the transport runs the protocol and sets `unmasked` and `sites`, or `failure`.
    In a simulation `contributions` holds every client's input, and `close` runs the protocol in
    this process. `base`: global values before the round; `roster`: number of clients of the run.
    """

    agreement: Agreement
    base: Tensors
    roster: int
    round_number: int
    threshold: int
    contributions: dict[str, ClientInput] = field(default_factory=dict[str, ClientInput])
    unmasked: UnmaskedSums | None = None
    sites: tuple[str, ...] = ()
    failure: str = ""

    def require(self, values: Tensors, aux: Tensors, weight: int) -> None:
        """Raise an error if the update cannot be summed; changes nothing."""
        self._new_mean().require(values, aux, weight)

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Keep one client's input for the simulated protocol."""
        own = self._new_mean()
        own.add(client, values, aux, weight)
        words = client_words(own, self.base, wide=self.agreement.secagg.wide_integers)
        self.contributions[client] = ClientInput(words, weight)

    def close(self) -> AggregationResult:
        """Return the aggregate; in a simulation run the protocol first.

        A sum that cannot be unmasked gives no means, with the reason in the record. Raises
        PrivacyError if the release cannot be charged to the privacy budget.
        """
        sites = self.sites or tuple(sorted(self.contributions))
        try:
            unmasked = self.unmasked or self._simulate()
            result = self._aggregate(unmasked)
        except PrivacyError:
            raise
        except FedplanError as error:  # invalid input of one site ends the round, not the run
            record = SecAggRecord(self.threshold, sites, {WHOLE_SUM: str(error)})
            return AggregationResult({}, masked=record)
        reasons = {
            name.removeprefix(VALUE_PREFIX): reason
            for name, reason in sorted(unmasked.withheld.items())
        }
        withheld = {n: reason for n, reason in reasons.items() if n in self.base or n == WHOLE_SUM}
        return replace(result, masked=SecAggRecord(self.threshold, sites, withheld))

    def _aggregate(self, unmasked: UnmaskedSums) -> AggregationResult:
        wide = self.agreement.secagg.wide_integers
        return unmasked_sum(unmasked, self._new_mean(), wide=wide).close()

    def _simulate(self) -> UnmaskedSums:
        """Run the protocol in this process; raise SecAggError with `failure` if that is set."""
        if self.failure:
            raise SecAggError(self.failure)
        return simulate_secagg_round(self.terms(), self.contributions)

    @property
    def base_digests(self) -> dict[str, str]:
        """Full digest of each global value before the round."""
        return {key: full_digest(value) for key, value in sorted(self.base.items())}

    def terms(self, turn_digest: str = "", attempt: int = 1) -> Terms:
        """Return the terms that all clients of the round must agree on."""
        return round_terms(
            self.agreement,
            self.round_number,
            self.threshold,
            self.base_digests,
            turn_digest=turn_digest,
            attempt=attempt,
        )

    def _new_mean(self) -> MeanAggregator:
        return MeanAggregator(self.agreement, self.base, self.roster)


def round_terms(
    agreement: Agreement,
    round_number: int,
    threshold: int,
    base_digests: Mapping[str, str],
    *,
    turn_digest: str,
    attempt: int = 1,
) -> Terms:
    """Return the protocol terms of a round; server and each client compute their own.

    `base_digests`: digest of each global value before the round. `turn_digest`: see
    `messages.turn_digest`. `attempt`: counts restarts of the protocol in this round, from 1.
    """
    words = (word for key in sorted(base_digests) for word in (key, base_digests[key]))
    return Terms(
        experiment=agreement.experiment,
        run=agreement.run,
        agreement_digest=agreement.digest,
        round=round_number,
        base_digest=sha256_of("base", turn_digest, *words).hex(),
        threshold=threshold,
        min_senders=agreement.secagg.min_contributors,
        slots=round_slots(agreement),
        attempt=attempt,
    )


def scoring_terms(
    agreement: Agreement,
    round_number: int,
    threshold: int,
    base_digests: Mapping[str, str],
    *,
    turn_digest: str,
    attempt: int = 1,
) -> Terms:
    """Return the terms of the layer scoring before a round: as `round_terms`, with its one slot."""
    terms = round_terms(
        agreement, round_number, threshold, base_digests, turn_digest=turn_digest, attempt=attempt
    )
    return replace(terms, slots=(Slot(SCORES_SLOT, len(agreement.blocks), wide=True),))


def score_steps(scores: Mapping[Block, float]) -> dict[Block, int]:
    """Return scores in grid steps; an empty dict if any is NaN or over MAX_SECURE_SCORE."""
    if not all(abs(score) <= MAX_SECURE_SCORE for score in scores.values()):
        return {}
    return {block: round(score * STEPS_PER_UNIT) for block, score in scores.items()}


def round_slots(agreement: Agreement) -> tuple[Slot, ...]:
    """Return all slots that clients may sum in a round; they depend on the agreement only.

    Every client sends the first slot, which has no numbers: its weight is the total weight.
    """
    wide, sizes = agreement.secagg.wide_integers, {p.key: p.numel for p in agreement.exchanged}
    squares = (key for key in sizes if key in agreement.tracks_drift)
    return (
        Slot(WHOLE_SUM, 0),
        *(Slot(VALUE_PREFIX + key, size, wide) for key, size in sizes.items()),
        *(Slot(SQUARE_PREFIX + key, 1, wide=True) for key in squares),
    )


def client_slots(agreement: Agreement, shared: Iterable[str]) -> list[str]:
    """Return the names of the slots that a client sends when it shares these params."""
    keys = list(shared)
    squares = (SQUARE_PREFIX + key for key in keys if key in agreement.tracks_drift)
    return [WHOLE_SUM, *(VALUE_PREFIX + key for key in keys), *squares]


def client_words(own: MeanAggregator, base: Tensors, *, wide: bool) -> dict[str, Words]:
    """Return the integers that a client masks, by slot: its weighted changes and their squares.

    `own` is the sum of this client's update alone. Raises UpdateRejected if a number does not fit.
    """
    sums, weights = sum_words(own.values), own.values.weights()
    slots = {WHOLE_SUM: np.zeros(0, np.uint64)}
    for key, words in sums.items():
        subtract_words(words, _weighted_words(base[key], weights[key]))
        slots[VALUE_PREFIX + key] = words if wide else narrow_words(key, words)
        if key in own.agreement.tracks_drift:
            slots[SQUARE_PREFIX + key] = words_from_ints([_square(key, own.drift.squares[key])])
    return slots


def unmasked_sum(unmasked: UnmaskedSums, total: MeanAggregator, *, wide: bool) -> MeanAggregator:
    """Fill the empty aggregator `total` with the unmasked sums and return it."""
    sums = dict[str, Words]()
    for name, words in unmasked.numbers.items():
        if (key := name.removeprefix(VALUE_PREFIX)) != name:
            sums[key] = words if wide else widen_words(words)
            add_words(sums[key], _weighted_words(total.base[key], unmasked.weights[name]))
        elif (key := name.removeprefix(SQUARE_PREFIX)) != name:
            (total.drift.squares[key],) = ints_from_words(words)
    total.values = sum_from_words(sums, unmasked, total.base)
    total.weight = unmasked.weights.get(WHOLE_SUM, 0)
    return total


def sum_words(total: ExactSum) -> dict[str, Words]:
    """Return a sum's grid steps as wide integers, by name."""
    tensors, facts = total.to_tensors()
    return {
        name: words_from_counts(tensors[f"{name}.upper"], tensors[f"{name}.lower"])
        for name in facts
    }


def _weighted_words(value: Tensor, weight: int) -> Words:
    """Return value * weight in grid steps, as wide integers."""
    total = ExactSum()
    while weight > 0:
        total.add({"": value}, min(weight, MAX_WEIGHT))
        weight -= MAX_WEIGHT
    return sum_words(total)[""]


def narrow_words(name: str, wide: Words) -> Words:
    """Return wide integers as narrow ones; raise UpdateRejected, naming the param, on overflow."""
    narrow = np.ascontiguousarray(wide[:, 0])
    if not np.array_equal(widen_words(narrow), wide):
        raise UpdateRejected(
            f"the weighted change of {name!r} does not fit one word: set aggregation.wide_integers"
        )
    return narrow


def _square(key: str, steps: int) -> int:
    if steps >= MAX_SQUARE_STEPS:
        raise UpdateRejected(
            f"the change of {key!r} is too large for secure aggregation: the number of examples "
            "times its squared norm must stay below 2**40; take smaller steps"
        )
    return steps


def sum_from_words(
    sums: Mapping[str, Words], unmasked: UnmaskedSums, like: Mapping[str, Tensor]
) -> ExactSum:
    """Return an ExactSum of unmasked wide integers, by param key.

    Shapes and dtypes are those of `like`; weights and senders those of `unmasked`.
    """
    tensors, facts = dict[str, Tensor](), dict[str, object]()
    for key, words in sums.items():
        upper, lower = counts_from_words(words, tuple(like[key].shape))
        tensors |= {f"{key}.upper": upper, f"{key}.lower": lower}
        largest = int(torch.max(upper.abs())) + 1 if upper.numel() else 0
        facts[key] = {
            "dtype": dtype_name(like[key]),
            "weight": unmasked.weights[VALUE_PREFIX + key],
            "senders": len(unmasked.senders[VALUE_PREFIX + key]),
            "reach": min(largest << CARRY_BITS, MAX_SUM_STEPS - 1),
        }
    return ExactSum.from_tensors(tensors, facts)
