# SPDX-License-Identifier: Apache-2.0
"""A page of sections with figures, as one self-contained HTML file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedplan.errors import FedplanError
from fedplan.reports.figures.drawing import FONTS, PALETTE, Drawing, palette_css
from fedplan.storage.files import SHARED, make_folder, write_atomic

WIDTHS = (960.0, 480.0)
"""The widths in pixels of a figure over the full page: on wide screens, and on narrow ones."""


@dataclass(frozen=True)
class PageBlock:
    """A part of a page: a macro of `templates/blocks.html.j2`, and its arguments."""

    kind: str
    values: dict[str, Any]


def block(kind: str, **values: Any) -> PageBlock:
    """Return a block of a kind with its values."""
    return PageBlock(kind, values)


@dataclass(frozen=True)
class PageFigure:
    """A drawing with a caption; `name` is the stem of its CSV and PNG files.

    With a `narrow` version for narrow screens, it takes the full width of the page.
    """

    name: str
    drawing: Drawing
    narrow: Drawing | None = None
    caption: str = ""


@dataclass(frozen=True)
class PageSection:
    """A section: `intro` above the figures, blocks `after` them; a text is a paragraph."""

    title: str
    intro: tuple[str | PageBlock, ...] = ()
    figures: tuple[PageFigure, ...] = ()
    after: tuple[str | PageBlock, ...] = ()

    @property
    def has_content(self) -> bool:
        """Whether there is more than the title."""
        return bool(self.intro or self.figures or self.after)


@dataclass(frozen=True)
class Page:
    """A page of sections; a browser reloads it after `refresh_seconds` (0: never).

    `faults` in the reported data are for the caller, and not written.
    """

    title: str
    lead: tuple[str | PageBlock, ...]
    sections: tuple[PageSection, ...]
    foot: str = ""
    refresh_seconds: int = 0
    faults: tuple[str, ...] = ()

    def html(self) -> str:
        """Return the page as one HTML document without scripts or external resources."""
        from jinja2 import Environment, PackageLoader, StrictUndefined

        environment = Environment(
            loader=PackageLoader("fedplan.reports.pages"),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=_printable,
            trim_blocks=True,
        )
        kinds = environment.get_template("blocks.html.j2").module
        values = {"palette": PALETTE, "palette_css": palette_css(), "fonts": FONTS}
        return environment.get_template("page.html.j2").render(page=self, kinds=kinds, **values)

    def figures(self) -> Iterator[PageFigure]:
        """Yield a copy of each figure, with a distinct `name` that is safe as a file name."""
        counts = dict[str, int]()
        for figure in (each for section in self.sections for each in section.figures):
            name = re.sub(r"[^a-z0-9]+", "-", figure.name.lower()).strip("-") or "figure"
            counts[name] = number = counts.get(name, 0) + 1
            yield replace(figure, name=f"{name}-{number}" if number > 1 else name)

    def write(self, file: Path, *, csv: Path | None = None, png: Path | None = None) -> None:
        """Write the page, and its figures to the folders `csv` and `png`; files are replaced.

        Raises FedplanError if the file's name does not end in .html: a page must not replace a file
        of the run.
        """
        if file.suffix.lower() not in (".html", ".htm"):
            raise FedplanError(f"a page cannot be written to {file}: give a name ending in .html")
        write_atomic(file, self.html(), mode=SHARED)
        for folder in filter(None, (csv, png)):
            make_folder(folder)
        for figure in self.figures():
            if csv is not None:
                write_atomic(csv / f"{figure.name}.csv", figure.drawing.csv(), mode=SHARED)
            if png is not None:
                figure.drawing.save(png / f"{figure.name}.png")


def _printable(value: object) -> object:
    """Replace control characters except newlines in text; some could reverse the text beside it."""
    from markupsafe import Markup

    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    mark = "\N{REPLACEMENT CHARACTER}"
    return "".join(char if char.isprintable() or char == "\n" else mark for char in value)
