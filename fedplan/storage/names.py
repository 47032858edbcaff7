# SPDX-License-Identifier: Apache-2.0
"""Valid names of studies and clients, and folder names for arbitrary names."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from urllib.parse import quote

STUDY = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,62}[A-Za-z0-9_-])?", re.ASCII)
"""Valid names of studies."""
RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.ASCII | re.IGNORECASE)
"""Device names on Windows, which no folder may have."""
LONGEST = 200
"""Longest folder name in characters: file systems allow 255 bytes, and suffixes are added."""


def safe_folder_name(name: str) -> str:
    """Return a valid folder name for any text; different texts get different folder names.

    Special characters are percent-encoded. A result over 200 characters is cut and gets a digest.
    """
    quoted = quote(name, safe=" ", errors="surrogatepass") or "%"
    if quoted.startswith("."):
        quoted = quoted.replace(".", "%2E", 1)
    if len(quoted) > LONGEST:
        # no quoted name has "%~": after its "%" come two digits
        digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
        quoted = f"{quoted[:100]}%~{digest[:40]}"
    return quoted


def validate_study_name(name: str) -> str:
    """Return `name` unchanged; ValueError if it is not a valid folder name on every system."""
    if not STUDY.fullmatch(name) or RESERVED.fullmatch(name):
        raise ValueError(
            f"a study cannot be called {name[:80]!r}: take letters, digits, '-', '_' and '.', at "
            "most 64, no dot or '-' at the start, no dot at the end, and no device such as 'nul'"
        )
    return name


def validate_client_names(names: list[str]) -> list[str]:
    """Return `names` unchanged; ValueError if one is invalid or two are equal.

    A name has 1 to 200 printable characters without space at the ends. Names are equal if they
    differ only in case or in compatible Unicode characters (NFKC).
    """
    for name in names:
        if not name or not name.isprintable() or len(name) > LONGEST or name != name.strip():
            raise ValueError(
                f"a client cannot be called {name[:80]!r}: take 1 to {LONGEST} printable "
                "characters, no space at its ends"
            )
    normalized_names = set[str]()
    for name in names:
        normalized = unicodedata.normalize("NFKC", name).casefold()
        if normalized in normalized_names:
            raise ValueError(f"a name is listed twice: {name!r}")
        normalized_names.add(normalized)
    return names
