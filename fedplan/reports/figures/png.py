# SPDX-License-Identifier: Apache-2.0
"""Write a drawing as PNG with matplotlib."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedplan.errors import FedplanError
from fedplan.reports.figures.drawing import (
    Area,
    Box,
    Dot,
    Drawing,
    Shape,
    Stroke,
    TextLabel,
    marker_corners,
)
from fedplan.reports.figures.palette import light_color
from fedplan.storage.files import write_atomic

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOTS = 144
"""Dots per inch; 72 units of a drawing are an inch."""
ALIGNMENTS: dict[str, Any] = {"start": "left", "middle": "center", "end": "right"}
"""matplotlib's alignment for each anchor."""


def save_png(drawing: Drawing, file: Path) -> None:
    """Write a drawing as a PNG file on white, with 144 dots per inch; an old file is replaced.

    Raises FedplanError if matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FedplanError(
            "matplotlib is not installed; for PNG run: pip install 'fedplan[draw]'"
        ) from error
    canvas = Figure(figsize=(drawing.width / 72, drawing.height / 72), dpi=DOTS)
    FigureCanvasAgg(canvas)
    ax = canvas.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_axis_off()
    ax.set_xlim(0, drawing.width)
    ax.set_ylim(drawing.height, 0)
    for order, shape in enumerate(drawing.shapes):
        _draw_shape(ax, shape, order + 1)
    out = BytesIO()
    canvas.savefig(out, format="png", metadata={"Software": None})
    write_atomic(file, out.getvalue())


def _draw_shape(ax: Axes, shape: Shape, order: int) -> None:
    """Draw a shape onto matplotlib axes; later shapes have a higher z-order `order`."""
    from matplotlib.patches import Circle, Polygon, Rectangle

    color = light_color(shape.paint)
    match shape:
        case Box():
            corner = (shape.x, shape.y)
            ax.add_patch(
                Rectangle(corner, shape.wide, shape.tall, facecolor=color, lw=0, zorder=order)
            )
        case Stroke():
            xs, ys = zip(*shape.points, strict=True)
            style = "--" if shape.dash else "-"
            ax.plot(xs, ys, color=color, lw=shape.wide, ls=style, zorder=order)
        case Area():
            ax.add_patch(Polygon(shape.points, facecolor=color, alpha=0.22, lw=0, zorder=order))
        case Dot() if shape.form in ("disc", "ring"):
            filled = shape.form == "disc"
            ax.add_patch(
                Circle((shape.x, shape.y), shape.size, fill=filled, color=color, zorder=order)
            )
        case Dot() if shape.form == "cross":
            a, b, c, d = marker_corners(shape)
            for start, end in ((a, b), (c, d)):
                ax.plot((start[0], end[0]), (start[1], end[1]), color=color, zorder=order)
        case Dot():
            ax.add_patch(Polygon(marker_corners(shape), facecolor=color, lw=0, zorder=order))
        case TextLabel():
            ax.text(
                shape.x,
                shape.y,
                shape.text.replace("$", r"\$"),
                color=color,
                ha=ALIGNMENTS[shape.anchor],
                va="baseline",
                fontsize=0.92 * shape.size,
                fontweight="bold" if shape.bold else "normal",
                zorder=order,
            )
