# SPDX-License-Identifier: Apache-2.0
"""Counts of a table's columns by a data dictionary; a small count is joined with its neighbours.

The dictionary gives the cells of a column, never the data. Cells are joined in their fixed order
until each count covers a least number of people. So the counts leave as many successive numbers
possible for each joined cell, and 0 for one cell of each group.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

from fedplan.data.tables import (
    DataError,
    class_names,
    label_text,
    missing_cells,
    number_text,
    plain_cells,
)

if TYPE_CHECKING:
    from datasets import Dataset

ColumnType = Literal["number", "category", "text", "any"]
OTHER, MISSING = "(other)", "(missing)"
"""Cells of values that the dictionary does not describe, and of rows without a value."""


@dataclass(frozen=True)
class Column:
    """A column of a data dictionary.

    `codes`: the values of a category. `edges`: bounds of the bins of numbers, or of the lengths of
    texts, which are in characters or `in_words`. `minimum`, `maximum`: of numbers, both allowed.
    `required`: rows without a value do not match.
    """

    type: ColumnType
    codes: tuple[str, ...] = ()
    edges: tuple[float, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    required: bool = False
    in_words: bool = False

    @cached_property
    def bins(self) -> list[str]:
        """The names of the cells of values that match the dictionary."""
        if self.type in ("category", "any"):
            return [*self.codes] if self.type == "category" else ["(present)"]
        low, high = _bound_text(self.minimum), _bound_text(self.maximum)
        texts = [low, *map(_bound_text, self.edges), high]
        return [_bin_name(*ends) for ends in pairwise(texts)]

    @property
    def faults(self) -> dict[str, str]:
        """The other cells, each with the kind of its mismatch; "" if it is none."""
        low, high = self.minimum, self.maximum
        kind = {"number": "no number", "category": "another code"}.get(self.type, "no text")
        return {
            **({f"below {_bound_text(low)}": "out of range"} if low is not None else {}),
            **({f"above {_bound_text(high)}": "out of range"} if high is not None else {}),
            **({OTHER: kind} if self.type != "any" else {}),
            MISSING: "no value" if self.required else "",
        }

    @property
    def cells(self) -> list[str]:
        """The names of all cells, in the order in which small ones are joined."""
        return [*self.matching, *(cell for cell, kind in self.faults.items() if kind)]

    @property
    def matching(self) -> list[str]:
        """The names of the cells of rows that match the dictionary."""
        return [*self.bins, *(cell for cell, kind in self.faults.items() if not kind)]

    def cell(self, value: Any) -> str:
        """Return the name of the cell of a value, as text or number, that is not missing."""
        if self.type == "any":
            return "(present)"
        if self.type == "category":
            return label_text(value) if label_text(value) in self.codes else OTHER
        if self.type == "text":
            length = (len(value.split()) if self.in_words else len(value)) if value else 0
            return self.bins[bisect_right(self.edges, length)] if isinstance(value, str) else OTHER
        number = _number(value)
        if number is None:
            return OTHER
        if self.minimum is not None and number < self.minimum:
            return f"below {_bound_text(self.minimum)}"
        if self.maximum is not None and number > self.maximum:
            return f"above {_bound_text(self.maximum)}"
        return self.bins[bisect_right(self.edges, number)]


@dataclass(frozen=True)
class CountRule:
    """Which counts may leave: those of `min_count` people or more.

    `person`: the column that tells people apart; "" counts each row as a person. `show_zeros`:
    empty cells are shown as 0, so each joined cell is known to have a row.
    """

    min_count: int = 10
    show_zeros: bool = False
    person: str = ""

    @property
    def least(self) -> str:
        """The least count in words, as "10 people"; of rows without a column of people."""
        return f"{self.min_count} {'people' if self.person else 'rows'}"


@dataclass(frozen=True)
class CellGroup:
    """Cells of a column and their joint number of rows; None is of fewer people than the least."""

    cells: tuple[str, ...]
    count: int | None


@dataclass(frozen=True)
class TableStatistics:
    """Number of rows of a table, None if too small; groups of cells by column; absent columns.

    `differing`: columns in which as many people as the least count do not match the dictionary.
    """

    examples: int | None
    columns: Mapping[str, tuple[CellGroup, ...]]
    absent: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """Return the statistics as plain values."""
        columns = {
            name: [{"cells": [*group.cells], "count": group.count} for group in groups]
            for name, groups in self.columns.items()
        }
        names = {"absent": [*self.absent], "differing": [*self.differing]}
        return {"examples": self.examples, "columns": columns, **names}


def table_statistics(
    table: Dataset, columns: Mapping[str, Column], rule: CountRule
) -> TableStatistics:
    """Count the rows in the cells of each column, and join cells until `rule` allows each count.

    Raises DataError if the table has no column that tells people apart, and the rule needs one.
    """
    people: Sequence[Hashable] = range(len(table))
    if rule.person:
        ids = zip(plain_cells(table, rule.person), missing_cells(table, rule.person), strict=True)
        # Rows without a value are of one person: NaN is not equal to itself.
        people = [None if missing else label_text(cell) for cell, missing in ids]
    present = [name for name in columns if name in table.column_names]
    groups, differing = dict[str, tuple[CellGroup, ...]](), list[str]()
    for name in present:
        rows = dict[str, list[int]]({cell: [] for cell in columns[name].cells})
        for row, cell in enumerate(_cells_of_rows(table, name, columns[name])):
            rows[cell].append(row)
        joined, differs = join_cells(rows, people, rule, columns[name].matching)
        groups[name] = tuple(joined)
        differing += [name] * differs
    examples = len(table) if len({*people}) >= rule.min_count else None
    absent = tuple(name for name in columns if name not in present)
    return TableStatistics(examples, groups, absent, tuple(differing))


def mismatches(columns: Mapping[str, Column], statistics: TableStatistics) -> dict[str, list[str]]:
    """Return the kinds of mismatches with a dictionary, by column, as far as the counts show any.

    A count shows one if no cell of its group has values that match. Of a column that differs, and
    whose counts show no kind, all kinds are listed.
    """
    faults = {name: ["no such column"] for name in statistics.absent}
    for name, groups in statistics.columns.items():
        kinds = {cell: kind for cell, kind in columns[name].faults.items() if kind}
        counted = (group.cells for group in groups if group.count)
        shown = {kinds[cell]: 0 for cells in counted if {*cells} <= kinds.keys() for cell in cells}
        if not shown and name in statistics.differing:
            shown = dict.fromkeys(kinds.values(), 0)
        if shown:
            faults[name] = [*shown]
    return faults


def statistics_from_json(columns: Mapping[str, Column], fields: Any) -> TableStatistics:
    """Return the statistics of plain values; DataError if they do not follow the dictionary."""
    try:
        examples, absent = fields["examples"], tuple(fields["absent"])
        differing = tuple(fields["differing"])
        groups = {
            name: tuple(CellGroup(tuple(each["cells"]), each["count"]) for each in listed)
            for name, listed in fields["columns"].items()
        }
        counts = [examples, *(group.count for listed in groups.values() for group in listed)]
        is_valid = all(n is None or (type(n) is int and 0 <= n < 2**53) for n in counts)
        is_valid &= all(group.cells for listed in groups.values() for group in listed)
        is_valid &= sorted([*groups, *absent]) == sorted(columns) and {*differing} <= {*groups}
        is_valid &= all(
            sorted(cell for group in listed for cell in group.cells) == sorted(columns[name].cells)
            for name, listed in groups.items()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError("these are no statistics") from error
    if not is_valid:
        raise DataError("these statistics do not follow the data dictionary")
    return TableStatistics(examples, groups, absent, differing)


def pool_statistics(
    columns: Mapping[str, Column], tables: Iterable[TableStatistics]
) -> TableStatistics:
    """Return the sums of several tables; cells that one of these joins are joined.

    A table without a column, or with too few people to count it, counts as empty there. Columns
    that no table has are absent.
    """
    tables, pooled = list(tables), dict[str, tuple[CellGroup, ...]]()
    for name, column in columns.items():
        listed = [groups for t in tables if (groups := t.columns.get(name))]
        counted = [group for groups in listed for group in groups if group.count is not None]
        joined = {cell: [cell] for cell in column.cells}
        for group in counted:
            for cell in group.cells[1:]:
                first, other = joined[group.cells[0]], joined[cell]
                if first is not other:
                    first += other
                    joined |= dict.fromkeys(other, first)
        totals = dict.fromkeys(map(id, joined.values()), 0)
        for group in counted:
            totals[id(joined[group.cells[0]])] += group.count or 0
        parts = {id(cells): cells for cells in joined.values()}
        if listed:
            pooled[name] = tuple(
                CellGroup(tuple(sorted(cells, key=column.cells.index)), totals[key])
                for key, cells in parts.items()
            )
    examples = sum(table.examples or 0 for table in tables)
    return TableStatistics(examples, pooled, tuple(n for n in columns if n not in pooled))


def join_cells(
    rows: Mapping[str, Sequence[int]],
    people: Sequence[Hashable],
    rule: CountRule,
    matching: Iterable[str],
) -> tuple[list[CellGroup], bool]:
    """Return the cells in groups, `matching` ones first, and whether many people are in the others.

    If many are, the others get groups of their own, unless few people are in `matching` cells. The
    answer is False if the table has less than about twice the least count of people, since then few
    would be in `matching` cells; and where zeros are shown, whose groups are finer anyway.
    """
    parts: tuple[dict[str, Sequence[int]], ...] = ({}, {})
    names = {*matching}
    for cell, listed in rows.items():
        parts[cell not in names][cell] = listed
    others = {people[row] for listed in parts[1].values() for row in listed}
    differs = len(others) >= rule.min_count and len({*people}) >= 2 * rule.min_count - 1
    differs = differs and not rule.show_zeros
    apart = [_sweep(part, people, rule) for part in parts]
    if differs and all(groups[0].count is not None for groups in apart):
        return [*apart[0], *apart[1]], True
    return _sweep(rows, people, rule), differs


def _sweep(
    rows: Mapping[str, Sequence[int]], people: Sequence[Hashable], rule: CountRule
) -> list[CellGroup]:
    """Return the cells in groups: each ends with the cell that brings it to the least count.

    The cells that remain join the last group.
    """
    groups, cells, count, covered = list[CellGroup](), list[str](), 0, set[Hashable]()
    zeros = [cell for cell in rows if not rows[cell]] if rule.show_zeros else []
    for cell in (cell for cell in rows if cell not in zeros):
        cells.append(cell)
        count += len(rows[cell])
        covered |= {people[row] for row in rows[cell]}
        # Where zeros are shown, the others have a row each at least.
        sure = len(cells) - 1 if rule.show_zeros else 0
        if len(covered) - sure >= rule.min_count:
            groups.append(CellGroup(tuple(cells), count))
            cells, count, covered = [], 0, set[Hashable]()
    if not groups:  # zeros would reveal where the few people are
        return [CellGroup(tuple(rows), None)]
    if cells:
        last = groups.pop()
        groups.append(CellGroup((*last.cells, *cells), (last.count or 0) + count))
    return [*groups, *(CellGroup((cell,), 0) for cell in zeros)]


def _cells_of_rows(table: Dataset, name: str, column: Column) -> Iterable[str]:
    names = class_names(table, name)
    values: list[Any] = [None] * len(table)
    if column.type != "any":
        values = plain_cells(table, name)
    for value, missing in zip(values, missing_cells(table, name), strict=True):
        yield (
            MISSING
            if missing
            else column.cell(names[value] if names and value is not None else value)
        )


def _number(value: Any) -> float | None:
    """Return a number, or a text of one, as float; None for others, infinity and NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if isfinite(number) else None


def _bound_text(value: float | None) -> str:
    return "" if value is None else number_text(value)


def _bin_name(low: str, high: str) -> str:
    if low and high:
        return f"{low} to {high}"
    return f"below {high}" if high else f"{low} or more" if low else "(any)"
