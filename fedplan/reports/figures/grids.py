# SPDX-License-Identifier: Apache-2.0
"""Grids of rows over rounds: coloured cells, with a word where there is room."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from fedplan.reports.figures.drawing import (
    Box,
    Drawing,
    Shape,
    TextLabel,
    text_width,
    truncate_text,
)
from fedplan.reports.figures.palette import text_paint

ROW_HEIGHT, GAP, HEADER = 22.0, 3.0, 22.0
"""The height of a row, the gap between rows, and the height of the round numbers."""
MAX_LABEL_WIDTH = 170.0
"""The most room for names and for notes of rows."""


@dataclass(frozen=True)
class GridCell:
    """A cell of a row, from round `first` to round `last`.

    `paints` are (colour, share of the height) of stripes, from the top. `word` is written into the
    cell, or `letter` if the word is too wide, or nothing; a pointer shows `tip`.
    """

    first: int
    last: int
    paints: tuple[tuple[str, float], ...]
    word: str
    letter: str = ""
    tip: str = ""


@dataclass(frozen=True)
class GridRow:
    """A row called `name` of cells that do not overlap, with a `note` at its end."""

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
    """Return a drawing of rows of cells over rounds 1 to `rounds`, with a legend.

    `legend` maps paints to texts; `row` names the first column of the CSV, `x` the axis; `width` is
    in pixels.
    """
    left = min(MAX_LABEL_WIDTH, 18 + max((text_width(line.name) for line in rows), default=0.0))
    notes = max((text_width(line.note, 11) for line in rows), default=0.0)
    right = min(MAX_LABEL_WIDTH, 12 + notes) if notes else 2.0
    step = (width - left - right) / max(1, rounds)
    keys, top = _legend(legend, left, width)
    shapes = [*keys, *_round_numbers(rounds, left, step, top, x)]
    for number, line in enumerate(rows):
        y = top + HEADER + number * (ROW_HEIGHT + GAP)
        name = truncate_text(line.name, left - 10)
        shapes.append(TextLabel(left - 8, y + 15, name, anchor="end"))
        shapes += [shape for cell in line.cells for shape in _cell(cell, line.name, left, step, y)]
        if line.note:
            note = truncate_text(line.note, right - 8, 11)
            shapes.append(TextLabel(width - right + 8, y + 15, note, "faint", size=11))
    height = top + HEADER + len(rows) * (ROW_HEIGHT + GAP)
    table = [(r.name, c.first, c.last, c.word, c.tip) for r in rows for c in r.cells]
    return Drawing(
        title, width, height, tuple(shapes), (row, "first", "last", "value", "note"), tuple(table)
    )


def _cell(cell: GridCell, name: str, left: float, step: float, y: float) -> Iterator[Shape]:
    """Yield the boxes and the text of a cell in the row called `name`.

    `left` is the x of round 1, `step` the width of a round, `y` the top of the row.
    """
    x, width = left + (cell.first - 1) * step, (cell.last - cell.first + 1) * step
    width = max(0.6, width - min(2.0, step / 6))
    when = f"{cell.first}" if cell.first == cell.last else f"{cell.first} to {cell.last}"
    tip = f"{name}, {when}: {cell.tip or cell.word}"
    total, top = sum(share for _, share in cell.paints), y
    for paint, share in cell.paints:
        height = ROW_HEIGHT * share / total
        yield Box(x, top, width, height, paint, tip)
        top += height
    for text in (cell.word, cell.letter):
        if text and text_width(text, 11) + 4 <= width:
            paint = text_paint(cell.paints[0][0]) if len(cell.paints) == 1 else "ink"
            if len(cell.paints) > 1:
                # Text over two paints gets a background.
                half = text_width(text, 11) / 2 + 2
                yield Box(x + width / 2 - half, y + 4, 2 * half, ROW_HEIGHT - 8, "paper")
            yield TextLabel(x + width / 2, y + 15, text, paint, "middle", 11)
            return


def _legend(legend: Mapping[str, str], left: float, width: float) -> tuple[list[Shape], float]:
    """Return the shapes of a legend, wrapped into lines from `left` to `width`, and the y below."""
    shapes, x, y = list[Shape](), left, 0.0
    for paint, text in legend.items():
        width_needed = 18 + text_width(text, 11) + 16
        if x > left and x + width_needed > width:
            x, y = left, y + 18
        shapes += [Box(x, y, 12, 12, paint), TextLabel(x + 18, y + 10, text, "faint", size=11)]
        x += width_needed
    return shapes, y + 20 if legend else 0.0


def _round_numbers(rounds: int, left: float, step: float, top: float, x: str) -> Iterator[Shape]:
    """Yield the axis name `x` and as many round numbers as fit, at `top`.

    `left` is the x of round 1 and `step` the width of a round.
    """
    yield TextLabel(left - 8, top + 14, x, "faint", "end", 11)
    intervals = (size * 10**power for power in count() for size in (1, 2, 5))
    interval = next(n for n in intervals if n * step >= 26 or n >= rounds)
    for number in sorted({1, *range(interval, rounds + 1, interval)} - ({interval} & {2})):
        yield TextLabel(left + (number - 0.5) * step, top + 14, str(number), "faint", "middle", 11)
