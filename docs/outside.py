# SPDX-License-Identifier: Apache-2.0
"""Add the files outside of `docs/` that pages link to: changes, scripts, results and research.

Links in pages are those of the repository. In the site each such file keeps its path from the root,
and links are rewritten to it.
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
PAGES = ("AGENTS.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
START = {"README.md": "index.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root and every file that a page links to, also by way of other pages."""
    open_pages = [DOCS / file.src_uri for file in files if file.is_documentation_page()]
    added = {ROOT / name for name in PAGES}
    open_pages += sorted(added)
    while open_pages:
        linked = {place for place in targets(open_pages.pop()) if not inside(place)} - added
        added |= linked
        open_pages += sorted(place for place in linked if place.suffix == ".md")
    for place in sorted(added):
        name = place.relative_to(ROOT).as_posix()
        if name not in START:
            files.append(File.generated(config, name, abs_src_path=str(place)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's links to the paths of the site."""
    uri = page.file.src_uri
    outside = page.file.generated_by is not None
    folder = (ROOT if outside else DOCS).joinpath(uri).parent

    def rewritten(match: re.Match[str]) -> str:
        place = (folder / match[2]).resolve()
        if not outside and inside(place):
            return match[0]
        name = (place.relative_to(DOCS if inside(place) else ROOT)).as_posix()
        name = START.get(name, name) if not inside(place) else name
        anchor = "" if name in START.values() else match[3] or ""
        return f"{match[1]}{relpath(name, Path(uri).parent)}{anchor}{match[4]}"

    return LINK.sub(rewritten, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Let the links of llms.txt lead to pages of the site."""
    file = Path(config.site_dir) / "llms.txt"
    text = file.read_text(encoding="utf-8").replace("(../", "(").replace(".md)", ".html)")
    file.write_text(text, encoding="utf-8")


def targets(file: Path) -> Iterator[Path]:
    """The files that a page links to."""
    for match in LINK.finditer(file.read_text(encoding="utf-8")):
        place = (file.parent / match[2]).resolve()
        if place.is_file():
            yield place


def inside(place: Path) -> bool:
    """Whether a file is below docs/."""
    return place.is_relative_to(DOCS)
