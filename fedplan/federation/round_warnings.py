# SPDX-License-Identifier: Apache-2.0
"""Warnings of a round, which follow from its ledger records alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
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
    """Return the warnings of a round as sentences; empty if all is usual.

    Warns of a client with most of the weight, of kinds of params with a jump of drift, of outliers
    of the defence, and of params with too few senders for the defence. `record`, `turns`: the
    ledger's records of the round. `earlier`: drift of the last DRIFT_WINDOW rounds before. The
    sentences are part of the ledger, and an audit recomputes them.
    """
    warnings, counted = list[str](), set(record.aggregated)
    weights = {turn.client: turn.weight for turn in turns if turn.client in counted}
    if len(weights) >= 2:
        ranked = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
        (client, largest), (_, second) = ranked[:2]
        share = largest / sum(weights.values())
        if share > DOMINANT_SHARE and largest > DOMINANT_RATIO * second:
            warnings.append(f"{client} reports {share:.3f} of the round's weight")
    for kind, (drift, _) in sorted(record.drift.items()):
        past = [by_kind[kind][0] for by_kind in earlier if kind in by_kind]
        reference = median(past) if len(past) >= MIN_DRIFT_ROUNDS else 0.0
        if reference and drift > DRIFT_JUMP * reference:
            times = f"{drift / reference:.1f} times"
            warnings.append(f"the drift of {kind} is {times} that of the last rounds")
    if (defence := record.defence) is not None:
        for client, ratio in sorted(defence.distance.items()):
            distance = f"{ratio:.4g} times as far"
            warnings.append(f"{client} lies {distance} from the rule's values as is usual")
        if defence.undefended:
            few = f"{defence.undefended} params came from too few clients"
            warnings.append(f"{few} for the rule to tolerate a malicious client")
    return tuple(warnings)
