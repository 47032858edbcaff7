# SPDX-License-Identifier: Apache-2.0
"""Markup: HTML in which a text stays a text, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

VOID = frozenset({"meta", "br"})
"""Elements that hold nothing."""


class Html(str):
    """What is HTML already; every other text is escaped before it stands in a page."""

    __slots__ = ()


def tag(element: str, /, *children: str, **attributes: str) -> Html:
    """An element. `class_` is its class, and `http_equiv` is spelled as HTML spells it."""
    said = "".join(
        f' {word.rstrip("_").replace("_", "-")}="{escape(_printable(value))}"'
        for word, value in attributes.items()
    )
    if element in VOID:
        return Html(f"<{element}{said}>")
    return Html(f"<{element}{said}>{together(*children)}</{element}>")


def together(*children: str) -> Html:
    """Pieces one after the other, each escaped unless it is HTML."""
    return Html("".join(e if isinstance(e, Html) else escape(_printable(e)) for e in children))


def paragraphs(*texts: str) -> list[Html]:
    """Each text that says something as a paragraph."""
    return [tag("p", text) for text in texts if text]


def listed(items: Iterable[str]) -> Html:
    """A list of texts."""
    return tag("ul", *(tag("li", item) for item in items))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0) -> Html:
    """A table; its last columns may be `numbers`, which stand at the right."""
    first = len(columns) - numbers

    def cells(name: str, row: Sequence[str]) -> list[Html]:
        return [
            tag(name, each, **({"class_": "n"} if place >= first else {}))
            for place, each in enumerate(row)
        ]

    head = tag("thead", tag("tr", *cells("th", columns)))
    body = tag("tbody", *(tag("tr", *cells("td", row)) for row in rows))
    return tag("div", tag("table", head, body), class_="wide")


def _printable(text: str) -> str:
    """A text without signs that steer: they could turn what stands beside them around."""
    lost = "\N{REPLACEMENT CHARACTER}"
    return "".join(each if each.isprintable() or each == "\n" else lost for each in text)
