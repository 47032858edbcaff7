# SPDX-License-Identifier: Apache-2.0
"""The sections of a report that are grids over rounds: roles of model parts, and participation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fedplan.federation.ledger.records import ROLE_BY_LETTER, ROLE_LETTERS
from fedplan.language.plan import Role
from fedplan.language.resolution import client_classes
from fedplan.models.params import Param
from fedplan.reports.explanation import sort_params
from fedplan.reports.figures.drawing import ROLE_PAINTS
from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid, round_spans
from fedplan.reports.formats import millions
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import WIDTHS, PageBlock, PageFigure, PageSection, block

ROLES_TITLE = "Roles of model parts"
ROLE_LEGEND = {
    ROLE_PAINTS[Role.SHARE]: "S shared: trained and uploaded",
    ROLE_PAINTS[Role.KEEP]: "K kept: trained, personal",
    ROLE_PAINTS[Role.FREEZE]: "F frozen: not trained, the same for all clients",
    ROLE_PAINTS[Role.HOLD]: "H held: frozen, personal",
}
OUTCOMES = {
    "aggregated": ("good", "✓"),
    "late": ("warn", "L"),
    "dropped": ("grid", "D"),
    "refused": ("bad", "R"),
    "failed": ("bad", "F"),
    "rejected": ("bad", "X"),
}
"""The paint and letter of each outcome of a turn."""
OUTCOME_LEGEND = {
    "good": "✓ aggregated",
    "warn": "L late: answered, not aggregated",
    "grid": "D dropped out, no answer, or not requested",
    "bad": "R refused, F failed, X rejected",
}
BLANK = "Blank: the client was not sampled in the round, or the round is not done yet."
MAX_CLIENTS = 40
"""The most clients in the figure: those that were missing most often."""
MAX_REASONS = 12
"""The most reasons and the most warnings listed."""


def roles_section(facts: RunFacts, name: str = "") -> PageSection:
    """Return the section with the roles of a run by part and round; empty before the first turn.

    The rows are kinds of params, or blocks, whichever gives fewer cells with several roles.
    """
    roles = _roles_by_round(facts)
    if not roles:
        return PageSection(ROLES_TITLE)
    tables = [_role_rows(facts, roles, by_block=by_block) for by_block in (False, True)]
    rows, (mixed, _) = min(tables, key=lambda table: table[1])
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
    title = f"Roles by part and round{f', {name}' if name else ''}"
    figure = _grid_figure(facts, "roles", title, rows, ROLE_LEGEND, "part", " ".join(texts))
    return PageSection(ROLES_TITLE, figures=(figure,))


def participation_section(facts: RunFacts) -> PageSection:
    """Return the section on the clients of each round, and the reasons of those not aggregated.

    Empty before round 1 is closed; under client-level differential privacy it only says why.
    """
    title = "Participation"
    if not facts.rounds:
        return PageSection(title)
    if facts.client_level_dp:
        text = "client-level differential privacy protects who was sampled and took part."
        return PageSection(title, (f"Not shown: {text}",))
    outcomes = dict[str, dict[int, str]]({client: {} for client in facts.roster})
    for record in facts.rounds:
        for client in record.aggregated:
            outcomes.setdefault(client, {})[record.round] = "aggregated"
        for client, why in record.rejected.items():
            outcomes.setdefault(client, {})[record.round] = turn_outcome(why)
    counts = {client: Counter(rounds.values()) for client, rounds in outcomes.items()}
    total = sum(counts.values(), Counter[str]())
    texts = ", ".join(f"{total[outcome]} {outcome}" for outcome in OUTCOMES if total[outcome])
    missing = {client: each.total() - each["aggregated"] for client, each in counts.items()}
    most_missing = set(sorted(outcomes, key=lambda client: -missing[client])[:MAX_CLIENTS])
    rows = list[GridRow]()
    for client in [each for each in outcomes if each in most_missing]:
        cells = list[GridCell]()
        for first, last, outcome in round_spans(outcomes[client]):
            paint, letter = OUTCOMES[outcome]
            cells.append(GridCell(first, last, ((paint, 1.0),), outcome, letter))
        rows.append(GridRow(client, tuple(cells)))
    some = f"The {MAX_CLIENTS} of {len(outcomes)} clients that were missing most often. "
    caption = (some if len(outcomes) > MAX_CLIENTS else "") + BLANK
    figure = _grid_figure(
        facts, "participation", "Clients by round", rows, OUTCOME_LEGEND, "client", caption
    )
    text = f"Turns over {len(facts.rounds)} rounds: {texts}."
    return PageSection(title, (text,), (figure,), tuple(_reasons(facts)))


def turn_outcome(why: str) -> str:
    """Return the outcome of a turn that was not aggregated, from the reason `why` in the ledger."""
    if why == "late" or why.startswith("late, and "):
        return "late"
    if why == "dropped" or why.startswith(("no answer", "not requested")):
        return "dropped"
    if why.startswith("refused"):
        return "refused"
    return "failed" if why.startswith("failed") else "rejected"


def _grid_figure(
    facts: RunFacts,
    name: str,
    title: str,
    rows: Sequence[GridRow],
    legend: Mapping[str, str],
    row: str,
    caption: str,
) -> PageFigure:
    """Return a grid over all rounds of a run, with those entries of a legend that its cells use."""
    used = {paint for line in rows for cell in line.cells for paint, _ in cell.paints}
    legend = {paint: text for paint, text in legend.items() if paint in used}
    rounds = max(facts.study.train.rounds, facts.run.round)
    wide, narrow = (
        cell_grid(title, rows, rounds=rounds, legend=legend, row=row, width=width)
        for width in WIDTHS
    )
    return PageFigure(name, wide, narrow, caption)


def _roles_by_round(facts: RunFacts) -> dict[int, Counter[str]]:
    """Count, for each round with turns, how many clients had which roles (a letter per param).

    Under client-level differential privacy, of the roles that the plan permits for each class.
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


def _role_rows(
    facts: RunFacts, roles: Mapping[int, Counter[str]], *, by_block: bool
) -> tuple[list[GridRow], tuple[int, int]]:
    """Return the rows of the figure, and (mixed rounds, number of rows); the lower is clearer.

    A row is a kind of params; with `by_block`, a block, or a kind of params outside of blocks. A
    cell shows the share of values that had each role, over all clients; mixed rounds are those of
    cells with several roles.
    """
    params = facts.agreement.params
    places, groups = {p: i for i, p in enumerate(params)}, dict[str, list[Param]]()
    stacks = len({p.stack for p in params if p.stack}) > 1
    for p in sort_params(params):
        name = f"block {p.block}" if by_block and p.block is not None else p.kind
        groups.setdefault(f"{p.stack if stacks else ''} {name}".strip(), []).append(p)
    rows, mixed = list[GridRow](), 0
    for name, ps in groups.items():
        by_round = dict[int, tuple[tuple[Role, float], ...]]()
        for number, clients_by_roles in roles.items():
            counts = Counter[Role]()
            for letters, clients in clients_by_roles.items():
                for p in ps:
                    counts[ROLE_BY_LETTER[letters[places[p]]]] += clients * max(1, p.numel)
            total = counts.total()
            by_round[number] = tuple(
                (role, round(counts[role] / total, 3)) for role in Role if counts[role]
            )
        cells = list[GridCell]()
        for first, last, shares in round_spans(by_round):
            words = " and ".join(role.word for role, _ in shares)
            letters = "".join(ROLE_LETTERS[role] for role, _ in shares)
            tip = ", ".join(f"{share:.0%} {role.word}" for role, share in shares)
            paints = tuple((ROLE_PAINTS[role], max(share, 0.15)) for role, share in shares)
            cells.append(GridCell(first, last, paints, words, letters, tip))
            mixed += (last - first + 1) * (len(shares) > 1)
        rows.append(GridRow(name, tuple(cells), f"{millions(sum(p.numel for p in ps))} params"))
    return rows, (mixed, len(rows))


def _reasons(facts: RunFacts) -> Iterator[PageBlock]:
    """Yield lists of the most frequent reasons of updates not aggregated, and of warnings."""
    reasons = Counter(
        f"{client}: {reason}"
        for record in facts.rounds
        for client, reason in record.rejected.items()
        if turn_outcome(reason) not in ("late", "dropped")
    )
    if reasons:
        items = [f"{text} ({times} times)" for text, times in reasons.most_common(MAX_REASONS)]
        yield block("bullets", title="Reasons of updates not aggregated", items=items)
    warnings = [f"round {r.round}: {text}" for r in facts.rounds for text in r.warnings]
    if warnings:
        yield block("bullets", title="Warnings", items=warnings[:MAX_REASONS])
    more = max(0, len(reasons) - MAX_REASONS) + max(0, len(warnings) - MAX_REASONS)
    if more:
        yield block("note", text=f"And {more} more: the ledger has all of them.")
