# SPDX-License-Identifier: Apache-2.0
"""Bubbles: how much each row has of each column, as dots whose area is the amount."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import sqrt

from fedplan.reports.figures.drawing import Dot, Drawing, Shape, Words, shortened, width_of

TALL, NARROW, BROAD = 22.0, 14.0, 84.0
"""How tall a row is; how wide a column is at least, and at most."""
LABEL, SUM = 150.0, 64.0


def bubble_chart(
    title: str,
    amounts: Mapping[str, Mapping[str, int]],
    *,
    columns: Sequence[str],
    sums: Mapping[str, int],
    row: str = "row",
    column: str = "column",
    width: float = 720,
) -> Drawing:
    """A dot for each amount, of one hue for all; columns whose names are too long are numbered."""
    left = min(LABEL, 18 + max((width_of(name) for name in amounts), default=0.0))
    step = min(BROAD, max(NARROW, (width - left - SUM) / max(1, len(columns))))
    spoken = all(width_of(name, 11) + 6 <= step for name in columns)
    shapes, top = list[Shape](), 22.0 if columns else 4.0
    for number, name in enumerate(columns):
        if spoken or number == 0 or not (number + 1) % (5 if step < 22 else 1):
            at = left + (number + 0.5) * step
            shapes.append(Words(at, 14, name if spoken else str(number + 1), "faint", "middle", 11))
    most = max((n for held in amounts.values() for n in held.values()), default=0) or 1
    room = min(TALL, step) / 2 - 1
    for place, (name, held) in enumerate(amounts.items()):
        y = top + place * TALL + TALL / 2
        shapes.append(Words(left - 8, y + 4, shortened(name, left - 10), anchor="end"))
        for number, each in enumerate(columns):
            if amount := held.get(each, 0):
                at, tip = left + (number + 0.5) * step, f"{name}, {each}: {amount}"
                shapes.append(Dot(at, y, "c0", size=max(1.0, room * sqrt(amount / most)), tip=tip))
        end = left + len(columns) * step + 8
        shapes.append(Words(end, y + 4, f"{sums[name]:,}", "faint", size=11))
    bottom, wide = top + len(amounts) * TALL, max(width, left + len(columns) * step + SUM)
    named = [] if spoken else [f"{n} {name}" for n, name in enumerate(columns, 1)]
    for line in _lines(named, wide):
        bottom += 16
        shapes.append(Words(8, bottom, line, "faint", size=11))
    told = [(name, each, n) for name, held in amounts.items() for each, n in held.items()]
    return Drawing(title, wide, bottom + 8, tuple(shapes), (row, column, "count"), tuple(told))


def _lines(words: Sequence[str], width: float) -> Iterator[str]:
    """Words with commas, in as many lines as a width takes."""
    held = ""
    for word, after in pairwise([*words, ""]):
        held += word + (", " if after else "")
        if width_of(held + after, 11) > width - 16 or not after:
            yield held
            held = ""
