# SPDX-License-Identifier: Apache-2.0
"""Bring into the site what its pages link to outside of `docs/`: changes, scripts, results.

A page's links are those of the repository, so that they lead somewhere there too. In the site each
such file stands at its path from the root, and links are turned to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?(\))")
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
START = {"README.md": "index.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add all that is linked to, and the pages of the root."""
    texts = [(file.src_uri, DOCS / file.src_uri) for file in files if file.is_documentation_page()]
    texts += [(name, ROOT / name) for name in PAGES]
    wanted = {place for _, file in texts for place in targets(file) if not inside(place)}
    for place in sorted({ROOT / name for name in PAGES} | wanted):
        name = place.relative_to(ROOT).as_posix()
        if name not in START:
            files.append(File.generated(config, name, abs_src_path=str(place)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn a page's links to where things stand in the site."""
    uri = page.file.src_uri
    folder = ROOT if uri in PAGES else (DOCS / uri).parent

    def turned(found: re.Match[str]) -> str:
        place = (folder / found[2]).resolve()
        if uri not in PAGES and inside(place):
            return found[0]
        name = (place.relative_to(DOCS if inside(place) else ROOT)).as_posix()
        name = START.get(name, name) if not inside(place) else name
        anchor = "" if name in START.values() else found[3] or ""
        return f"{found[1]}{relpath(name, Path(uri).parent)}{anchor}{found[4]}"

    return LINK.sub(turned, markdown)


def targets(file: Path) -> Iterator[Path]:
    """The files that a page links to."""
    for found in LINK.finditer(file.read_text(encoding="utf-8")):
        place = (file.parent / found[2]).resolve()
        if place.is_file():
            yield place


def inside(place: Path) -> bool:
    """Whether a file is one of the documents."""
    return place.is_relative_to(DOCS)
