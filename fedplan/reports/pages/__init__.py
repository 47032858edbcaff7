# SPDX-License-Identifier: Apache-2.0
"""HTML pages: the report of runs, and the building blocks of all pages."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.reports.pages.page import Page, PageBlock, PageFigure, PageSection, block
    from fedplan.reports.pages.run_report import report, report_page, watch_report

__all__ = [
    "PageBlock",
    "Page",
    "PageFigure",
    "PageSection",
    "block",
    "report",
    "report_page",
    "watch_report",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "page": "PageBlock Page PageFigure PageSection block",
        "run_report": "report report_page watch_report",
    },
)
