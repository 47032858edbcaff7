# SPDX-License-Identifier: Apache-2.0
"""Openings: whose sums a site has helped to open, and from which values on, over all its runs.

Two sums that start from the same values differ by what those sent who are in one of them alone. So
from the same values a site opens a slot for the same senders, and for no others. And a round is
opened by one attempt, also if the diary of its run is gone: noise that is drawn anew for the same
change would average out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedplan.privacy.masking.ciphers import MaskingError, digest_of
from fedplan.privacy.masking.terms import Terms
from fedplan.storage.errors import explained
from fedplan.storage.files import make_folder
from fedplan.storage.locks import alone

Sums = Mapping[str, tuple[str, ...]]
"""The senders of each slot that is opened."""


class Openings:
    """A file with a line for each round: the digest of what it starts from, and its sums."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def require(self, terms: Terms, ground: str, sums: Sums) -> None:
        """Refuse sums that begin as others did, and are of other senders, or a second attempt."""
        occasion, own = terms.occasion, terms.digest.hex()
        for told in self._lines():
            if told.get("occasion") == occasion and told["terms"] != own:
                raise MaskingError(
                    f"round {terms.round} was opened in another attempt: a site opens a round once"
                )
        held = {_short(slot): senders for slot, senders in sums.items()}
        for told in (line for line in self._lines() if line["ground"] == ground):
            for senders, slots in told["sums"]:
                for slot in held.keys() & set(slots):
                    if odd := set(senders) ^ set(held[slot]):
                        raise MaskingError(
                            "a sum of other sites was opened from the same values: the difference "
                            f"of both is what {', '.join(sorted(odd))} sent; wait for the same "
                            f"sites, or, if that may be told, remove {self._file}"
                        )

    def note(self, terms: Terms, ground: str, sums: Sums) -> None:
        """Write sums down before they are opened, if they may be."""
        by_senders = dict[tuple[str, ...], list[str]]()
        for slot, senders in sums.items():
            by_senders.setdefault(senders, []).append(_short(slot))
        told = [[list(senders), sorted(slots)] for senders, slots in sorted(by_senders.items())]
        line = {"ground": ground, "sums": told}
        line |= {"occasion": terms.occasion, "terms": terms.digest.hex()}
        with explained(f"{self._file} cannot be written", "nothing is opened; mend the disk"):
            make_folder(self._file.parent)
            with alone(self._file.parent, strictly=True, wait=60.0):
                self.require(terms, ground, sums)
                if line not in self._lines():
                    self._append(json.dumps(line).encode() + b"\n")

    def _append(self, line: bytes) -> None:
        """Add a line for good, after the last whole one."""
        held = self._file.read_bytes() if self._file.exists() else b""
        self._file.touch(mode=0o600)
        with self._file.open("r+b") as out:
            out.truncate(held.rfind(b"\n") + 1)
            out.seek(0, os.SEEK_END)
            out.write(line)
            out.flush()
            os.fsync(out.fileno())

    def _lines(self) -> list[dict[str, Any]]:
        """All lines that are whole: one that a kill cut off was never answered."""
        try:
            content = self._file.read_bytes() if self._file.exists() else b""
            return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
        except (OSError, ValueError) as error:
            raise MaskingError(
                f"{self._file} cannot be read: {error}; put a copy of it back: without it two sums "
                "could be held against each other"
            ) from error


def _short(slot: str) -> str:
    """A slot in a few letters: two that are alike are taken for one, and refused the sooner."""
    return digest_of("slot", slot).hex()[:8]
