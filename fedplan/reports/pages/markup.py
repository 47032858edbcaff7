# SPDX-License-Identifier: Apache-2.0
"""Build HTML in which every text is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

VOID = frozenset({"meta", "br"})
"""Elements without content and end tag."""


class Html(str):
    """A string that is HTML already; any other string is escaped when put into an element."""

    __slots__ = ()


def tag(element: str, /, *children: str, **attributes: str) -> Html:
    """Return an HTML element with children and attributes; strings that are no Html are escaped.

    In names of attributes a trailing `_` is dropped and other `_` become `-`: `class_`,
    `http_equiv`. Elements in VOID drop their children.
    """
    pairs = "".join(
        f' {word.rstrip("_").replace("_", "-")}="{escape(_printable(value))}"'
        for word, value in attributes.items()
    )
    if element in VOID:
        return Html(f"<{element}{pairs}>")
    return Html(f"<{element}{pairs}>{join_html(*children)}</{element}>")


def join_html(*children: str) -> Html:
    """Return the concatenated children, each escaped unless it is Html."""
    return Html("".join(c if isinstance(c, Html) else escape(_printable(c)) for c in children))


def paragraphs(*texts: str) -> list[Html]:
    """Return a paragraph for each text that is not empty."""
    return [tag("p", text) for text in texts if text]


def html_list(items: Iterable[str]) -> Html:
    """Return a bullet list of texts."""
    return tag("ul", *(tag("li", item) for item in items))


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> Html:
    """Return a table with a header of `columns`; the last `numbers` columns are right-aligned."""
    first = len(columns) - numbers

    def cells(name: str, row: Sequence[str]) -> list[Html]:
        return [
            tag(name, cell, **({"class_": "n"} if place >= first else {}))
            for place, cell in enumerate(row)
        ]

    head = tag("thead", tag("tr", *cells("th", columns)))
    body = tag("tbody", *(tag("tr", *cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="wide")


def _printable(text: str) -> str:
    """Replace control characters except newlines; some could reverse the text beside them."""
    mark = "\N{REPLACEMENT CHARACTER}"
    return "".join(char if char.isprintable() or char == "\n" else mark for char in text)
