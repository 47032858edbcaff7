# SPDX-License-Identifier: Apache-2.0
"""Crowds: who takes part in a run, and the kinds of clients and phases that a plan tells apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product

from fedplan.language.plan import By, Plan, When
from fedplan.language.predicates import Predicate
from fedplan.language.turn import ClientIn, Phase, Trait, Turn


@dataclass(frozen=True)
class Crowd:
    """Who takes part in a run, each with its traits, and whether everyone does in each round."""

    roster: Mapping[str, Mapping[str, str]]
    everyone: bool = True


def kinds_of(plan: Plan, crowd: Crowd | None) -> list[tuple[str, Turn]]:
    """One turn for each kind of client that a plan tells apart, of those that there are."""
    known = _clients(plan)
    return known if crowd is None else _present(plan, known, crowd.roster)


def told_apart(
    plan: Plan, roster: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, Mapping[str, str]]]:
    """One client, with its traits, of each kind that a plan tells apart: the first of the roster.

    Where a plan names no client and no trait, all are alike, and nobody is looked at.
    """
    names, traits = _named(plan)
    if not names and not traits:
        return list(islice(roster.items(), 1))
    found, named = dict[tuple[str, ...], tuple[str, Mapping[str, str]]](), set(names)
    for name, held in roster.items():
        said = (value if (value := held.get(t, "")) in traits[t] else "" for t in traits)
        found.setdefault((name if name in named else "", *said), (name, held))
    return list(found.values())


def _present(
    plan: Plan, kinds: list[tuple[str, Turn]], roster: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, Turn]]:
    known = {_asked(turn): (who, turn) for who, turn in kinds}
    names, traits = _named(plan)
    found = dict[tuple[object, ...], tuple[str, Turn]]()
    for name, held in roster.items():
        said = {t: held[t] for t in traits if held.get(t, "") in traits[t]}
        kind = _asked(Turn(client=name if name in names else "", traits=said))
        found[kind] = known[kind]
    return list(found.values())


def _asked(turn: Turn) -> tuple[object, ...]:
    return turn.client, *sorted(turn.traits.items())


def _named(plan: Plan) -> tuple[list[str], dict[str, set[str]]]:
    """The clients that a plan names, and the values of traits that it tells apart."""
    names = sorted({n for c in conditions(plan) if isinstance(c, ClientIn) for n in c.names})
    traits: dict[str, set[str]] = {}
    for c in conditions(plan):
        if isinstance(c, Trait):
            traits.setdefault(c.name, set()).add(c.value)
    for p in plan.within():
        if isinstance(p, By):
            traits.setdefault(p.trait, set()).update(value for value, _ in p.cases)
    return names, traits


def _clients(plan: Plan) -> list[tuple[str, Turn]]:
    """One turn for each kind of client that a plan tells apart."""
    names, traits = _named(plan)
    said = [[(t, v) for v in (*sorted(values), "")] for t, values in sorted(traits.items())]
    return [
        (_who(name, held), Turn(client=name, traits={t: v for t, v in held if v}))
        for name, held in product((*names, ""), product(*said))
    ]


def _who(name: str, held: tuple[tuple[str, str], ...]) -> str:
    words = [name] if name else []
    return ", ".join(words + [f"{t} {v}" for t, v in held if v]) or "any other client"


def phases_in(plan: Plan) -> list[str]:
    """The phases that a plan speaks of."""
    return sorted({c.name for c in conditions(plan) if isinstance(c, Phase)})


def conditions(plan: Plan) -> Iterator[Predicate[Turn]]:
    """Every condition that a plan speaks of."""
    for each in plan.within():
        if isinstance(each, When):
            yield from each.condition.atoms()
