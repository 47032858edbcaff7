# SPDX-License-Identifier: Apache-2.0
"""Explanations, progress, status and reports of runs for people."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.reports.explanation import Explanation, explain
    from fedplan.reports.forecasts import forecast
    from fedplan.reports.memory import TrainingStep
    from fedplan.reports.progress import run_with_progress
    from fedplan.reports.role_figure import draw_roles
    from fedplan.reports.status import RunSnapshot, follow_run, run_snapshot, stop_run, watch

__all__ = [
    "Explanation",
    "TrainingStep",
    "RunSnapshot",
    "follow_run",
    "draw_roles",
    "explain",
    "run_with_progress",
    "forecast",
    "run_snapshot",
    "stop_run",
    "watch",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "explanation": "Explanation explain",
        "role_figure": "draw_roles",
        "forecasts": "forecast",
        "memory": "TrainingStep",
        "progress": "run_with_progress",
        "status": "RunSnapshot follow_run run_snapshot stop_run watch",
    },
)
