# SPDX-License-Identifier: Apache-2.0
"""Figures from plain numbers, each as SVG, as CSV and as PNG."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.reports.figures.bars import Bar, bar_chart
    from fedplan.reports.figures.bubbles import bubble_chart
    from fedplan.reports.figures.drawing import Drawing
    from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
    from fedplan.reports.figures.lines import line_chart
    from fedplan.reports.figures.multiples import small_multiples
    from fedplan.reports.figures.palette import colours
    from fedplan.reports.figures.pictures import save_png
    from fedplan.reports.figures.series import Series, mean_series

__all__ = [
    "Bar",
    "Drawing",
    "GridCell",
    "GridRow",
    "Series",
    "bar_chart",
    "bubble_chart",
    "cell_grid",
    "colours",
    "line_chart",
    "mean_series",
    "save_png",
    "small_multiples",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "bars": "Bar bar_chart",
        "bubbles": "bubble_chart",
        "drawing": "Drawing",
        "grids": "GridCell GridRow cell_grid",
        "lines": "line_chart",
        "multiples": "small_multiples",
        "palette": "colours",
        "pictures": "save_png",
        "series": "Series mean_series",
    },
)
