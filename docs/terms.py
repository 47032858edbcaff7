# SPDX-License-Identifier: Apache-2.0
"""Link words of fedplan to the glossary where a page of the site first uses them.

Only words without another meaning are linked: "part" and "state" are not.
"""

from __future__ import annotations

import re
from os.path import relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

GLOSSARY = "reference/glossary.md"
TERMS = {
    "agreement": "agreement",
    "drift": "drift",
    "epsilon": "epsilon",
    "fingerprint": "fingerprint",
    "ledger": "ledger",
    "param": "parameter",
    "params": "parameter",
    "probe": "probe",
    "trait": "trait",
    "traits": "trait",
}
"""Each word with its anchor in the glossary."""
WORD = re.compile(rf"\b(?:{'|'.join(TERMS)})\b")
APART = re.compile(
    r"(^ *```.*?^ *```$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)|^[#|][^\n]*$|<!--.*?-->)", re.M | re.S
)
"""Places without links: code, links, headings, tables and comments."""


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with a link at the first use of each word; glossary and reference are unchanged."""
    uri = page.file.src_uri
    if uri.startswith(("reference/", "research/")):
        return markdown
    return linked(markdown, relpath(GLOSSARY, Path(uri).parent))


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
