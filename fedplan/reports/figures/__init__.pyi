# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .charts import Bar, Series, bar_chart, line_chart, mean_series, small_multiples
from .drawing import Drawing
from .grids import GridCell, GridRow, bubble_chart, cell_grid, matrix_chart

__all__ = [
    "Bar",
    "Drawing",
    "GridCell",
    "GridRow",
    "Series",
    "bar_chart",
    "bubble_chart",
    "cell_grid",
    "line_chart",
    "matrix_chart",
    "mean_series",
    "small_multiples",
]
