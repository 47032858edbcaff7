# SPDX-License-Identifier: Apache-2.0
"""Diaries: what a site has said in a masked round, on disk before it is said.

All that a site draws in a round follows from one secret. So a site that was killed says the same
again, and what it has said once it cannot say differently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedplan.privacy.masking.ciphers import MaskingError
from fedplan.privacy.masking.letters import Advert
from fedplan.privacy.masking.terms import Slot, Terms
from fedplan.storage.encryption import Encryption
from fedplan.storage.store import Store


@dataclass(frozen=True)
class RoundNotes:
    """A site's last masked round: its secret, and what was settled, step by step.

    `ground` is a digest of what its numbers are made of, `masked` that of the words that it sent,
    `survivors` are those that it has signed, and `answered` is whether it has given what opens
    them. The secret stays until the next round begins: a server that was killed asks for the same
    words again.
    """

    terms: Terms
    secret: bytes
    slots: tuple[str, ...]
    ground: str = ""
    adverts: tuple[Advert, ...] = ()
    boxes: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    masked: str = ""
    survivors: tuple[str, ...] = ()
    answered: bool = False


class Notebook(Protocol):
    """Where a site notes a round."""

    def read(self) -> RoundNotes | None:
        """The last round, None before the first."""
        ...

    def write(self, notes: RoundNotes) -> None:
        """Note a round for good."""


class Unwritten:
    """Notes in memory: of a simulation, in which one process is all sites and hides nothing."""

    def __init__(self) -> None:
        self._notes: RoundNotes | None = None

    def read(self) -> RoundNotes | None:
        """The last round, None before the first."""
        return self._notes

    def write(self, notes: RoundNotes) -> None:
        """Note a round until the process ends."""
        self._notes = notes


class Diary:
    """Notes on disk: when `write` returns they outlive a kill. With a `seal` nobody can read them.

    One process has it at a time: two could each note another list of survivors. A damaged diary is
    an error, and never the one before it: an older page would let a site say something else.
    """

    def __init__(self, folder: Path, *, seal: Encryption | None = None) -> None:
        self._store, self._folder = Store(folder, seal=seal), folder
        self._store.claim()

    def read(self) -> RoundNotes | None:
        """The last round, None before the first."""
        found = self._store.read()
        if self._store.skipped:
            raise MaskingError(
                f"the diary {self._folder} is damaged ({self._store.skipped[0]}): put a copy back; "
                "without its last page the site could open a round twice"
            )
        return _read(found.meta) if found else None

    def write(self, notes: RoundNotes) -> None:
        """Note a round for good."""
        newest = max(self._store.numbers(), default=0)
        self._store.write({}, _written(notes), number=newest + 1)


def _written(notes: RoundNotes) -> dict[str, Any]:
    """Notes as JSON."""
    adverts = [
        [each.site, *(b.hex() for b in (each.boxing, each.masking, each.signature)), [*each.slots]]
        for each in notes.adverts
    ]
    return {
        "terms": asdict(notes.terms)
        | {"slots": [[*asdict(s).values()] for s in notes.terms.slots]},
        "secret": notes.secret.hex(),
        "slots": list(notes.slots),
        "ground": notes.ground,
        "adverts": adverts,
        "boxes": {site: box.hex() for site, box in notes.boxes.items()},
        "masked": notes.masked,
        "survivors": list(notes.survivors),
        "answered": notes.answered,
    }


def _read(said: Mapping[str, Any]) -> RoundNotes:
    held: dict[str, Any] = dict(said["terms"])
    slots = tuple(Slot(*each) for each in held.pop("slots"))
    terms = Terms(**held, slots=slots)
    adverts = tuple(_advert(terms.digest, *each) for each in said["adverts"])
    return RoundNotes(
        terms=terms,
        secret=bytes.fromhex(said["secret"]),
        slots=tuple(said["slots"]),
        ground=said["ground"],
        adverts=adverts,
        boxes={site: bytes.fromhex(box) for site, box in said["boxes"].items()},
        masked=said["masked"],
        survivors=tuple(said["survivors"]),
        answered=said["answered"],
    )


def _advert(
    terms: bytes, site: str, boxing: str, masking: str, signature: str, slots: list[str]
) -> Advert:
    keys = bytes.fromhex(boxing), bytes.fromhex(masking)
    return Advert(terms, site, *keys, tuple(slots), bytes.fromhex(signature))
