# SPDX-License-Identifier: Apache-2.0
"""Drawings: a figure as shapes on a sheet, with the numbers that it was made of."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Literal

from fedplan.reports.figures.palette import colours

SIZE = 12.0
"""The size of words on a sheet, whose width is about 480."""
WIDE = 0.56
"""How wide a letter is at most, for its size."""

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Box:
    """A filled rectangle; `tip` is told when a pointer rests on it."""

    x: float
    y: float
    wide: float
    tall: float
    paint: str
    tip: str = ""


@dataclass(frozen=True)
class Stroke:
    """A line through points; `dash` is a pattern of lengths, or nothing."""

    points: tuple[tuple[float, float], ...]
    paint: str
    wide: float = 1.0
    dash: str = ""


@dataclass(frozen=True)
class Area:
    """A filled shape that one sees through."""

    points: tuple[tuple[float, float], ...]
    paint: str


@dataclass(frozen=True)
class Dot:
    """A point of some form."""

    x: float
    y: float
    paint: str
    form: str = "disc"
    size: float = 3.0
    tip: str = ""


@dataclass(frozen=True)
class Words:
    """Words at a place."""

    x: float
    y: float
    text: str
    paint: str = "ink"
    anchor: Anchor = "start"
    size: float = SIZE
    bold: bool = False


Shape = Box | Stroke | Area | Dot | Words


@dataclass(frozen=True)
class Drawing:
    """A figure: what it is called, its sheet, its shapes, and its numbers as a table."""

    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[object, ...], ...] = ()

    def svg(self, *, alone: bool = False) -> str:
        """It as SVG. One that stands `alone` brings its colours; a page has them once for all."""
        said = f"0 0 {_short(self.width)} {_short(self.height)}"
        style = f"<style>{colours()}\ntext {{ font-family: {FONTS} }}</style>" if alone else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{said}" role="img" '
            f'aria-label="{escape(printable(self.title))}">{style}{"".join(self._marks())}</svg>'
        )

    def csv(self) -> str:
        """Its numbers as CSV, with a heading. No cell begins as a formula of a spreadsheet."""
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([harmless(each) for each in row] for row in self.rows)
        return out.getvalue()

    def _marks(self) -> Iterator[str]:
        for shape in self.shapes:
            yield _mark(shape)


FONTS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"


def shortened(text: str, width: float, size: float = SIZE) -> str:
    """A text that is cut to a width, with a sign that it was."""
    most = max(1, int(width / (WIDE * size)))
    return text if len(text) <= most else text[: max(1, most - 1)] + "…"


def width_of(text: str, size: float = SIZE) -> float:
    """About how wide a text is."""
    return WIDE * size * len(text)


def printable(text: str) -> str:
    """A text without signs that XML does not have."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def harmless(value: object) -> object:
    """A value for a spreadsheet: what a client called itself is never a formula there."""
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return "" if value is None else value


def _mark(shape: Shape) -> str:
    match shape:
        case Box():
            where = f'x="{_short(shape.x)}" y="{_short(shape.y)}"'
            sizes = f'width="{_short(shape.wide)}" height="{_short(shape.tall)}"'
            return _tipped(f'<rect {where} {sizes} class="f-{shape.paint}"', shape.tip)
        case Stroke():
            dash = f' stroke-dasharray="{shape.dash}"' if shape.dash else ""
            return (
                f'<polyline points="{_points(shape.points)}" fill="none" class="s-{shape.paint}" '
                f'stroke-width="{_short(shape.wide)}" stroke-linejoin="round"{dash}/>'
            )
        case Area():
            points = _points(shape.points)
            return f'<polygon points="{points}" class="f-{shape.paint}" fill-opacity="0.22"/>'
        case Dot():
            return _dot(shape)
        case Words():
            bold = ' font-weight="600"' if shape.bold else ""
            return (
                f'<text x="{_short(shape.x)}" y="{_short(shape.y)}" class="f-{shape.paint}" '
                f'text-anchor="{shape.anchor}" font-size="{_short(shape.size)}"{bold}>'
                f"{escape(printable(shape.text))}</text>"
            )


def outline(dot: Dot) -> tuple[tuple[float, float], ...]:
    """The corners of a point that is no circle, or the two strokes of a cross."""
    x, y, r = dot.x, dot.y, dot.size
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "triangle": ((0.0, -1.2 * r), (1.15 * r, r), (-1.15 * r, r)),
        "diamond": ((0.0, -1.35 * r), (1.35 * r, 0.0), (0.0, 1.35 * r), (-1.35 * r, 0.0)),
        "cross": ((-r, -r), (r, r), (-r, r), (r, -r)),
    }
    return tuple((x + across, y + down) for across, down in corners.get(dot.form, ()))


def _dot(dot: Dot) -> str:
    if dot.form in ("disc", "ring"):
        paint = f'class="f-{dot.paint}"'
        if dot.form == "ring":
            paint = f'class="s-{dot.paint}" fill="none" stroke-width="1.5"'
        where = f'cx="{_short(dot.x)}" cy="{_short(dot.y)}" r="{_short(dot.size)}"'
        return _tipped(f"<circle {where} {paint}", dot.tip)
    if dot.form == "cross":
        a, b, c, d = (f"{_short(x)} {_short(y)}" for x, y in outline(dot))
        return _tipped(
            f'<path d="M{a}L{b}M{c}L{d}" class="s-{dot.paint}" stroke-width="1.5"', dot.tip
        )
    return _tipped(f'<polygon points="{_points(outline(dot))}" class="f-{dot.paint}"', dot.tip)


def _tipped(opening: str, tip: str) -> str:
    """An element that says more of itself, if there is more to say."""
    if not tip:
        return f"{opening}/>"
    name = opening[1:].partition(" ")[0]
    return f"{opening}><title>{escape(printable(tip))}</title></{name}>"


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
