# SPDX-License-Identifier: Apache-2.0
"""Link words of ours to the dictionary where a page of the site first says them.

Only words that mean nothing else are linked: "part" and "home" are left to their sentences.
"""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

DICTIONARY = "concepts.md"
TERMS = {
    "agreement": "agreement",
    "drift": "drift",
    "epsilon": "epsilon",
    "fingerprint": "fingerprint",
    "ledger": "ledger",
    "param": "param",
    "params": "param",
    "probe": "probe",
    "quorum": "quorum",
    "rider": "rider",
    "riders": "rider",
    "trait": "trait",
    "traits": "trait",
    "world": "world",
}
WORD = re.compile(rf"\b(?:{'|'.join(TERMS)})\b")
APART = re.compile(
    r"(^ *```.*?^ *```$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|^[#|][^\n]*$|<!--.*?-->)", re.M | re.S
)
"""Where no word is linked: code, links, headings, tables and comments."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with the first of each word as a link; dictionary and reference stay."""
    uri = page.file.src_uri
    if uri == DICTIONARY or "/" in uri:
        return markdown
    return linked(markdown, relpath(DICTIONARY, Path(uri).parent))


def linked(markdown: str, target: str) -> str:
    seen = set[str]()

    def link(found: re.Match[str]) -> str:
        term = TERMS[found[0]]
        if term in seen:
            return found[0]
        seen.add(term)
        return f"[{found[0]}]({target}#{term})"

    pieces = APART.split(markdown)
    return "".join(piece if i % 2 else WORD.sub(link, piece) for i, piece in enumerate(pieces))
