# SPDX-License-Identifier: Apache-2.0
"""Pages: sections with their figures, as one HTML file that needs nothing beside it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.pictures import save_png
from fedplan.reports.pages.markup import Html, tag
from fedplan.reports.pages.style import STYLE
from fedplan.storage.files import make_folder, put_file

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may fetch or run for a page: nothing. Its style stands in it."""


@dataclass(frozen=True)
class Shown:
    """A drawing on a page: the name of its files, what it shows, and whether it is wide."""

    name: str
    drawing: Drawing
    caption: str = ""
    whole: bool = False

    def html(self) -> Html:
        """It as a figure with its caption."""
        sheet = tag("div", Html(self.drawing.svg()), class_="sheet")
        words = [tag("figcaption", self.caption)] if self.caption else []
        kind = "whole" if self.whole else "half"
        return tag("figure", tag("h3", self.drawing.title), sheet, *words, class_=kind)


@dataclass(frozen=True)
class PageSection:
    """A part of a page: a heading, what is said, the figures, and what is said after them."""

    title: str
    words: tuple[Html, ...] = ()
    figures: tuple[Shown, ...] = ()
    after: tuple[Html, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything in it: a page leaves out what is empty."""
        return bool(self.words or self.figures or self.after)

    def html(self) -> Html:
        """It as HTML."""
        figures = [tag("div", *(each.html() for each in self.figures), class_="figures")]
        held = [*self.words, *(figures if self.figures else []), *self.after]
        return tag("section", tag("h2", self.title), *held)


@dataclass(frozen=True)
class Page:
    """A page: its title, what is said first, its sections, and how it was made.

    One that is `renewed` asks a browser to look again after so many seconds. `faults` are what is
    wrong with what it tells of.
    """

    title: str
    lead: tuple[Html, ...]
    sections: tuple[PageSection, ...]
    foot: str = ""
    renewed: int = 0
    faults: tuple[str, ...] = ()

    def html(self) -> str:
        """It as one file. Whoever opens it runs nothing and asks nobody."""
        again = [tag("meta", http_equiv="refresh", content=str(self.renewed))]
        head = tag(
            "head",
            tag("meta", charset="utf-8"),
            tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
            tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
            tag("meta", name="color-scheme", content="light dark"),
            *(again if self.renewed else []),
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

    def figures(self) -> Iterator[Shown]:
        """Every figure of it, each under a file name of its own."""
        seen = dict[str, int]()
        for shown in (each for section in self.sections for each in section.figures):
            name = re.sub(r"[^a-z0-9]+", "-", shown.name.lower()).strip("-") or "figure"
            seen[name] = number = seen.get(name, 0) + 1
            name = f"{name}-{number}" if number > 1 else name
            yield Shown(name, shown.drawing, shown.caption, shown.whole)

    def write(self, file: Path, *, csv: Path | None = None, png: Path | None = None) -> None:
        """Put it into a file, whole, and the numbers and pictures of its figures into folders."""
        put_file(file, self.html())
        for folder in (csv, png):
            if folder is not None:
                make_folder(folder)
        for shown in self.figures():
            if csv is not None:
                put_file(csv / f"{shown.name}.csv", shown.drawing.csv())
            if png is not None:
                save_png(shown.drawing, png / f"{shown.name}.png")
