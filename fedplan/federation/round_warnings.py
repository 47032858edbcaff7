# SPDX-License-Identifier: Apache-2.0
"""Warnings of a round, which follow from its ledger records alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from fedplan.federation.record import Record, RoundRecord, TurnRecord

DOMINANT_SHARE, DOMINANT_RATIO = 0.5, 4
"""A client dominates a round if it has more than this share of the total weight, and more than this
many times the next weight."""
DRIFT_WINDOW, MIN_DRIFT_ROUNDS, DRIFT_JUMP = 5, 3, 5.0
"""Drift jumps if it exceeds this many times the median of the last rounds (the window), of which at
least the minimum must have drift of that kind."""

DriftByKind = Mapping[str, tuple[float, float]]
"""Drift of one round by kind of param, as in `RoundRecord.drift`."""
Drifts = deque[DriftByKind]
"""Drift of the last DRIFT_WINDOW rounds."""


def recent_drifts(records: Iterable[Record]) -> Drifts:
    """Return the drift of the last rounds among some records."""
    rounds = (record.drift for record in records if isinstance(record, RoundRecord))
    return Drifts(rounds, maxlen=DRIFT_WINDOW)


def make_warnings(
    record: RoundRecord, turns: Iterable[TurnRecord], earlier: Sequence[DriftByKind]
) -> tuple[str, ...]:
    """Return the warnings of a round as sentences.

    `turns` are the round's, `earlier` the drift of the rounds before. The texts are part of the
    ledger, and an audit recomputes them.
    """
    counted = set(record.counted)
    weights = {turn.client: turn.weight for turn in turns if turn.client in counted}
    return (
        *_dominance_warnings(weights),
        *_drift_warnings(record.drift, earlier),
        *_defence_warnings(record),
    )


def _dominance_warnings(weights: Mapping[str, int]) -> Iterator[str]:
    """Yield a warning if one client has most of the weight, by DOMINANT_SHARE and _RATIO."""
    if len(weights) < 2:
        return
    ranked = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
    (client, largest), (_, second) = ranked[:2]
    share = largest / sum(weights.values())
    if share > DOMINANT_SHARE and largest > DOMINANT_RATIO * second:
        yield f"{client} says {share:.3f} of the round's weight"


def _drift_warnings(drift: DriftByKind, earlier: Sequence[DriftByKind]) -> Iterator[str]:
    """Yield a warning for each kind of param whose drift jumped, by DRIFT_JUMP."""
    for kind, (current, _) in sorted(drift.items()):
        past = [by_kind[kind][0] for by_kind in earlier if kind in by_kind]
        reference = median(past) if len(past) >= MIN_DRIFT_ROUNDS else 0.0
        if reference and current > DRIFT_JUMP * reference:
            yield f"the drift of {kind} is {current / reference:.1f} times that of the last rounds"


def _defence_warnings(record: RoundRecord) -> Iterator[str]:
    """Yield a warning for each outlier of the defence, and one for params with few senders."""
    defence = record.defence
    for client, ratio in sorted(defence.far.items()) if defence else ():
        yield f"{client} lies {ratio:.4g} times as far from the rule's values as is usual"
    if defence and defence.thin:
        yield f"{defence.thin} params came from too few clients for the rule to bear a liar"
