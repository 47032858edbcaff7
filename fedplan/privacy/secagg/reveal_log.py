# SPDX-License-Identifier: Apache-2.0
"""Reveal log of a client: the sums that it has helped to unmask, over all its runs.

The difference of two sums of the same inputs is the input of the clients that are in only one of
them. So of the same input a client unmasks a slot for the same senders only. And a round is
unmasked in one attempt, even if the progress of its run is lost: new noise on the same change would
average out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedplan.privacy.secagg.crypto import SecAggError, sha256_of
from fedplan.privacy.secagg.terms import Terms
from fedplan.storage.append_log import AppendLog, DamagedLog
from fedplan.storage.files import make_folder

SlotSenders = Mapping[str, tuple[str, ...]]
"""The senders of each slot that is unmasked."""


class RevealLog:
    """A client's log of unmasked sums: `file` has a JSON line per round, with senders by slot.

    Call `require_consistent` before agreeing to unmask, and `record` before unmasking; the first
    `record` creates the file and folder.
    """

    def __init__(self, file: Path) -> None:
        self._log = AppendLog(file)

    def require_consistent(self, terms: Terms, input_digest: str, senders: SlotSenders) -> None:
        """Raise a SecAggError if unmasking these sums could reveal a difference of two sums.

        That is, if the round was unmasked under other terms, or if one of the slots was unmasked
        with the same input digest for other senders. Also raised if the file cannot be read. Writes
        nothing.
        """
        reveal_id, terms_digest = terms.reveal_id, terms.digest.hex()
        lines = self._lines()
        for line in lines:
            if line.get("reveal_id") == reveal_id and line["terms"] != terms_digest:
                raise SecAggError(
                    f"round {terms.round} was unmasked in another attempt: a client reveals a "
                    "round once"
                )
        by_slot = {_short(slot): clients for slot, clients in senders.items()}
        for line in (line for line in lines if line["input_digest"] == input_digest):
            for earlier, slots in line["sums"]:
                for slot in by_slot.keys() & set(slots):
                    if difference := set(earlier) ^ set(by_slot[slot]):
                        raise SecAggError(
                            "a sum of other clients was unmasked from the same values: the "
                            f"difference of both is what {', '.join(sorted(difference))} sent; "
                            "wait for the same clients, or, if that may be revealed, remove "
                            f"{self._log.file}"
                        )

    def record(self, terms: Terms, input_digest: str, senders: SlotSenders) -> None:
        """Append a round's sums to the file and sync; call before the sums are unmasked.

        terms: of the round; input_digest: of everything that this client's input depends on;
        senders: of each slot. A round that is in the file is not written again; a torn last line is
        cut off. Waits up to 60 s for the file's lock. Raises a SecAggError as
        `require_consistent` does, and a StoreError if the file cannot be written.
        """
        by_senders = dict[tuple[str, ...], list[str]]()
        for slot, clients in senders.items():
            by_senders.setdefault(clients, []).append(_short(slot))
        sums = [[list(clients), sorted(slots)] for clients, slots in sorted(by_senders.items())]
        line = {"input_digest": input_digest, "sums": sums}
        line |= {"reveal_id": terms.reveal_id, "terms": terms.digest.hex()}
        make_folder(self._log.file.parent)
        with self._log.locked():
            self.require_consistent(terms, input_digest, senders)
            if line not in self._lines():
                self._log.append(line)

    def _lines(self) -> list[dict[str, Any]]:
        """Return all whole lines; [] without a file. Raises a SecAggError if one is unreadable."""
        # A torn line belongs to sums that were never unmasked.
        try:
            return self._log.read()
        except (DamagedLog, OSError) as error:
            raise SecAggError(
                f"{error}; restore a copy of {self._log.file}: without it two sums could be "
                "compared"
            ) from error


def _short(slot: str) -> str:
    """Short digest of a slot's name. A collision only refuses more."""
    return sha256_of("slot", slot).hex()[:8]
