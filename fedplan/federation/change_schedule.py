# SPDX-License-Identifier: Apache-2.0
"""The last round in which each param may change, by the plan, for all classes of clients."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from fedplan.federation.agreement import Agreement
from fedplan.language.client_classes import class_representatives
from fedplan.language.plan import Role
from fedplan.language.resolution import permitted_roles
from fedplan.language.schedule import rounds_to_check
from fedplan.language.turn import Turn

Roster = Mapping[str, Mapping[str, str]]
"""Traits of every client by name."""


def class_turns(agreement: Agreement, roster: Roster, number: int, phase: str) -> list[Turn]:
    """Return one turn for each class of clients that the plan distinguishes, in a round."""
    clients = class_representatives(agreement.method.plan, roster)
    return [Turn(number, name, phase, traits) for name, traits in clients]


def last_changing_rounds(agreement: Agreement, roster: Roster) -> dict[str, dict[str, float]]:
    """Return by phase the last round that may change each key, in a run without end.

    Without end, since rounds may be added to a run later; inf if there is no last round.
    """
    phases = ("", *agreement.method.phase_rule.phases)
    return {phase: _last_rounds_of(agreement, roster, phase) for phase in phases}


def _last_rounds_of(agreement: Agreement, roster: Roster, phase: str) -> dict[str, float]:
    """Return the last round that may change each key in a phase; inf if there is no last."""
    plan, params = agreement.method.plan, agreement.params
    rounds = rounds_to_check(plan)
    if rounds is None:
        return dict.fromkeys((p.key for p in agreement.exchanged), inf)
    distinct = {
        plan.active_steps(turn): (turn, inf if repeats else number)
        for number, repeats in rounds
        for turn in class_turns(agreement, roster, number, phase)
    }
    last_rounds = dict[str, float]()
    for turn, last in distinct.values():
        roles = permitted_roles(plan, params, turn)
        shared = [p.key for p in params if roles[p] is Role.SHARE]
        last_rounds |= {key: max(last, last_rounds.get(key, 0)) for key in shared}
    return last_rounds
