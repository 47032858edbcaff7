# SPDX-License-Identifier: Apache-2.0
"""Pages that a person opens in a browser: the report of runs, and what all pages are made of."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.reports.pages.markup import Html, tag
    from fedplan.reports.pages.page import Page, PageSection, Shown
    from fedplan.reports.pages.reporting import page_of, report, watched

__all__ = [
    "Html",
    "Page",
    "PageSection",
    "Shown",
    "page_of",
    "report",
    "tag",
    "watched",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "markup": "Html tag",
        "page": "Page PageSection Shown",
        "reporting": "page_of report watched",
    },
)
