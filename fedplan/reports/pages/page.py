# SPDX-License-Identifier: Apache-2.0
"""A page of sections with figures, as one self-contained HTML file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.png import save_png
from fedplan.reports.pages.markup import Html, tag
from fedplan.reports.pages.style import STYLE
from fedplan.storage.files import make_folder, write_atomic

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The content security policy of a page: no scripts and no requests, only the inline style."""


@dataclass(frozen=True)
class PageFigure:
    """A drawing on a page, with a caption below.

    `name` is the stem of its exported CSV and PNG files; `wide` takes the full width of the page.
    """

    name: str
    drawing: Drawing
    caption: str = ""
    wide: bool = False

    def html(self) -> Html:
        """Return the figure element with title and caption."""
        sheet = tag("div", Html(self.drawing.svg()), class_="sheet")
        caption = [tag("figcaption", self.caption)] if self.caption else []
        kind = "whole" if self.wide else "half"
        return tag("figure", tag("h3", self.drawing.title), sheet, *caption, class_=kind)


@dataclass(frozen=True)
class PageSection:
    """A section of a page: `title`, `intro` above the figures, and text `after` the figures.

    A section without content is false, and omitted from pages.
    """

    title: str
    intro: tuple[Html, ...] = ()
    figures: tuple[PageFigure, ...] = ()
    after: tuple[Html, ...] = ()

    def __bool__(self) -> bool:
        """Whether the section has content; a page omits empty sections."""
        return bool(self.intro or self.figures or self.after)

    def html(self) -> Html:
        """Return the section element."""
        figures = [tag("div", *(each.html() for each in self.figures), class_="figures")]
        content = [*self.intro, *(figures if self.figures else []), *self.after]
        return tag("section", tag("h2", self.title), *content)


@dataclass(frozen=True)
class Page:
    """A page of sections; call `html` or `write`.

    `lead` stands below the title, `foot` at the end. A browser reloads the page after
    `refresh_seconds` (0: never). `faults` in the reported data are for the caller, and not written.
    """

    title: str
    lead: tuple[Html, ...]
    sections: tuple[PageSection, ...]
    foot: str = ""
    refresh_seconds: int = 0
    faults: tuple[str, ...] = ()

    def html(self) -> str:
        """Return the page as one HTML document without scripts or external resources."""
        refresh = [tag("meta", http_equiv="refresh", content=str(self.refresh_seconds))]
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            *(refresh if self.refresh_seconds else []),
            tag("title", self.title),
            tag("style", Html(STYLE)),
        )
        body = tag(
            "body",
            tag("header", tag("h1", self.title), *self.lead),
            tag("main", *(each.html() for each in self.sections if each)),
            tag("footer", self.foot),
        )
        return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"

    def figures(self) -> Iterator[PageFigure]:
        """Yield a copy of each figure, with a distinct `name` that is safe as a file name."""
        counts = dict[str, int]()
        for figure in (each for section in self.sections for each in section.figures):
            name = re.sub(r"[^a-z0-9]+", "-", figure.name.lower()).strip("-") or "figure"
            counts[name] = number = counts.get(name, 0) + 1
            name = f"{name}-{number}" if number > 1 else name
            yield PageFigure(name, figure.drawing, figure.caption, figure.wide)

    def write(self, file: Path, *, csv: Path | None = None, png: Path | None = None) -> None:
        """Write the page to a file, and its figures to the folders `csv` and `png` if given.

        Folders are created, and files overwritten atomically. Raises FedplanError if `png` is given
        without matplotlib.
        """
        write_atomic(file, self.html())
        for folder in (csv, png):
            if folder is not None:
                make_folder(folder)
        for figure in self.figures():
            if csv is not None:
                write_atomic(csv / f"{figure.name}.csv", figure.drawing.csv())
            if png is not None:
                save_png(figure.drawing, png / f"{figure.name}.png")
