# SPDX-License-Identifier: Apache-2.0
"""Charts from plain numbers, each available as SVG, CSV and PNG."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.reports.figures.bars import Bar, bar_chart
    from fedplan.reports.figures.bubbles import bubble_chart
    from fedplan.reports.figures.drawing import Drawing
    from fedplan.reports.figures.grids import GridCell, GridRow, cell_grid
    from fedplan.reports.figures.lines import line_chart
    from fedplan.reports.figures.multiples import small_multiples
    from fedplan.reports.figures.palette import palette_css
    from fedplan.reports.figures.png import save_png
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
    "palette_css",
    "line_chart",
    "mean_series",
    "save_png",
    "small_multiples",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "bars": "Bar bar_chart",
        "bubbles": "bubble_chart",
        "drawing": "Drawing",
        "grids": "GridCell GridRow cell_grid",
        "lines": "line_chart",
        "multiples": "small_multiples",
        "palette": "palette_css",
        "png": "save_png",
        "series": "Series mean_series",
    },
)
