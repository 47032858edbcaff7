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
    """Aggregation of a run by secure aggregation: the server sees sums over clients only.

    The new global values equal the plain weighted means bit by bit. `agreement`: settings that
    server and clients fixed before round 1. `participation`: samples the clients of a round.
    `open_round` returns the aggregator of the next round. Spends no privacy budget: `guard` is None
    and `hides_clients` False.
    """

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
        """Return the clients of round `number` out of the `roster` (the names of all clients).

        Draws the same clients as without secure aggregation. Raises FedplanError if the threshold
        settings do not allow a sum of so many clients.
        """
        plain = PlainAggregation(self.agreement, self.participation)
        cohort = plain.sample_clients(number, roster)
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
    ) -> SecureAggregator:
        """Return an empty aggregator for the round after `global_state`.

        `roster`: number of clients of the run. `shared` is not called; other aggregations call it.
        Raises FedplanError as `sample_clients` does.
        """
        number = global_state.round + 1
        cohort = self.sample_clients(number, [str(n) for n in range(roster)])
        threshold = self.agreement.secagg.resolve_threshold(len(cohort))
        return SecureAggregator(self.agreement, global_state.values, roster, number, threshold)


@dataclass
class SecureScoring:
    """Secure sum of the clients' layer scores before round `round_number`.

    The transport runs the protocol with `terms`, and sets `unmasked` (the sums) and `sites` (the
    clients in the sums), or `failure` (why the sums could not be unmasked). Then `scores` is the
    result. `base_digests`: full digest of each global value, by key. `threshold`: clients that are
    needed to unmask. `agreement`: settings that server and clients fixed before round 1.
    """

    agreement: Agreement
    base_digests: dict[str, str]
    round_number: int
    threshold: int
    unmasked: UnmaskedSums | None = None
    sites: tuple[str, ...] = ()
    failure: str = ""

    def terms(self, turn_digest: str, attempt: int = 1) -> Terms:
        """Return the protocol terms that server and clients must have in common.

        `turn_digest` and `attempt`: see `round_terms`.
        """
        settings = self.agreement, self.round_number, self.threshold, self.base_digests
        return round_terms(*settings, turn_digest=turn_digest, attempt=attempt, scoring=True)

    @property
    def scores(self) -> dict[Block, float]:
        """The sum of all clients' scores by block; empty if the sum was not unmasked."""
        if self.unmasked is None or SCORES_SLOT not in self.unmasked.numbers:
            return {}
        steps = ints_from_words(self.unmasked.numbers[SCORES_SLOT])
        sums = zip(self.agreement.blocks, steps, strict=True)
        return {block: total / STEPS_PER_UNIT for block, total in sums}


@dataclass
class SecureAggregator:
    """Secure sum of round `round_number`.

    Between machines, the transport runs the protocol with `terms`, and sets `unmasked` (the sums)
    and `sites` (the clients in the sums), or `failure` (why the sums could not be unmasked). In a
    simulation, `add` collects the clients' inputs in `contributions`. Then `close` returns the
    result; in a simulation `close` runs the protocol in this process. `base`: global values before
    the round. `roster`: number of clients of the run. `threshold`: clients that are needed to
    unmask. `agreement`: settings that server and clients fixed before round 1.
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
        """Raise UpdateRejected or SumError if the update cannot be summed; changes nothing."""
        self._new_mean().require(values, aux, weight)

    def add(self, client: str, values: Tensors, aux: Tensors, weight: int) -> None:
        """Keep one client's update, as integers, for the simulated protocol."""
        own = self._new_mean()
        own.add(client, values, aux, weight)
        words = client_words(own, self.base, wide=self.agreement.secagg.wide_integers)
        self.contributions[client] = ClientInput(words, weight)

    def close(self) -> AggregationResult:
        """Return the means of the round; in a simulation, run the protocol first.

        If the sums cannot be unmasked, the result has no means, and the field `secagg` has the
        reason; a FedplanError of the protocol is such a reason. Under distributed DP charges the
        privacy budget, and raises PrivacyError if the budget does not allow the release.
        """
        sites = self.sites or tuple(sorted(self.contributions))
        try:
            if self.unmasked is None and self.failure:
                raise SecAggError(self.failure)
            unmasked = self.unmasked or simulate_secagg_round(self.terms(), self.contributions)
            result = self._aggregate(unmasked)
        except PrivacyError:
            raise
        except FedplanError as error:  # invalid input of one site ends the round, not the run
            record = SecAggRecord(self.threshold, sites, {WHOLE_SUM: str(error)})
            return AggregationResult({}, secagg=record)
        reasons = {
            name.removeprefix(VALUE_PREFIX): reason
            for name, reason in sorted(unmasked.withheld.items())
        }
        withheld = {n: reason for n, reason in reasons.items() if n in self.base or n == WHOLE_SUM}
        return replace(result, secagg=SecAggRecord(self.threshold, sites, withheld))

    def _aggregate(self, unmasked: UnmaskedSums) -> AggregationResult:
        """Return the means of the unmasked sums: adds the weighted base to each sum of changes."""
        wide, total = self.agreement.secagg.wide_integers, self._new_mean()
        sums = dict[str, Words]()
        for name, words in unmasked.numbers.items():
            if (key := name.removeprefix(VALUE_PREFIX)) != name:
                sums[key] = words if wide else widen_words(words)
                add_words(sums[key], _weighted_words(self.base[key], unmasked.weights[name]))
            elif (key := name.removeprefix(SQUARE_PREFIX)) != name:
                (total.drift.squares[key],) = ints_from_words(words)
        total.values = sum_from_words(sums, unmasked, self.base)
        total.weight = unmasked.weights.get(WHOLE_SUM, 0)
        return total.close()

    @property
    def base_digests(self) -> dict[str, str]:
        """Full digest of each global value before the round."""
        return {key: full_digest(value) for key, value in sorted(self.base.items())}

    def terms(self, turn_digest: str = "", attempt: int = 1) -> Terms:
        """Return the protocol terms that server and clients must have in common.

        `turn_digest` and `attempt`: see `round_terms`.
        """
        settings = self.agreement, self.round_number, self.threshold, self.base_digests
        return round_terms(*settings, turn_digest=turn_digest, attempt=attempt)

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
    scoring: bool = False,
) -> Terms:
    """Return the protocol terms of a round, or of the layer scoring before the round.

    Server and each client compute the terms from their own agreement, so that the server cannot
    dictate the terms. `threshold`: clients that are needed to unmask. `base_digests`: digest of
    each global value before the round. `turn_digest`: see `messages.turn_digest`. `attempt`: counts
    restarts of the protocol in this round, from 1. `scoring`: the only slot is the block scores.
    """
    words = (word for key in sorted(base_digests) for word in (key, base_digests[key]))
    scoring_slot = Slot(SCORES_SLOT, len(agreement.blocks), wide=True)
    return Terms(
        experiment=agreement.experiment,
        run=agreement.run,
        agreement_digest=agreement.digest,
        round=round_number,
        base_digest=sha256_of("base", turn_digest, *words).hex(),
        threshold=threshold,
        min_senders=agreement.secagg.min_contributors,
        slots=(scoring_slot,) if scoring else round_slots(agreement),
        attempt=attempt,
    )


def score_steps(scores: Mapping[Block, float]) -> dict[Block, int]:
    """Return scores in grid steps; an empty dict if any is NaN or over MAX_SECURE_SCORE."""
    if not all(abs(score) <= MAX_SECURE_SCORE for score in scores.values()):
        return {}
    return {block: round(score * STEPS_PER_UNIT) for block, score in scores.items()}


def round_slots(agreement: Agreement) -> tuple[Slot, ...]:
    """Return all slots (named vectors of a secure sum) that clients may send in a round.

    The slots depend on the agreement only: one for each exchanged param, and one for the squared
    norm of each param with drift tracking. Every client sends the first slot, which has no numbers:
    the weight of the first slot is the total weight.
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
    """Return by slot the integers that a client masks: weighted changes and their squared norms.

    `own`: an aggregator with the update of this client alone. `base`: the global values that the
    client started from. `wide`: use two 64-bit words per number for the changes; the squares, sent
    only for params with drift tracking, always do. Raises UpdateRejected if a change does not fit
    one word (unless `wide`), or a square reaches MAX_SQUARE_STEPS.
    """
    sums, weights = sum_words(own.values), own.values.weights()
    slots = {WHOLE_SUM: np.zeros(0, np.uint64)}
    for key, words in sums.items():
        subtract_words(words, _weighted_words(base[key], weights[key]))
        slots[VALUE_PREFIX + key] = words if wide else narrow_words(key, words)
        if key in own.agreement.tracks_drift:
            if (square := own.drift.squares[key]) >= MAX_SQUARE_STEPS:
                raise UpdateRejected(
                    f"the change of {key!r} is too large for secure aggregation: the number of "
                    "examples times its squared norm must stay below 2**40; take smaller steps"
                )
            slots[SQUARE_PREFIX + key] = words_from_ints([square])
    return slots


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
    """Return wide integers (two words) as narrow ones; raise UpdateRejected if one does not fit.

    `name`: the param, for the message.
    """
    narrow = np.ascontiguousarray(wide[:, 0])
    if not np.array_equal(widen_words(narrow), wide):
        raise UpdateRejected(
            f"the weighted change of {name!r} does not fit one word: set aggregation.wide_integers"
        )
    return narrow


def sum_from_words(
    sums: Mapping[str, Words], unmasked: UnmaskedSums, like: Mapping[str, Tensor]
) -> ExactSum:
    """Return an ExactSum of the unmasked wide integers `sums`, by param key.

    `like` gives shape and dtype of each param, `unmasked` the weight and number of senders.
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
