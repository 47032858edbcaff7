# SPDX-License-Identifier: Apache-2.0
"""A drawing: shapes at coordinates, and the numbers behind them, written as SVG or CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from io import StringIO
from typing import Literal

from fedplan.reports.figures.palette import palette_css

FONT_SIZE = 12.0
"""The default size of text; a drawing is about 480 wide."""
CHAR_WIDTH = 0.56
"""The width of a character relative to the font size, an upper estimate."""

Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Box:
    """A filled rectangle with its top left corner at `x`, `y`, in pixels; a pointer shows `tip`.

    `wide` and `tall` are its size; `paint` names a colour of the palette.
    """

    x: float
    y: float
    wide: float
    tall: float
    paint: str
    tip: str = ""


@dataclass(frozen=True)
class Stroke:
    """A line through points, `wide` pixels thick; `dash` is an SVG dash pattern, or empty."""

    points: tuple[tuple[float, float], ...]
    paint: str
    wide: float = 1.0
    dash: str = ""


@dataclass(frozen=True)
class Area:
    """A translucent polygon filled with a paint (a colour of the palette)."""

    points: tuple[tuple[float, float], ...]
    paint: str


@dataclass(frozen=True)
class Dot:
    """A marker with its centre at `x`, `y`; `size` is the radius in pixels, a pointer shows `tip`.

    `form` is disc, ring, square, triangle, diamond or cross; `paint` names a colour.
    """

    x: float
    y: float
    paint: str
    form: str = "disc"
    size: float = 3.0
    tip: str = ""


@dataclass(frozen=True)
class TextLabel:
    """A text with its baseline at `y`, and its start, middle or end (`anchor`) at `x`.

    `paint` names a colour, `size` is the font size in pixels, and `bold` its weight.
    """

    x: float
    y: float
    text: str
    paint: str = "ink"
    anchor: Anchor = "start"
    size: float = FONT_SIZE
    bold: bool = False


Shape = Box | Stroke | Area | Dot | TextLabel


@dataclass(frozen=True)
class Drawing:
    """A figure of `width` by `height` pixels: shapes, later ones on top, and the numbers behind.

    `title` is not drawn: pages show it as a heading, and SVG has it as aria-label. The numbers are
    a table of `columns` and `rows`. Call `svg` or `csv`; `save_png` writes PNG.
    """

    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[object, ...], ...] = ()

    def svg(self, *, alone: bool = False) -> str:
        """Return the drawing as an SVG element; `alone` adds the style sheet of the colours."""
        box = f"0 0 {_short(self.width)} {_short(self.height)}"
        style = f"<style>{palette_css()}\ntext {{ font-family: {FONTS} }}</style>" if alone else ""
        elements = "".join(map(_svg_element, self.shapes))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" '
            f'aria-label="{escape(replace_control_chars(self.title))}">{style}{elements}</svg>'
        )

    def csv(self) -> str:
        """Return the numbers as CSV with a header; no cell can be read as a spreadsheet formula."""
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([spreadsheet_safe(each) for each in row] for row in self.rows)
        return out.getvalue()


FONTS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
"""The CSS font stack of figures and pages."""


def truncate_text(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Return a text cut to a width in pixels by its estimated length, with an ellipsis if cut."""
    length = max(1, int(width / (CHAR_WIDTH * size)))
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the estimated width of a text in pixels."""
    return CHAR_WIDTH * size * len(text)


def replace_control_chars(text: str) -> str:
    """Replace characters that are not printable, among them those that XML forbids."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def spreadsheet_safe(value: object) -> object:
    """Return a value for a CSV cell: "" for None, a quote before a text that looks like a formula.

    Names of clients are not trusted, so that a spreadsheet must not run them.
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return "" if value is None else value


def _svg_element(shape: Shape) -> str:
    """Return a shape as an SVG element; its paint becomes a CSS class."""
    match shape:
        case Box():
            position = f'x="{_short(shape.x)}" y="{_short(shape.y)}"'
            sizes = f'width="{_short(shape.wide)}" height="{_short(shape.tall)}"'
            return _with_tip(f'<rect {position} {sizes} class="f-{shape.paint}"', shape.tip)
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
        case TextLabel():
            bold = ' font-weight="600"' if shape.bold else ""
            return (
                f'<text x="{_short(shape.x)}" y="{_short(shape.y)}" class="f-{shape.paint}" '
                f'text-anchor="{shape.anchor}" font-size="{_short(shape.size)}"{bold}>'
                f"{escape(replace_control_chars(shape.text))}</text>"
            )


def marker_corners(dot: Dot) -> tuple[tuple[float, float], ...]:
    """Return the corners of a polygonal dot, or the four ends of a cross; () for circles."""
    x, y, r = dot.x, dot.y, dot.size
    corners = {
        "square": ((-r, -r), (r, -r), (r, r), (-r, r)),
        "triangle": ((0.0, -1.2 * r), (1.15 * r, r), (-1.15 * r, r)),
        "diamond": ((0.0, -1.35 * r), (1.35 * r, 0.0), (0.0, 1.35 * r), (-1.35 * r, 0.0)),
        "cross": ((-r, -r), (r, r), (-r, r), (r, -r)),
    }
    return tuple((x + across, y + down) for across, down in corners.get(dot.form, ()))


def _dot(dot: Dot) -> str:
    """Return a dot as an SVG element."""
    if dot.form in ("disc", "ring"):
        paint = f'class="f-{dot.paint}"'
        if dot.form == "ring":
            paint = f'class="s-{dot.paint}" fill="none" stroke-width="1.5"'
        position = f'cx="{_short(dot.x)}" cy="{_short(dot.y)}" r="{_short(dot.size)}"'
        return _with_tip(f"<circle {position} {paint}", dot.tip)
    if dot.form == "cross":
        a, b, c, d = (f"{_short(x)} {_short(y)}" for x, y in marker_corners(dot))
        return _with_tip(
            f'<path d="M{a}L{b}M{c}L{d}" class="s-{dot.paint}" stroke-width="1.5"', dot.tip
        )
    return _with_tip(
        f'<polygon points="{_points(marker_corners(dot))}" class="f-{dot.paint}"', dot.tip
    )


def _with_tip(opening: str, tip: str) -> str:
    """Close an SVG element, given without its end, with a tip as its title if there is one."""
    if not tip:
        return f"{opening}/>"
    name = opening[1:].partition(" ")[0]
    return f"{opening}><title>{escape(replace_control_chars(tip))}</title></{name}>"


def _points(points: Sequence[tuple[float, float]]) -> str:
    """Return points as an SVG attribute."""
    return " ".join(f"{_short(x)},{_short(y)}" for x, y in points)


def _short(number: float) -> str:
    """Return a coordinate with one decimal at most."""
    return f"{number:.1f}".removesuffix(".0")
