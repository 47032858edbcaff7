# SPDX-License-Identifier: Apache-2.0
"""Warnings: what a person should look at in a round, from what its ledger says and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from fedplan.federation.record import Record, RoundRecord, TurnRecord

HALF, TIMES = 0.5, 4
"""A client dominates if it says more than this share of a round's weight, and so many times what
the next one says."""
LAST, LEAST, JUMP = 5, 3, 5.0
"""Drift jumps if it is so many times the median of the last rounds that had it, three or more."""

ByKind = Mapping[str, tuple[float, float]]
"""The drift of one round, as its record says it."""
Drifts = deque[ByKind]
"""Those of the last rounds."""


def drifts_of(records: Iterable[Record]) -> Drifts:
    """The drift of the last rounds of a ledger."""
    return Drifts((each.drift for each in records if isinstance(each, RoundRecord)), maxlen=LAST)


def warnings_of(
    whole: RoundRecord, turns: Iterable[TurnRecord], before: Sequence[ByKind]
) -> tuple[str, ...]:
    """The warnings of a round, in words: whoever has the ledger comes to the same."""
    counted = set(whole.counted)
    weights = {turn.client: turn.weight for turn in turns if turn.client in counted}
    return (*_dominant(weights), *_jumps(whole.drift, before), *_defended(whole))


def _dominant(weights: Mapping[str, int]) -> Iterator[str]:
    """Who says more than half of all weight, and far more than the next."""
    if len(weights) < 2:
        return
    ranked = sorted(weights.items(), key=lambda said: (-said[1], said[0]))
    (client, most), (_, following) = ranked[:2]
    share = most / sum(weights.values())
    if share > HALF and most > TIMES * following:
        yield f"{client} says {share:.3f} of the round's weight"


def _jumps(drift: ByKind, before: Sequence[ByKind]) -> Iterator[str]:
    """Kinds of params of which the changes lie much further apart than in the last rounds."""
    for kind, (apart, _) in sorted(drift.items()):
        past = [each[kind][0] for each in before if kind in each]
        usual = median(past) if len(past) >= LEAST else 0.0
        if usual and apart > JUMP * usual:
            yield f"the drift of {kind} is {apart / usual:.1f} times that of the last rounds"


def _defended(whole: RoundRecord) -> Iterator[str]:
    done = whole.defence
    for client, times in sorted(done.far.items()) if done else ():
        yield f"{client} lies {times:.4g} times as far from the rule's values as is usual"
    if done and done.thin:
        yield f"{done.thin} params came from too few clients for the rule to bear a liar"
