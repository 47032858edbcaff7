# SPDX-License-Identifier: Apache-2.0
"""Client classes: groups of clients that a plan treats alike, by name or by traits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product

from fedplan.language.plan import By, Plan, When
from fedplan.language.predicates import Predicate
from fedplan.language.turn import ClientIn, Phase, Trait, Turn


@dataclass(frozen=True)
class Participants:
    """The clients of a run: `roster` has the traits of each client by name.

    `full_participation`: whether all clients take part in each round.
    """

    roster: Mapping[str, Mapping[str, str]]
    full_participation: bool = True


def client_classes(plan: Plan, participants: Participants | None) -> list[tuple[str, Turn]]:
    """Return (label, turn) for each class of clients that a plan distinguishes.

    A class is one combination of the client names and trait values that the plan mentions, where
    each may also be "any other". With `participants`, only classes with at least one of these
    clients; None gives all. A turn has the class's client name and traits, and the default round.
    """
    names, traits = _mentioned(plan)
    choices = [[(t, v) for v in (*sorted(values), "")] for t, values in sorted(traits.items())]
    classes = dict[tuple[object, ...], tuple[str, Turn]]()
    for name, pairs in product((*names, ""), product(*choices)):
        named = {t: v for t, v in pairs if v}
        words = ([name] if name else []) + [f"{t} {v}" for t, v in named.items()]
        label = ", ".join(words) or "any other client"
        classes[name, *sorted(named.items())] = label, Turn(client=name, traits=named)
    if participants is None:
        return list(classes.values())
    present = dict[tuple[object, ...], tuple[str, Turn]]()
    for name, client_traits in participants.roster.items():
        mentioned = {t: client_traits[t] for t in traits if client_traits.get(t, "") in traits[t]}
        key = (name if name in names else "", *sorted(mentioned.items()))
        present[key] = classes[key]
    return list(present.values())


def class_representatives(
    plan: Plan, roster: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, Mapping[str, str]]]:
    """Return (name, traits) of the first client of each class that a plan distinguishes.

    `roster`: traits by client name. If the plan mentions no client and no trait, the result is the
    first client of the roster.
    """
    names, traits = _mentioned(plan)
    if not names and not traits:
        return list(islice(roster.items(), 1))
    first, mentioned_names = dict[tuple[str, ...], tuple[str, Mapping[str, str]]](), set(names)
    for name, client_traits in roster.items():
        values = (v if (v := client_traits.get(t, "")) in traits[t] else "" for t in traits)
        key = (name if name in mentioned_names else "", *values)
        first.setdefault(key, (name, client_traits))
    return list(first.values())


def _mentioned(plan: Plan) -> tuple[list[str], dict[str, set[str]]]:
    """Return (sorted client names that a plan mentions, mentioned values of each trait)."""
    names = sorted({n for c in plan_conditions(plan) if isinstance(c, ClientIn) for n in c.names})
    traits: dict[str, set[str]] = {}
    for condition in plan_conditions(plan):
        if isinstance(condition, Trait):
            traits.setdefault(condition.name, set()).add(condition.value)
    for inner in plan.walk():
        if isinstance(inner, By):
            traits.setdefault(inner.trait, set()).update(value for value, _ in inner.cases)
    return names, traits


def phase_names(plan: Plan) -> list[str]:
    """Return the names of the phases that a plan mentions, sorted."""
    return sorted({c.name for c in plan_conditions(plan) if isinstance(c, Phase)})


def plan_conditions(plan: Plan) -> Iterator[Predicate[Turn]]:
    """Yield every elementary condition of a plan in order of the text; repeated ones repeatedly."""
    for inner in plan.walk():
        if isinstance(inner, When):
            yield from inner.condition.atoms()
