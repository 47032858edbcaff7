# SPDX-License-Identifier: Apache-2.0
"""The schedule of a plan: a finite list of rounds that covers everything the plan will ever do."""

from __future__ import annotations

from math import lcm

from fedplan.language.client_classes import plan_conditions
from fedplan.language.plan import Cycle, Plan
from fedplan.language.turn import After

MAX_ROUNDS_CHECKED = 2000
"""Most rounds that are checked one by one; with more, a plan counts as unpredictable."""


def rounds_to_check(plan: Plan) -> list[tuple[int, bool]] | None:
    """Return rounds that cover all behaviour of a plan, as pairs (number, whether it recurs).

    Between two `after` conditions a plan repeats with the common period of all cycles, so the last
    period before each `after` is enough. Also the first period after the last `after`; its rounds
    recur, as they stand for all later rounds. None if that may be more than MAX_ROUNDS_CHECKED.
    """
    ends = sorted({c.rounds for c in plan_conditions(plan) if isinstance(c, After) and c.rounds})
    period = lcm(*(len(inner.plans) for inner in plan.walk() if isinstance(inner, Cycle)))
    if period * (len(ends) + 1) > MAX_ROUNDS_CHECKED:
        return None
    rounds = list[tuple[int, bool]]()
    for start, end in zip((0, *ends), ends, strict=False):
        rounds += [(number, False) for number in range(max(start, end - period) + 1, end + 1)]
    last = ends[-1] if ends else 0
    return rounds + [(number, True) for number in range(last + 1, last + period + 1)]
