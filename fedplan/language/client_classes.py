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
    """The clients of a run: their traits by client name, and whether all take part each round."""

    roster: Mapping[str, Mapping[str, str]]
    full_participation: bool = True


def client_classes(plan: Plan, participants: Participants | None) -> list[tuple[str, Turn]]:
    """A label and a turn for each class of clients that a plan distinguishes.

    With `participants`, only the classes to which at least one of them belongs. A turn has the
    client name and the traits that the plan mentions, and the default round.
    """
    classes = _possible_classes(plan)
    if participants is None:
        return classes
    by_key = {_class_key(turn): (label, turn) for label, turn in classes}
    names, traits = _mentioned(plan)
    present = dict[tuple[object, ...], tuple[str, Turn]]()
    for name, client_traits in participants.roster.items():
        mentioned = {t: client_traits[t] for t in traits if client_traits.get(t, "") in traits[t]}
        key = _class_key(Turn(client=name if name in names else "", traits=mentioned))
        present[key] = by_key[key]
    return list(present.values())


def class_representatives(
    plan: Plan, roster: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, Mapping[str, str]]]:
    """The first client of the roster, with its traits, of each class that a plan distinguishes.

    If the plan mentions no client and no trait, only the first entry of the roster is read.
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


def _class_key(turn: Turn) -> tuple[object, ...]:
    return turn.client, *sorted(turn.traits.items())


def _mentioned(plan: Plan) -> tuple[list[str], dict[str, set[str]]]:
    """The client names that a plan mentions, sorted, and the mentioned values of each trait."""
    names = sorted({n for c in plan_conditions(plan) if isinstance(c, ClientIn) for n in c.names})
    traits: dict[str, set[str]] = {}
    for condition in plan_conditions(plan):
        if isinstance(condition, Trait):
            traits.setdefault(condition.name, set()).add(condition.value)
    for inner in plan.walk():
        if isinstance(inner, By):
            traits.setdefault(inner.trait, set()).update(value for value, _ in inner.cases)
    return names, traits


def _possible_classes(plan: Plan) -> list[tuple[str, Turn]]:
    """A label and a turn for every combination of the names and trait values of a plan.

    Each name and each trait also has the case "any other".
    """
    names, traits = _mentioned(plan)
    choices = [[(t, v) for v in (*sorted(values), "")] for t, values in sorted(traits.items())]
    return [
        (_label(name, pairs), Turn(client=name, traits={t: v for t, v in pairs if v}))
        for name, pairs in product((*names, ""), product(*choices))
    ]


def _label(name: str, traits: tuple[tuple[str, str], ...]) -> str:
    words = [name] if name else []
    return ", ".join(words + [f"{t} {v}" for t, v in traits if v]) or "any other client"


def phase_names(plan: Plan) -> list[str]:
    """The names of the phases that a plan mentions, sorted."""
    return sorted({c.name for c in plan_conditions(plan) if isinstance(c, Phase)})


def plan_conditions(plan: Plan) -> Iterator[Predicate[Turn]]:
    """Every elementary condition in a plan, in order of the text; one used twice comes twice."""
    for inner in plan.walk():
        if isinstance(inner, When):
            yield from inner.condition.atoms()
