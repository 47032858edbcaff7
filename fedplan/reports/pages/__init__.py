# SPDX-License-Identifier: Apache-2.0
"""HTML pages: the report of runs, and the building blocks of all pages."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.reports.pages.markup import Html, tag
    from fedplan.reports.pages.page import Page, PageFigure, PageSection
    from fedplan.reports.pages.run_report import report, report_page, watch_report

__all__ = [
    "Html",
    "Page",
    "PageSection",
    "PageFigure",
    "report_page",
    "report",
    "tag",
    "watch_report",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "markup": "Html tag",
        "page": "Page PageSection PageFigure",
        "run_report": "report_page report watch_report",
    },
)
