# SPDX-License-Identifier: Apache-2.0
"""Grids: rows over rounds, each cell painted and, where there is room, with its word."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedplan.reports.figures.drawing import Box, Drawing, Shape, Words, shortened, width_of
from fedplan.reports.figures.palette import ink_on

TALL, GAP, HEAD = 22.0, 3.0, 22.0
LABEL = 170.0
"""The most room that names of rows get."""


@dataclass(frozen=True)
class GridCell:
    """What a row is from one round to another: paints with their shares, a word and a letter."""

    first: int
    last: int
    paints: tuple[tuple[str, float], ...]
    word: str
    letter: str = ""
    tip: str = ""


@dataclass(frozen=True)
class GridRow:
    """A row: its name, a note at its end, and its cells from left to right."""

    name: str
    cells: tuple[GridCell, ...]
    note: str = ""


def cell_grid(
    title: str,
    rows: Sequence[GridRow],
    *,
    rounds: int,
    legend: Mapping[str, str],
    row: str = "part",
    x: str = "round",
    width: float = 960,
) -> Drawing:
    """Rows from round 1 to the last one; `legend` says what each paint means."""
    left = min(LABEL, 18 + max((width_of(each.name) for each in rows), default=0.0))
    notes = max((width_of(each.note, 11) for each in rows), default=0.0)
    right = min(LABEL, 12 + notes) if notes else 2.0
    step = (width - left - right) / max(1, rounds)
    keys, top = _legend(legend, left, width)
    shapes = [*keys, *_rounds(rounds, left, step, top, x)]
    for number, each in enumerate(rows):
        y = top + HEAD + number * (TALL + GAP)
        name = shortened(each.name, left - 10)
        shapes.append(Words(left - 8, y + 15, name, anchor="end"))
        shapes += [shape for cell in each.cells for shape in _cell(cell, each.name, left, step, y)]
        if each.note:
            note = shortened(each.note, right - 8, 11)
            shapes.append(Words(width - right + 8, y + 15, note, "faint", size=11))
    height = top + HEAD + len(rows) * (TALL + GAP)
    told = [(r.name, c.first, c.last, c.word, c.tip) for r in rows for c in r.cells]
    return Drawing(
        title, width, height, tuple(shapes), (row, "first", "last", "is", "note"), tuple(told)
    )


def _cell(cell: GridCell, name: str, left: float, step: float, y: float) -> Iterator[Shape]:
    x, wide = left + (cell.first - 1) * step, (cell.last - cell.first + 1) * step
    wide = max(0.6, wide - min(2.0, step / 6))
    when = f"{cell.first}" if cell.first == cell.last else f"{cell.first} to {cell.last}"
    tip, whole, at = f"{name}, {when}: {cell.tip or cell.word}", sum(s for _, s in cell.paints), y
    for paint, share in cell.paints:
        tall = TALL * share / whole
        yield Box(x, at, wide, tall, paint, tip)
        at += tall
    for text in (cell.word, cell.letter):
        if text and width_of(text, 11) + 4 <= wide:
            paint = ink_on(cell.paints[0][0]) if len(cell.paints) == 1 else "ink"
            if len(cell.paints) > 1:
                # Words over two paints stand on paper of their own.
                half = width_of(text, 11) / 2 + 2
                yield Box(x + wide / 2 - half, y + 4, 2 * half, TALL - 8, "paper")
            yield Words(x + wide / 2, y + 15, text, paint, "middle", 11)
            return


def _legend(legend: Mapping[str, str], left: float, width: float) -> tuple[list[Shape], float]:
    """A key for each paint, in as many lines as it takes, and where they end."""
    shapes, x, y = list[Shape](), left, 0.0
    for paint, text in legend.items():
        wide = 18 + width_of(text, 11) + 16
        if x > left and x + wide > width:
            x, y = left, y + 18
        shapes += [Box(x, y, 12, 12, paint), Words(x + 18, y + 10, text, "faint", size=11)]
        x += wide
    return shapes, y + 20 if legend else 0.0


def _rounds(rounds: int, left: float, step: float, top: float, x: str) -> Iterator[Shape]:
    """The numbers of rounds, as many as fit."""
    yield Words(left - 8, top + 14, x, "faint", "end", 11)
    apart = next(n for n in _steps() if n * step >= 26 or n >= rounds)
    for number in sorted({1, *range(apart, rounds + 1, apart)} - ({apart} & {2})):
        yield Words(left + (number - 0.5) * step, top + 14, str(number), "faint", "middle", 11)


def _steps() -> Iterator[int]:
    size = 1
    while True:
        yield from (size, 2 * size, 5 * size)
        size *= 10
