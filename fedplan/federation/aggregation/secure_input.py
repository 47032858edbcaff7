# SPDX-License-Identifier: Apache-2.0
"""What server and clients compute alike in secure aggregation: terms, slots, updates as integers.

Each client masks its own weighted sum, as integers, so the unmasked sum equals the plain sum bit by
bit. Clients mask weighted changes, which fit one word; the server adds the weighted base back.
Only one linear sum of each change is unmasked: two sums of two clients would reveal both.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import WHOLE_SUM
from fedplan.federation.messages import UpdateRejected
from fedplan.models.params import Block
from fedplan.secagg.crypto import sha256_of
from fedplan.secagg.server import UnmaskedSums
from fedplan.secagg.terms import Slot, Terms
from fedplan.tensors.accumulator import CARRY_BITS, GRID, dtype_name
from fedplan.tensors.named import Tensors
from fedplan.tensors.ring import (
    Words,
    counts_from_words,
    subtract_words,
    widen_words,
    words_from_counts,
    words_from_ints,
)
from fedplan.tensors.sums import MAX_SUM_STEPS, MAX_WEIGHT, ExactSum

SCORES_SLOT, COUNTS_SLOT = "scores", "score counts"
"""Slot names of layer scores, with one integer for each block, and of score counts."""
STEPS_PER_UNIT, MAX_SECURE_SCORE = round(1 / GRID), 2.0**60
"""Grid steps in 1.0, and the largest score that can be summed securely."""
VALUE_PREFIX, SQUARE_PREFIX = "value/", "square/"
"""Prefixes of slot names: the weighted change of a param, and its squared norm."""
MAX_SQUARE_STEPS = 2**120
"""Limit of one client's weighted squared change in steps of 2**-80, which is 2**40: the sum over a
hundred clients fits two words."""


def round_terms(
    agreement: Agreement,
    round_number: int,
    threshold: int,
    base_digests: Mapping[str, str],
    *,
    turn_digest: str,
    attempt: int = 1,
    slots: tuple[Slot, ...] = (),
) -> Terms:
    """Return the protocol terms of a round, or of a sum before or after it.

    Server and each client compute the terms from their own agreement, so that the server cannot
    dictate the terms. `threshold`: clients that are needed to unmask. `base_digests`: digest of
    each global value before the round. `turn_digest`: see `messages.turn_digest`. `attempt`: counts
    restarts of the protocol in this round, from 1. `slots`: `scoring_slots` or `counts_slots`;
    empty for those of the round.
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
        slots=slots or round_slots(agreement),
        attempt=attempt,
    )


def scoring_slots(agreement: Agreement) -> tuple[Slot, ...]:
    """Return the slot of the layer scores before a round."""
    return (Slot(SCORES_SLOT, len(agreement.blocks), wide=True),)


def counts_slots(size: int) -> tuple[Slot, ...]:
    """Return the slot of the score counts, `size` integers, after a round."""
    return (Slot(COUNTS_SLOT, size),)


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
        subtract_words(words, weighted_words(base[key], weights[key]))
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


def weighted_words(value: Tensor, weight: int) -> Words:
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
