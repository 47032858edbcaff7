# SPDX-License-Identifier: Apache-2.0
"""The section of a report on the role of each part of the model in each round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from fedplan.federation.ledger.records import ROLE_BY_LETTER, ROLE_LETTERS
from fedplan.language.plan import Role
from fedplan.language.resolution import client_classes
from fedplan.models.params import Param, Params
from fedplan.reports.explanation import sort_params
from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
from fedplan.reports.figures.palette import ROLE_PAINTS
from fedplan.reports.formats import millions
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import PageFigure, PageSection

LEGEND = {
    "share": "S shared: trained and uploaded",
    "keep": "K kept: trained, personal",
    "freeze": "F frozen: not trained, the same for all clients",
    "hold": "H held: frozen, personal",
}
"""The legend of the roles' paints."""
TITLE = "Roles of model parts"


def roles_section(facts: RunFacts, name: str = "") -> PageSection:
    """Return the section with the roles of a run by part and round; empty before the first turn.

    The rows are kinds of params, or blocks, whichever gives fewer cells with several roles. `name`
    is added to the figure's title.
    """
    roles, params = _roles_by_round(facts), facts.agreement.params
    if not roles:
        return PageSection(TITLE)
    tables = [_rows(params, roles, by_block=by_block) for by_block in (False, True)]
    rows, (mixed, _) = min(tables, key=lambda table: table[1])
    title = f"Roles by part and round{f', {name}' if name else ''}"
    rounds = max(facts.study.train.rounds, facts.run.round)
    used = {paint for row in rows for cell in row.cells for paint, _ in cell.paints}
    legend = {paint: text for paint, text in LEGEND.items() if paint in used}
    drawn = cell_grid(title, rows, rounds=rounds, legend=legend)
    texts = ["A row is a part of the model with its number of params; a column is a round."]
    if mixed:
        texts.append("A cell of several colours: its params, or the clients, have several roles.")
    if facts.client_level_dp:
        texts.append(
            "Client-level differential privacy: shown are the roles that the plan permits."
        )
    elif any(len({turn.roles for turn in turns}) > 1 for turns in facts.turns):
        texts.append("In some rounds clients had different roles.")
    else:
        texts.append("In each round all clients had the same roles, by the ledger.")
    if facts.run.round < facts.study.train.rounds:
        texts.append("Rounds that are not done yet are blank.")
    figure = PageFigure("roles", drawn, " ".join(texts), wide=True)
    return PageSection(TITLE, figures=(figure,))


def _roles_by_round(facts: RunFacts) -> dict[int, Counter[str]]:
    """Count, for each round with turns, how many clients had which roles.

    The result is by round, then by roles: a text with a letter of ROLE_LETTERS per param, in the
    order of the agreement's params. Under client-level differential privacy, counts the roles that
    the plan permits for each class of clients instead.
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


def _rows(
    params: Params, roles: dict[int, Counter[str]], *, by_block: bool
) -> tuple[list[GridRow], tuple[int, int]]:
    """Return the rows of the figure, and (mixed rounds, number of rows); the lower is clearer.

    A row is a kind of params; with `by_block`, a block, or a kind of params outside of blocks. In a
    model with several stacks each stack has rows of its own. A cell spans one or more rounds of a
    row; mixed rounds are the rounds of all cells with several roles, added up over all rows.
    `roles` are from `_roles_by_round`.
    """
    places, groups = {p: i for i, p in enumerate(params)}, dict[str, list[Param]]()
    stacks = len({p.stack for p in params if p.stack}) > 1
    for p in sort_params(params):
        name = f"block {p.block}" if by_block and p.block is not None else p.kind
        groups.setdefault(f"{p.stack if stacks else ''} {name}".strip(), []).append(p)
    rows = list[GridRow]()
    for name, ps in groups.items():
        cells = _cells([(places[p], max(1, p.numel)) for p in ps], roles)
        rows.append(GridRow(name, tuple(cells), f"{millions(sum(p.numel for p in ps))} params"))
    mixed = [cell for row in rows for cell in row.cells if len(cell.paints) > 1]
    return rows, (sum(cell.last - cell.first + 1 for cell in mixed), len(rows))


def _cells(weights: list[tuple[int, int]], roles: dict[int, Counter[str]]) -> Iterator[GridCell]:
    """Yield a cell for each run of consecutive rounds in which a row's roles stay the same.

    `weights` has (index in the roles, number of values) of each param in the row; `roles` are from
    `_roles_by_round`. A cell shows the share of values that had each role, over all clients.
    """
    by_round = list[tuple[int, tuple[tuple[Role, float], ...]]]()
    for number in sorted(roles):
        counts = Counter[Role]()
        for letters, clients in roles[number].items():
            for place, numel in weights:
                counts[ROLE_BY_LETTER[letters[place]]] += clients * numel
        total = counts.total()
        shares = tuple((role, round(counts[role] / total, 3)) for role in Role if counts[role])
        by_round.append((number, shares))
    # In consecutive rounds the difference of round and index stays the same.
    equal = groupby(enumerate(by_round), key=lambda each: (each[1][1], each[1][0] - each[0]))
    for (shares, _), run in equal:
        numbers = [number for _, (number, _) in run]
        words = " and ".join(role.word for role, _ in shares)
        letters = "".join(ROLE_LETTERS[role] for role, _ in shares)
        tip = ", ".join(f"{share:.0%} {role.word}" for role, share in shares)
        paints = tuple((ROLE_PAINTS[role], max(share, 0.15)) for role, share in shares)
        yield GridCell(numbers[0], numbers[-1], paints, words, letters, tip)
