# SPDX-License-Identifier: Apache-2.0
"""Pictures: a drawing as PNG, by matplotlib."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import FedplanError
from fedplan.reports.figures.drawing import Area, Box, Dot, Drawing, Shape, Stroke, Words, outline
from fedplan.reports.figures.palette import colour
from fedplan.storage.files import put_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS = 144
"""Dots an inch; a sheet of 72 units is an inch wide."""
SIDES: dict[str, Any] = {"start": "left", "middle": "center", "end": "right"}


def save_png(drawing: Drawing, file: Path) -> None:
    """Write a drawing as PNG, on white."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FedplanError("PNG takes matplotlib: pip install 'fedplan[draw]'") from error
    sheet = Figure(figsize=(drawing.width / 72, drawing.height / 72), dpi=DOTS)
    FigureCanvasAgg(sheet)
    ax = sheet.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_axis_off()
    ax.set_xlim(0, drawing.width)
    ax.set_ylim(drawing.height, 0)
    for order, shape in enumerate(drawing.shapes):
        _paint(ax, shape, order + 1)
    out = BytesIO()
    sheet.savefig(out, format="png", metadata={"Software": None})
    put_file(file, out.getvalue())


def _paint(ax: Axes, shape: Shape, order: int) -> None:
    from matplotlib.patches import Circle, Polygon, Rectangle

    paint = colour(shape.paint)
    match shape:
        case Box():
            where = (shape.x, shape.y)
            ax.add_patch(
                Rectangle(where, shape.wide, shape.tall, facecolor=paint, lw=0, zorder=order)
            )
        case Stroke():
            xs, ys = zip(*shape.points, strict=True)
            style = "--" if shape.dash else "-"
            ax.plot(xs, ys, color=paint, lw=shape.wide, ls=style, zorder=order)
        case Area():
            ax.add_patch(Polygon(shape.points, facecolor=paint, alpha=0.22, lw=0, zorder=order))
        case Dot() if shape.form in ("disc", "ring"):
            filled = shape.form == "disc"
            ax.add_patch(
                Circle((shape.x, shape.y), shape.size, fill=filled, color=paint, zorder=order)
            )
        case Dot() if shape.form == "cross":
            a, b, c, d = outline(shape)
            for one, other in ((a, b), (c, d)):
                ax.plot((one[0], other[0]), (one[1], other[1]), color=paint, zorder=order)
        case Dot():
            ax.add_patch(Polygon(outline(shape), facecolor=paint, lw=0, zorder=order))
        case Words():
            ax.text(
                shape.x,
                shape.y,
                shape.text.replace("$", r"\$"),
                color=paint,
                ha=SIDES[shape.anchor],
                va="baseline",
                fontsize=0.92 * shape.size,
                fontweight="bold" if shape.bold else "normal",
                zorder=order,
            )
