# SPDX-License-Identifier: Apache-2.0
"""Horizons: the rounds that between them hold all that a plan will ever say."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from fedplan.language.plan import Cycle, Plan, When
from fedplan.language.turn import After

MANY = 2000
"""Rounds that are looked at: a plan with more of them is taken to say anything at any time."""


def rounds_ahead(plan: Plan) -> list[tuple[int, bool]] | None:
    """The last rounds of each stretch between two `after`, and whether they come back for ever.

    Within a stretch a plan says the same again after one turn of all its cycles: what is said in
    the last turn of a stretch is all that is said in it, and is said last there. None if there
    are too many.
    """
    ends, period = _ends(plan), _period(plan)
    if period * (len(ends) + 1) > MANY:
        return None
    found = list[tuple[int, bool]]()
    for start, end in zip((0, *ends), ends, strict=False):
        found += [(number, False) for number in range(max(start, end - period) + 1, end + 1)]
    last = ends[-1] if ends else 0
    return found + [(number, True) for number in range(last + 1, last + period + 1)]


def _ends(plan: Plan) -> list[int]:
    return sorted({after.rounds for after in _afters(plan) if after.rounds})


def _afters(plan: Plan) -> Iterator[After]:
    for each in plan.within():
        if isinstance(each, When):
            yield from (atom for atom in each.condition.atoms() if isinstance(atom, After))


def _period(plan: Plan) -> int:
    return lcm(*(len(each.plans) for each in plan.within() if isinstance(each, Cycle)))
