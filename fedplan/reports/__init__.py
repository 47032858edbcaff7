# SPDX-License-Identifier: Apache-2.0
"""What a person reads before, during and after a run."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.reports.explanation import Explanation, explain
    from fedplan.reports.figure import draw
    from fedplan.reports.forecasts import forecast
    from fedplan.reports.memory import Load
    from fedplan.reports.progress import follow

__all__ = ["Explanation", "Load", "draw", "explain", "follow", "forecast"]

__getattr__, __dir__ = face(
    __name__,
    {
        "explanation": "Explanation explain",
        "figure": "draw",
        "forecasts": "forecast",
        "memory": "Load",
        "progress": "follow",
    },
)
