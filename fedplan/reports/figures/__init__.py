# SPDX-License-Identifier: Apache-2.0
"""Charts from plain numbers, drawn by matplotlib, each as SVG, PNG, PDF and CSV."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.reports.figures.charts import (
        Bar,
        Series,
        bar_chart,
        line_chart,
        mean_series,
        small_multiples,
    )
    from fedplan.reports.figures.drawing import Drawing, palette_css
    from fedplan.reports.figures.grids import GridCell, GridRow, bubble_chart, cell_grid

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
    "small_multiples",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "charts": "Bar Series bar_chart line_chart mean_series small_multiples",
        "drawing": "Drawing palette_css",
        "grids": "GridCell GridRow bubble_chart cell_grid",
    },
)
