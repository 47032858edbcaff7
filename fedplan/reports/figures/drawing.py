# SPDX-License-Identifier: Apache-2.0
"""A chart: its palette, its matplotlib figure, and the numbers behind, as SVG, PNG, PDF or CSV."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from io import BytesIO, StringIO
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from fedplan.errors import FedplanError, printable
from fedplan.language.plan import Role
from fedplan.storage.files import SHARED, write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    Canvas = Figure | SubFigure

# After Okabe and Ito. On dark the same hues are lighter; a marker or a word goes with each hue.
PALETTE = {
    "ink": ("#1b1f24", "#e6e9ed"),
    "faint": ("#5d6672", "#a3acb8"),
    "grid": ("#dfe3e8", "#39414b"),
    "paper": ("#ffffff", "#15191e"),
    "c0": ("#0072b2", "#56b4e9"),
    "c1": ("#bf5400", "#ff9a4d"),
    "c2": ("#00805d", "#35c49b"),
    "c3": ("#b0568a", "#e39ac6"),
    "c4": ("#8a6200", "#f0c24a"),
    "c5": ("#5b5fc7", "#a5a8ff"),
    "keep": ("#e69f00", "#e69f00"),
    "hold": ("#cc79a7", "#cc79a7"),
    "good": ("#9fd8c4", "#1f6e57"),
    "warn": ("#f2cf7e", "#8a6200"),
    "bad": ("#f0a27a", "#a84a00"),
    "dark": ("#14171a", "#0b0d10"),
}
"""The colours of each paint by its name: on a light background, and on a dark one."""
ROLE_PAINTS = {Role.SHARE: "c0", Role.KEEP: "keep", Role.FREEZE: "grid", Role.HOLD: "hold"}
"""The paint of each role, in every report and figure."""
ROLE_STYLES = {role: PALETTE[paint][1] for role, paint in ROLE_PAINTS.items()} | {
    Role.SHARE: "#3d9bd6",  # the colours of their cells are too faint for text
    Role.FREEZE: "#8a929c",
}
"""The colour of each role for text in a terminal, readable on light and on dark."""
TEXT_PAINTS = {"c0": "paper", "keep": "dark", "hold": "dark"}
"""The paint of text on top of a paint, where it is not ink."""
HUES = ("c0", "c1", "c2", "c3", "c4", "c5")
"""The paints of series, in this order."""
LIGHT = {name: pair[0] for name, pair in PALETTE.items()}
"""The colour of each paint as drawn; an SVG has the name of the paint in its place."""
FONTS = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"
"""The CSS font stack of figures and pages."""
FONT_SIZE = 12.0
"""The default size of text in pixels."""
CHAR_WIDTH = 0.56
"""The width of a character relative to the font size, an upper estimate."""
MAX_MAGNITUDE = 1e100
"""Larger numbers are not drawn."""
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fedplan",
    "text.parse_math": False,
    "text.color": LIGHT["ink"],
    "font.size": FONT_SIZE,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LIGHT["grid"],
    "grid.linewidth": 1.0,
    "axes.labelsize": 11.0,
    "axes.labelcolor": LIGHT["faint"],
    **{
        f"{axis}tick.{key}": value
        for axis in "xy"
        for key, value in (
            *(("labelsize", 11.0), ("color", LIGHT["faint"])),
            *(("major.size", 0.0), ("major.pad", 6.0), ("minor.size", 0.0)),
        )
    },
    "lines.linewidth": 1.8,
    "lines.markersize": 5.2,
    "lines.scale_dashes": False,
    "patch.linewidth": 0.0,
    "path.simplify": False,
}
"""matplotlib's settings for every chart, over its defaults."""
DEFAULTS = {("stroke-dashoffset", "0"), ("text-anchor", "start"), ("stroke-linecap", "square")}
"""Parts of a style that are left out: the first two are SVG's own, the last is of grid lines."""
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?")
"""A number in the data of an SVG path."""
TIP = "tip: "
"""How the gid of an artist begins whose rest is its tip (see `tip`)."""


@dataclass(frozen=True)
class Drawing:
    """A chart of `width` by `height` pixels, with the table of numbers behind it.

    `draw` draws it onto an empty figure, or part of a figure, of that size; 72 pixels are an inch.
    `title` is not drawn: pages show it as a heading, and SVG has it as aria-label.
    """

    title: str
    width: float
    height: float
    draw: Callable[[Canvas], None]
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[object, ...], ...] = ()

    def svg(self, *, alone: bool = False) -> str:
        """Return the chart as an SVG element; `alone` adds colours and a background."""
        root = ElementTree.fromstring(self._rendered("svg", metadata={"Date": None}))  # noqa: S314
        style = (
            f"<style>{palette_css()}\ntext {{ font-family: {FONTS} }}</style>"
            '<rect width="100%" height="100%" class="f-paper"/>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width:.0f} '
            f'{self.height:.0f}" role="img" stroke-linejoin="round" '
            f'aria-label="{escape(printable(self.title))}">'
            f"{style if alone else ''}{''.join(_svg_shapes(root))}</svg>"
        )

    def save(self, file: Path) -> None:
        """Write the chart to a file, which is replaced; its suffix sets the format.

        .svg follows the viewer's light or dark scheme; .png (144 dots per inch), .pdf and others
        of matplotlib are on white. Raises FedplanError for an unknown format.
        """
        kind = file.suffix.removeprefix(".").lower()
        if kind == "svg":
            return write_atomic(file, self.svg(alone=True) + "\n", mode=SHARED)
        dates = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
        try:
            data = self._rendered(kind, facecolor="white", dpi=144, metadata=dates.get(kind))
        except (ValueError, TypeError) as error:  # a format without metadata, or an unknown one
            raise FedplanError(
                f"cannot write {file}: {error}; use a name that ends in .svg, .png or .pdf"
            ) from error
        write_atomic(file, data, mode=SHARED)

    def csv(self) -> str:
        """Return the numbers as CSV with a header; no cell can be read as a spreadsheet formula."""
        out = StringIO()
        writer = csv.writer(out, lineterminator="\n")
        rows = (self.columns, *self.rows)
        writer.writerows([spreadsheet_safe(each) for each in row] for row in rows)
        return out.getvalue()

    def _rendered(self, kind: str, **options: Any) -> bytes:
        """Return the chart in a format of matplotlib, by its defaults and STYLE alone."""
        from matplotlib import style
        from matplotlib.figure import Figure
        from matplotlib.text import Text

        out = BytesIO()
        with style.context(["default", STYLE]), warnings.catch_warnings():
            # The reader's fonts, not matplotlib's, draw the text of an SVG.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            warnings.filterwarnings("ignore", "Matplotlib currently does not support")
            figure = Figure(figsize=(self.width / 72, self.height / 72), dpi=72)
            self.draw(figure)
            for text in figure.findobj(Text):
                text.set_text(printable(text.get_text()))
            figure.savefig(out, format=kind or None, **options)
        return out.getvalue()


def palette_css() -> str:
    """Return the CSS rules `.f-PAINT` (fill) and `.s-PAINT` (stroke) of each paint."""
    light, dark = (
        "\n".join(
            f".f-{name} {{ fill: {pair[i]} }} .s-{name} {{ stroke: {pair[i]} }}"
            for name, pair in PALETTE.items()
        )
        for i in (0, 1)
    )
    return f"{light}\n@media screen and (prefers-color-scheme: dark) {{\n{dark}\n}}"


def add_axes(
    figure: Canvas, left: float, bottom: float, right: float, top: float
) -> tuple[Axes, float, float]:
    """Add axes to a figure within margins in pixels; return them with their width and height."""
    width, height = (72 * side / figure.dpi for side in (figure.bbox.width, figure.bbox.height))
    inner, tall = max(1.0, width - left - right), max(1.0, height - bottom - top)
    place = (left / width, bottom / height, inner / width, tall / height)
    return figure.add_axes(place), inner, tall


def add_sheet(figure: Canvas) -> Axes:
    """Add axes over the whole figure whose units are pixels from the top left corner."""
    ax, width, height = add_axes(figure, 0, 0, 0, 0)
    ax.set_axis_off()
    ax.set_xlim(0, width)
    ax.set_ylim(height, 0)
    return ax


def tip(text: str) -> str | None:
    """Return the gid of an artist for which a pointer shows `text`; None for an empty text."""
    return TIP + printable(text) if text else None


def is_drawable(number: float) -> bool:
    """Return whether a number is finite and of magnitude 1e100 at most, so that it can be drawn."""
    return isfinite(number) and abs(number) <= MAX_MAGNITUDE


def truncate_text(text: str, width: float, size: float = FONT_SIZE) -> str:
    """Return a printable text, cut to an estimated width in pixels with an ellipsis."""
    length = max(1, int(width / (CHAR_WIDTH * size)))
    text = printable(text)
    return text if len(text) <= length else text[: max(1, length - 1)] + "…"


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Return the estimated width of a text in pixels."""
    return CHAR_WIDTH * size * len(text)


def spreadsheet_safe(value: object) -> object:
    """Return a value for a CSV cell: "" for None, a quote before a text that looks like a formula.

    Names of clients are not trusted, so that a spreadsheet must not run them.
    """
    if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
        return f"'{value}"
    return "" if value is None else value


def _svg_shapes(root: ElementTree.Element) -> Iterator[str]:
    """Yield the shapes of matplotlib's SVG, with classes for colours and titles for tips."""
    attributes = (each.attrib for each in root.iter())
    markers = {each["id"]: each["d"] for each in attributes if {"id", "d"} <= each.keys()}

    def walk(element: ElementTree.Element, title: str) -> Iterator[str]:
        name, attributes = element.tag.rpartition("}")[2], dict(element.attrib)
        if name == "g" and attributes.get("id", "").startswith(TIP):
            title = f"<title>{escape(attributes['id'].removeprefix(TIP))}</title>"
        if name in ("defs", "metadata"):
            return
        if name not in ("path", "use", "text"):
            for child in element:
                yield from walk(child, title)
            return
        pairs = attributes.get("style", "").split("; ")
        style = dict(pair.split(": ", 1) for pair in pairs if pair)
        if name == "text":
            place = f'x="{_short(attributes["x"])}" y="{_short(attributes["y"])}"'
            yield f"<text {place}{_svg_style(style)}>{escape(element.text or '')}</text>"
            return
        if name == "path":
            shape = f'path d="{_short_path(attributes.get("d", ""))}"'
        else:
            reference = attributes["{http://www.w3.org/1999/xlink}href"].removeprefix("#")
            shape = _marker(markers[reference], attributes["x"], attributes["y"])
        if shape != 'path d=""' and (style.get("fill") != "none" or "stroke" in style):
            end = f">{title}</{shape.partition(' ')[0]}>" if title else "/>"
            yield f"<{shape}{_svg_style(style)}{end}"

    yield from walk(root, "")


def _marker(path: str, x: str, y: str) -> str:
    """Return the SVG element of a marker with this path around a point; discs are circles."""
    if "C" in path:
        radius = max(abs(float(number)) for number in NUMBER.findall(path))
        return f'circle cx="{_short(x)}" cy="{_short(y)}" r="{_short(radius)}"'
    moves = iter([float(x), float(y)] * (len(NUMBER.findall(path)) // 2))
    moved = NUMBER.sub(lambda match: f"{float(match[0]) + next(moves):.4f}", path)
    return f'path d="{_short_path(moved)}"'


def _short(number: str | float) -> str:
    """Return a coordinate with one decimal at most."""
    text = f"{float(number):.1f}".removesuffix(".0")
    return "0" if text == "-0" else text


def _short_path(path: str) -> str:
    """Return the data of an SVG path with short numbers, and blanks only between them."""
    short = NUMBER.sub(lambda match: _short(match[0]), path)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", " ".join(short.split()))


def _svg_style(style: Mapping[str, str]) -> str:
    """Return a style of matplotlib as SVG attributes; colours of the palette are classes."""
    paints = {color: name for name, color in LIGHT.items()}
    classes, attributes = list[str](), dict[str, str]()
    for key, value in style.items():
        if key in ("fill", "stroke") and value in paints:
            classes.append(f"{key[0]}-{paints[value]}")
        elif key == "font-family":
            if "Mono" in value:
                attributes["style"] = "font-family: ui-monospace, monospace"
        elif (key, value) not in DEFAULTS:
            attributes[key] = value.removesuffix("px").replace(",", " ")
    if classes:
        attributes = {"class": " ".join(classes), **attributes}
    return "".join(f' {key}="{escape(value)}"' for key, value in attributes.items())
