# SPDX-License-Identifier: Apache-2.0
"""Charts of rows and columns: coloured cells over rounds, and bubbles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, groupby, pairwise
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeVar

from fedplan.reports.figures.drawing import (
    LIGHT,
    TEXT_PAINTS,
    Drawing,
    add_sheet,
    text_width,
    tip,
    truncate_text,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedplan.reports.figures.drawing import Canvas

T = TypeVar("T")
ROW_HEIGHT, GAP, HEADER = 22.0, 3.0, 22.0
"""The height of a row, the gap between rows, and the height of the round numbers."""
MAX_LABEL_WIDTH = 170.0
"""The most room for names and for notes of rows."""
MIN_COLUMN, MAX_COLUMN, SUM_WIDTH = 14.0, 84.0, 64.0
"""The least and most width of a column of bubbles, and the room for sums at the right."""
SMALL: dict[str, Any] = {"size": 11.0, "color": LIGHT["faint"]}
"""The style of text beside the cells."""


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
    width: float = 960,
) -> Drawing:
    """Return a chart of rows of cells over rounds 1 to `rounds`; `legend` maps paints to texts."""
    widest = min(MAX_LABEL_WIDTH, width / 4)
    left = min(widest, 18 + max((text_width(line.name) for line in rows), default=0.0))
    notes = max((text_width(line.note, 11) for line in rows), default=0.0)
    right = min(widest, 12 + notes) if notes else 2.0
    step = (width - left - right) / max(1, rounds)
    keys, x_key, y_key = list[tuple[str, str, float, float]](), left, 0.0
    for paint, text in legend.items():
        room = 34 + text_width(text, 11)
        if x_key > left and x_key + room > width:
            x_key, y_key = left, y_key + 18
        keys.append((paint, text, x_key, y_key))
        x_key += room
    top = HEADER + (y_key + 20 if legend else 0.0)
    intervals = (size * 10**power for power in count() for size in (1, 2, 5))
    interval = next(n for n in intervals if n * step >= 26 or n >= rounds)
    numbers = sorted({1, *range(interval, rounds + 1, interval)} - ({interval} & {2}))

    def draw(figure: Canvas) -> None:
        ax = add_sheet(figure)
        for paint, text, at, y in keys:
            draw_box(ax, at, y, 12, 12, paint)
            ax.text(at + 18, y + 10, text, **SMALL)
        ax.text(left - 8, top - 8, "round", ha="right", **SMALL)
        for number in numbers:
            ax.text(left + (number - 0.5) * step, top - 8, str(number), ha="center", **SMALL)
        for place, line in enumerate(rows):
            y = top + place * (ROW_HEIGHT + GAP)
            ax.text(left - 8, y + 15, truncate_text(line.name, left - 10), ha="right")
            ax.text(width - right + 8, y + 15, truncate_text(line.note, right - 8, 11), **SMALL)
            for cell in line.cells:
                _cell(ax, cell, line.name, left + (cell.first - 1) * step, y, step)

    table = [(r.name, c.first, c.last, c.word, c.tip) for r in rows for c in r.cells]
    columns = (row, "first", "last", "value", "note")
    height = top + len(rows) * (ROW_HEIGHT + GAP)
    return Drawing(title, width, height, draw, columns, tuple(table))


def bubble_chart(
    title: str,
    amounts: Mapping[str, Mapping[str, int]],
    *,
    columns: Sequence[str],
    sums: Mapping[str, int],
    header: tuple[str, str],
) -> Drawing:
    """Return a chart with a dot for each amount above 0; the dot's area shows the amount.

    `amounts` are by row name, then by column name; `sums` are written at the ends of rows. `header`
    names both in the CSV. If column names are too long, the columns are numbered, and the names
    listed below.
    """
    left = min(150.0, 18 + max((text_width(name) for name in amounts), default=0.0))
    step = min(MAX_COLUMN, max(MIN_COLUMN, (720 - left - SUM_WIDTH) / max(1, len(columns))))
    fits = all(text_width(name, 11) + 6 <= step for name in columns)
    top, end = (22.0 if columns else 4.0), left + len(columns) * step
    width = max(720, end + SUM_WIDTH)
    key = [] if fits else [f"{n} {name}" for n, name in enumerate(columns, 1)]
    lines, bottom = list(_wrap(key, width)), top + len(amounts) * ROW_HEIGHT
    largest = max((n for counts in amounts.values() for n in counts.values()), default=0) or 1
    widest = min(ROW_HEIGHT, step) - 2

    def draw(figure: Canvas) -> None:
        ax = add_sheet(figure)
        for number, name in enumerate(columns):
            if fits or number == 0 or not (number + 1) % (5 if step < 22 else 1):
                text = name if fits else str(number + 1)
                ax.text(left + (number + 0.5) * step, 14, text, ha="center", **SMALL)
        for place, (name, counts) in enumerate(amounts.items()):
            y = top + (place + 0.5) * ROW_HEIGHT
            ax.text(left - 8, y + 4, truncate_text(name, left - 10), ha="right")
            ax.text(end + 8, y + 4, f"{sums[name]:,}", **SMALL)
            for number, each in enumerate(columns):
                if amount := counts.get(each, 0):
                    size = max(2.0, widest * sqrt(amount / largest))
                    ax.plot([left + (number + 0.5) * step], [y], "o", color=LIGHT["c0"],
                            markersize=size, markeredgewidth=0, clip_on=False,
                            gid=tip(f"{name}, {each}: {amount}"))  # fmt: skip
        for number, line in enumerate(lines, 1):
            ax.text(8, bottom + 16 * number, truncate_text(line, width, 11), **SMALL)

    rows = [(name, each, n) for name, counts in amounts.items() for each, n in counts.items()]
    height = bottom + 16 * len(lines) + 8
    return Drawing(title, width, height, draw, (*header, "count"), tuple(rows))


def matrix_chart(
    title: str, names: Sequence[str], counts: Sequence[Sequence[int]], *, width: float = 720
) -> Drawing:
    """Return a chart of a square of counts; the shade is the share of its row, the diagonal framed.

    Columns with too long names are numbered, as the rows then are.
    """
    step = min(MAX_COLUMN, (width - 60) / max(1, len(names)))
    fits = all(text_width(name, 11) + 6 <= step for name in names)
    texts = [*names] if fits else [f"{n} {name}" for n, name in enumerate(names, 1)]
    left = min(MAX_LABEL_WIDTH, width / 4, 18 + max(text_width(text) for text in texts))
    step = min(MAX_COLUMN, (width - left) / max(1, len(names)))

    def draw(figure: Canvas) -> None:
        from matplotlib.patches import Rectangle

        ax = add_sheet(figure)
        for place, name in enumerate(names):
            text = name if fits else str(place + 1)
            ax.text(left + (place + 0.5) * step, 14, text, ha="center", **SMALL)
        for place, line in enumerate(counts):
            y, total = HEADER + place * (ROW_HEIGHT + GAP), sum(line) or 1
            ax.text(left - 8, y + 15, truncate_text(texts[place], left - 10), ha="right")
            for number, amount in enumerate(line):
                x, share = left + number * step, amount / total
                note = f"{names[place]} as {names[number]}: {amount:,} ({share:.1%})"
                draw_box(ax, x, y, step - GAP, ROW_HEIGHT, "grid", tip(note))
                color = (LIGHT["c0"], round(0.55 * share, 3))
                ax.add_artist(Rectangle((x, y), step - GAP, ROW_HEIGHT, color=color, gid=tip(note)))
                if number == place:
                    frame = Rectangle((x, y), step - GAP, ROW_HEIGHT, linewidth=1.2, fill=False)
                    frame.set_edgecolor(LIGHT["ink"])
                    ax.add_artist(frame)
                text = f"{amount:,}"
                size = 12 if text_width(text, 12) + 2 <= step else 9
                if text_width(text, size) <= step - GAP:
                    ax.text(x + (step - GAP) / 2, y + 15, text, ha="center", size=size)

    pairs = zip(names, counts, strict=True)
    rows = [(true, *each) for true, line in pairs for each in zip(names, line, strict=True)]
    height = HEADER + len(names) * (ROW_HEIGHT + GAP)
    columns = ("true class", "predicted class", "count")
    return Drawing(title, width, height, draw, columns, tuple(rows))


def _cell(ax: Axes, cell: GridCell, name: str, x: float, y: float, step: float) -> None:
    """Draw a cell of the row called `name` at `x`, `y`; `step` is the width of a round."""
    width = max(0.6, (cell.last - cell.first + 1) * step - min(2.0, step / 6))
    when = f"{cell.first}" if cell.first == cell.last else f"{cell.first} to {cell.last}"
    total, top = sum(share for _, share in cell.paints), y
    for paint, share in cell.paints:
        height = ROW_HEIGHT * share / total
        draw_box(ax, x, top, width, height, paint, tip(f"{name}, {when}: {cell.tip or cell.word}"))
        top += height
    for text in (cell.word, cell.letter):
        half = text_width(text, 11) / 2 + 2
        if text and 2 * half <= width:
            paint = TEXT_PAINTS.get(cell.paints[0][0], "ink")
            if len(cell.paints) > 1:  # text over two paints gets a background
                paint = "ink"
                draw_box(ax, x + width / 2 - half, y + 4, 2 * half, ROW_HEIGHT - 8, "paper")
            ax.text(x + width / 2, y + 15, text, ha="center", size=11, color=LIGHT[paint])
            return


def draw_box(
    ax: Axes, x: float, y: float, width: float, height: float, paint: str, gid: str | None = None
) -> None:
    """Draw a filled rectangle with its top left corner at `x`, `y`."""
    from matplotlib.patches import Rectangle

    ax.add_artist(Rectangle((x, y), width, height, color=LIGHT[paint], gid=gid, clip_on=False))


def _wrap(texts: Sequence[str], width: float) -> Iterator[str]:
    """Yield texts joined by commas, in lines that fit into a width in pixels."""
    line = ""
    for text, following in pairwise([*texts, ""]):
        line += text + (", " if following else "")
        if text_width(line + following, 11) > width - 16 or not following:
            yield line
            line = ""


def round_spans(by_round: Mapping[int, T]) -> Iterator[tuple[int, int, T]]:
    """Yield (first, last, value) for each run of consecutive rounds with the same value."""
    order = enumerate(sorted(by_round))
    # In consecutive rounds the difference of round and index stays the same.
    for (value, _), run in groupby(order, key=lambda each: (by_round[each[1]], each[1] - each[0])):
        numbers = [number for _, number in run]
        yield numbers[0], numbers[-1], value
