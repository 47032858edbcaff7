# SPDX-License-Identifier: Apache-2.0
"""Give a package index the README with links to the documentation site, since it has no files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s]+)\)")


def with_addresses(text: str, site: str) -> str:
    """Return a page of the repository's root with links to the site in place of files."""

    def address(link: re.Match[str]) -> str:
        path = link[2].removeprefix("docs/")
        return f"{link[1]}{site}/{re.sub(r'[.]md(?=#|$)', '.html', path)})"

    return LINK.sub(address, text)


class IndexReadme(MetadataHookInterface):
    """The hook by which hatchling gets the README."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the field `readme`."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        text = with_addresses(text, metadata["urls"]["Documentation"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
