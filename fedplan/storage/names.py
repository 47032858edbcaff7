# SPDX-License-Identifier: Apache-2.0
"""Names: what a study and its sites may be called, and the folder that any name makes."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from urllib.parse import quote

STUDY = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", re.ASCII)
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.ASCII | re.IGNORECASE)
"""What some systems take for a device, whatever folder it is in."""
LONGEST = 200
"""Characters of a folder's name: every disk takes 255 bytes, and some suffixes are added."""


def folder_named(name: str) -> str:
    """The name of one folder for one name, whatever that holds; two names never share one."""
    said = quote(name, safe=" ", errors="surrogatepass") or "%"
    if said.startswith("."):
        said = said.replace(".", "%2E", 1)
    if len(said) > LONGEST:
        # no quoted name has "%~": after its "%" come two digits
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        said = f"{said[:100]}%~{digest[:40]}"
    return said


def a_study_name(name: str) -> str:
    """The name, if a folder can be called so everywhere: a run is kept under it."""
    if not STUDY.fullmatch(name) or RESERVED.fullmatch(name):
        raise ValueError(
            f"a study cannot be called {name[:80]!r}: take letters, digits, '-', '_' and '.', at "
            "most 64, no dot or '-' at the start, no dot at the end, and no device such as 'nul'"
        )
    return name


def client_names(names: list[str]) -> list[str]:
    """The names, if each can be read, and no two of them look alike to a machine."""
    for name in names:
        if not name or not name.isprintable() or len(name) > LONGEST or name != name.strip():
            raise ValueError(
                f"a client cannot be called {name[:80]!r}: take 1 to {LONGEST} printable "
                "characters, no space at its ends"
            )
    if again := _again(names):
        raise ValueError(f"a name stands in names twice: {again!r}")
    return names


def _again(names: Iterable[str]) -> str:
    """The first name that another one is spelled like, with other signs for the same letters."""
    seen = set[str]()
    for name in names:
        like = unicodedata.normalize("NFKC", name).casefold()
        if like in seen:
            return name
        seen.add(like)
    return ""
