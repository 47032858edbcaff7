# SPDX-License-Identifier: Apache-2.0
"""The section of a report on the role of each part of the model in each round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from fedplan.federation.record import ROLE_BY_LETTER, ROLE_LETTERS
from fedplan.language.client_classes import client_classes
from fedplan.language.plan import Role
from fedplan.models.params import Param, Params
from fedplan.reports.explanation import sort_params
from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
from fedplan.reports.figures.palette import ROLE_PAINTS
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import PageFigure, PageSection
from fedplan.reports.units import millions

LEGEND = {
    "share": "S shared: trained and uploaded",
    "keep": "K kept: trained, personal",
    "freeze": "F frozen: not trained, the same for all clients",
    "hold": "H held: frozen, personal",
}
"""The legend of the roles' paints."""
TITLE = "Roles of model parts"


@dataclass(frozen=True)
class _Part:
    """The params of one row of the figure, by their indices in a ledger line's roles."""

    name: str
    places: tuple[int, ...]
    numel: int


def roles_section(facts: RunFacts, name: str = "") -> PageSection:
    """Return the section with the roles by part and round; `name` is added to the figure's title.

    Rows are kinds or blocks, whichever has fewer cells of mixed roles.
    """
    roles = _roles_by_round(facts)
    if not roles:
        return PageSection(TITLE)
    params = facts.agreement.params
    rows, (mixed, _) = min(
        (_rows(_parts(params, label(params)), params, roles) for label in (_by_kind, _by_block)),
        key=lambda result: result[1],
    )
    title = f"Roles by part and round{f', {name}' if name else ''}"
    rounds = max(facts.study.train.rounds, facts.run.round)
    used = {paint for row in rows for cell in row.cells for paint, _ in cell.paints}
    legend = {paint: text for paint, text in LEGEND.items() if paint in used}
    drawn = cell_grid(title, rows, rounds=rounds, legend=legend)
    caption = _caption(facts, mixed=bool(mixed))
    return PageSection(TITLE, figures=(PageFigure("roles", drawn, caption, wide=True),))


def _caption(facts: RunFacts, *, mixed: bool) -> str:
    """Return the caption; `mixed` says that some cells have several roles."""
    sentences = ["A row is a part of the model with its number of params; a column is a round."]
    if mixed:
        sentences.append(
            "A cell of several colours: its params, or the clients, have several roles."
        )
    if facts.client_level_dp:
        sentences.append(
            "Client-level differential privacy: shown are the roles that the plan permits."
        )
    elif _differ(facts):
        sentences.append("In some rounds clients had different roles.")
    else:
        sentences.append("In each round all clients had the same roles, by the ledger.")
    if facts.run.round < facts.study.train.rounds:
        sentences.append("Rounds that are not done yet are blank.")
    return " ".join(sentences)


def _differ(facts: RunFacts) -> bool:
    """Whether clients of one round had different roles."""
    return any(len({turn.roles for turn in turns}) > 1 for turns in facts.turns)


def _roles_by_round(facts: RunFacts) -> dict[int, Counter[str]]:
    """Return for each round the roles, a letter per param, and how many clients had them.

    Under client-level differential privacy they are those that the plan permits.
    """
    if not facts.client_level_dp:
        pairs = zip(facts.rounds, facts.turns, strict=True)
        return {r.round: Counter(turn.roles for turn in turns) for r, turns in pairs if turns}
    agreement, roles = facts.agreement, dict[int, Counter[str]]()
    for record in facts.rounds:
        classes = [t for _, t in client_classes(agreement.method.plan, None)]
        turns = (replace(turn, round=record.round, phase=record.phase) for turn in classes)
        letters = ("".join(ROLE_LETTERS[r] for r in agreement.permitted(t).values()) for t in turns)
        roles[record.round] = Counter(letters)
    return roles


def _by_kind(params: Params) -> Callable[[Param], str]:
    """Return a function that labels a param by its stack, if there are several, and kind."""
    stacks = len({p.stack for p in params if p.stack}) > 1
    return lambda p: f"{p.stack if stacks else ''} {p.kind}".strip()


def _by_block(params: Params) -> Callable[[Param], str]:
    """Return a function that labels a param by its block, or by its kind outside of blocks."""
    stacks, kinds = len({p.stack for p in params if p.stack}) > 1, _by_kind(params)
    return lambda p: (
        kinds(p) if p.block is None else f"{p.stack if stacks else ''} block {p.block}".strip()
    )


def _parts(params: Params, label: Callable[[Param], str]) -> list[_Part]:
    """Group params by their label, in the order of a model."""
    places = {p: i for i, p in enumerate(params)}
    groups = dict[str, list[Param]]()
    for param in sort_params(params):
        groups.setdefault(label(param), []).append(param)
    return [
        _Part(name, tuple(places[p] for p in ps), sum(p.numel for p in ps))
        for name, ps in groups.items()
    ]


def _rows(
    parts: Sequence[_Part], params: Params, roles: dict[int, Counter[str]]
) -> tuple[list[GridRow], tuple[int, int]]:
    """Return the rows of the figure, and its (rounds of mixed cells, rows), to choose the least."""
    rows = [
        GridRow(part.name, tuple(_cells(part, params, roles)), f"{millions(part.numel)} params")
        for part in parts
    ]
    mixed = sum(
        cell.last - cell.first + 1 for row in rows for cell in row.cells if len(cell.paints) > 1
    )
    return rows, (mixed, len(rows))


def _cells(part: _Part, params: Params, roles: dict[int, Counter[str]]) -> Iterator[GridCell]:
    """Yield a cell for each run of consecutive rounds in which a part has the same roles."""
    by_round = [(number, _shares(part, params, roles[number])) for number in sorted(roles)]
    # In consecutive rounds the difference of round and index stays the same.
    equal = groupby(enumerate(by_round), key=lambda each: (each[1][1], each[1][0] - each[0]))
    for (shares, _), run in equal:
        numbers = [number for _, (number, _) in run]
        words = " and ".join(role.word for role, _ in shares)
        letters = "".join(ROLE_LETTERS[role] for role, _ in shares)
        tip = ", ".join(f"{share:.0%} {role.word}" for role, share in shares)
        paints = tuple((ROLE_PAINTS[role], max(share, 0.15)) for role, share in shares)
        yield GridCell(numbers[0], numbers[-1], paints, words, letters, tip)


def _shares(part: _Part, params: Params, roles: Counter[str]) -> tuple[tuple[Role, float], ...]:
    """Return the share of a part's values that had each role, over all clients of a round."""
    counts = Counter[Role]()
    for letters, clients in roles.items():
        for place in part.places:
            counts[ROLE_BY_LETTER[letters[place]]] += clients * max(1, params[place].numel)
    total = counts.total()
    return tuple((role, round(counts[role] / total, 3)) for role in Role if counts[role])
