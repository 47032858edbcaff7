# SPDX-License-Identifier: Apache-2.0
"""The last round in which each param may change, by the plan, for all classes of clients."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from fedplan.federation.agreement import Agreement
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import class_representatives, permitted_roles, rounds_to_check

Roster = Mapping[str, Mapping[str, str]]
"""Traits of every client by name."""


def class_turns(agreement: Agreement, roster: Roster, number: int, phase: str) -> list[Turn]:
    """Return one turn in round `number` for each class of clients that the plan distinguishes.

    Each turn has the name and traits of the class's first client in `roster`, and `phase`.
    """
    clients = class_representatives(agreement.method.plan, roster)
    return [Turn(number, name, phase, traits) for name, traits in clients]


def last_changing_rounds(agreement: Agreement, roster: Roster) -> dict[str, dict[str, float]]:
    """Return by phase, then by param key, the last round in which any client may share the param.

    Phases: "" and all phases of the agreement's phase rule. `roster`: traits of all clients by
    name. Assumes a run without end, since rounds may be added later: inf if the plan shares the
    param for ever. A param that is never shared in a phase is left out. If the plan has too many
    rounds to check, each phase has inf for all exchanged params.
    """
    plan, params, by_phase = agreement.method.plan, agreement.params, dict[str, dict[str, float]]()
    rounds = rounds_to_check(plan)
    for phase in ("", *agreement.method.phase_rule.phases):
        if rounds is None:
            by_phase[phase] = dict.fromkeys((p.key for p in agreement.exchanged), inf)
            continue
        distinct = {
            plan.active_steps(turn): (turn, inf if repeats else number)
            for number, repeats in rounds
            for turn in class_turns(agreement, roster, number, phase)
        }
        last_rounds = by_phase.setdefault(phase, {})
        for turn, last in distinct.values():
            roles = permitted_roles(plan, params, turn)
            for p in (p for p in params if roles[p] is Role.SHARE):
                last_rounds[p.key] = max(last, last_rounds.get(p.key, 0))
    return by_phase
