# SPDX-License-Identifier: Apache-2.0
"""What a person reads before, during and after a run."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.reports.explanation import Explanation, explain
    from fedplan.reports.figure import draw
    from fedplan.reports.forecasts import forecast
    from fedplan.reports.memory import Load
    from fedplan.reports.operation import Operation
    from fedplan.reports.progress import follow
    from fedplan.reports.status import RunLook, attach, status_of, stop_run, watch

__all__ = [
    "Explanation",
    "Load",
    "Operation",
    "RunLook",
    "attach",
    "draw",
    "explain",
    "follow",
    "forecast",
    "status_of",
    "stop_run",
    "watch",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "explanation": "Explanation explain",
        "figure": "draw",
        "forecasts": "forecast",
        "memory": "Load",
        "operation": "Operation",
        "progress": "follow",
        "status": "RunLook attach status_of stop_run watch",
    },
)
