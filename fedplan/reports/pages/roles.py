# SPDX-License-Identifier: Apache-2.0
"""Roles: a model by its parts and a run by its rounds, and what each part was in each round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fedplan.federation.record import LETTERS, ROLES
from fedplan.language.crowds import kinds_of
from fedplan.language.plan import Role
from fedplan.models.params import Param, Params
from fedplan.reports.explanation import in_order
from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import PageSection, Shown
from fedplan.reports.units import millions

PAINTS = {role: role.name.lower() for role in Role}
LEGEND = {
    "share": "S shared: trained, and sent",
    "keep": "K kept: trained, stays with the client",
    "freeze": "F frozen: not trained, the same for all",
    "hold": "H held: the client's own, at rest",
}


@dataclass(frozen=True)
class _Part:
    """Params that stand in one row, by their places in a line of the ledger."""

    name: str
    places: tuple[int, ...]
    numel: int


def roles_section(facts: RunFacts, name: str = "") -> PageSection:
    """The model with its roles by part and round."""
    said = _said(facts)
    if not said:
        return PageSection("The model, part by part")
    params = facts.agreement.params
    rows, (mixed, _) = min(
        (_rows(_parts(params, label(params)), params, said) for label in (_by_kind, _by_block)),
        key=lambda found: found[1],
    )
    title = f"Roles by part and round{f', {name}' if name else ''}"
    rounds = max(facts.study.train.rounds, facts.run.round)
    used = {paint for row in rows for cell in row.cells for paint, _ in cell.paints}
    legend = {paint: text for paint, text in LEGEND.items() if paint in used}
    drawn = cell_grid(title, rows, rounds=rounds, legend=legend)
    caption = _caption(facts, mixed=bool(mixed))
    shown = Shown("roles", drawn, caption, whole=True)
    return PageSection("The model, part by part", figures=(shown,))


def _caption(facts: RunFacts, *, mixed: bool) -> str:
    words = ["A row is a part of the model, with its params; a column is a round."]
    if mixed:
        words.append("Where a cell has two paints, its params or its clients have several roles.")
    if facts.hides_clients:
        words.append("Clients are hidden: this is what the plan permits, whoever was there.")
    elif _differ(facts):
        words.append("Clients differ: in some rounds two of them had different roles.")
    else:
        words.append("In each round all clients had the same roles, as the ledger has them.")
    if facts.run.round < facts.study.train.rounds:
        words.append("Rounds that are not closed are blank.")
    return " ".join(words)


def _differ(facts: RunFacts) -> bool:
    return any(len({turn.roles for turn in held}) > 1 for held in facts.turns)


def _said(facts: RunFacts) -> dict[int, Counter[str]]:
    """Of each round, the roles of clients, a letter a param, and how many had them."""
    if not facts.hides_clients:
        told = zip(facts.rounds, facts.turns, strict=True)
        return {r.round: Counter(turn.roles for turn in held) for r, held in told if held}
    agreement, found = facts.agreement, dict[int, Counter[str]]()
    for record in facts.rounds:
        turns = [t for _, t in kinds_of(agreement.method.plan, None)]
        told = (replace(turn, round=record.round, phase=record.phase) for turn in turns)
        letters = ("".join(LETTERS[r] for r in agreement.permitted(t).values()) for t in told)
        found[record.round] = Counter(letters)
    return found


def _by_kind(params: Params) -> Callable[[Param], str]:
    stacks = len({p.stack for p in params if p.stack}) > 1
    return lambda p: f"{p.stack if stacks else ''} {p.kind}".strip()


def _by_block(params: Params) -> Callable[[Param], str]:
    stacks, kinds = len({p.stack for p in params if p.stack}) > 1, _by_kind(params)
    return lambda p: (
        kinds(p) if p.block is None else f"{p.stack if stacks else ''} block {p.block}".strip()
    )


def _parts(params: Params, label: Callable[[Param], str]) -> list[_Part]:
    places = {p: i for i, p in enumerate(params)}
    held = dict[str, list[Param]]()
    for param in in_order(params):
        held.setdefault(label(param), []).append(param)
    return [
        _Part(name, tuple(places[p] for p in ps), sum(p.numel for p in ps))
        for name, ps in held.items()
    ]


def _rows(
    parts: Sequence[_Part], params: Params, said: dict[int, Counter[str]]
) -> tuple[list[GridRow], tuple[int, int]]:
    """The rows of a grid, and how little it tells: cells of several roles, then rows."""
    rows = [
        GridRow(part.name, tuple(_cells(part, params, said)), f"{millions(part.numel)} params")
        for part in parts
    ]
    mixed = sum(
        cell.last - cell.first + 1 for row in rows for cell in row.cells if len(cell.paints) > 1
    )
    return rows, (mixed, len(rows))


def _cells(part: _Part, params: Params, said: dict[int, Counter[str]]) -> Iterator[GridCell]:
    """Rounds that say the same of a part, as one cell."""
    told = [(number, _shares(part, params, said[number])) for number in sorted(said)]
    # Rounds that follow each other are as far from their places as the first of them is.
    alike = groupby(enumerate(told), key=lambda each: (each[1][1], each[1][0] - each[0]))
    for (shares, _), found in alike:
        held = [number for _, (number, _) in found]
        words = " and ".join(role.word for role, _ in shares)
        letters = "".join(LETTERS[role] for role, _ in shares)
        tip = ", ".join(f"{share:.0%} {role.word}" for role, share in shares)
        paints = tuple((PAINTS[role], max(share, 0.15)) for role, share in shares)
        yield GridCell(held[0], held[-1], paints, words, letters, tip)


def _shares(part: _Part, params: Params, said: Counter[str]) -> tuple[tuple[Role, float], ...]:
    """How much of a part had each role, over all clients of a round."""
    held = Counter[Role]()
    for letters, clients in said.items():
        for place in part.places:
            held[ROLES[letters[place]]] += clients * max(1, params[place].numel)
    whole = held.total()
    return tuple((role, round(held[role] / whole, 3)) for role in Role if held[role])
