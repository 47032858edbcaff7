# SPDX-License-Identifier: Apache-2.0
"""What a client stores before each message leaves: its progress in a round, and its reveal log.

All that a client draws in a round follows from one secret. So a client that is restarted sends the
same messages again, and cannot contradict an earlier one.

The difference of two sums of the same inputs is the input of the clients that are in only one of
them. So of the same input a client unmasks a slot for the same senders only. And a round is
unmasked in one attempt, even if the progress of its run is lost: new noise on the same change would
average out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple, dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol, get_type_hints

from fedplan.errors import StoreError
from fedplan.secagg.crypto import SecAggError, sha256_of
from fedplan.secagg.messages import KeyAdvert, value_from_json, value_to_json
from fedplan.secagg.terms import Slot, Terms
from fedplan.storage.append_log import AppendLog, DamagedLog
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import make_folder
from fedplan.storage.store import Store

ShareHashes = Mapping[str, tuple[bytes, ...]]
"""Commitments to shares, by client."""
SlotSenders = Mapping[str, tuple[str, ...]]
"""The senders of each slot that is unmasked."""


@dataclass(frozen=True)
class RoundProgress:
    """A client's last round: terms, secret, and the messages that the client accepted and sent.

    secret: random bytes that all of the client's keys and seeds of the round derive from. Kept
    until the server has committed the round, since a restarted server may request the same messages
    again; then erased, and empty.
    slots: names of the slots that the client declared.
    input_digest: digest of everything that the client's input depends on.
    adverts: the accepted roster; () before, as all fields below are empty before their step.
    ciphertexts: the shares forwarded to the client, by sender.
    share_hashes: by sender, the commitments to these shares.
    masked_digest: digest of the masked input that was sent.
    survivors: the survivor list that was signed.
    revealed: whether the unmask shares were sent.
    """

    terms: Terms
    secret: bytes
    slots: tuple[str, ...]
    input_digest: str = ""
    adverts: tuple[KeyAdvert, ...] = ()
    ciphertexts: Mapping[str, bytes] = field(default_factory=dict[str, bytes])
    share_hashes: ShareHashes = field(default_factory=dict[str, tuple[bytes, ...]])
    masked_digest: str = ""
    survivors: tuple[str, ...] = ()
    revealed: bool = False


class ProgressStore(Protocol):
    """Storage of a client's progress in its last round only."""

    def read(self) -> RoundProgress | None:
        """The last round written, None before the first."""
        ...

    def write(self, progress: RoundProgress) -> None:
        """Store a round, in place of the one before."""


class MemoryProgressStore:
    """A store in memory, for simulations, where one process is all clients."""

    def __init__(self) -> None:
        self._progress: RoundProgress | None = None

    def read(self) -> RoundProgress | None:
        return self._progress

    def write(self, progress: RoundProgress) -> None:
        self._progress = progress


class DiskProgressStore:
    """A store in a folder, created if missing, that survives a crash.

    The constructor locks the folder, since two processes could sign different survivor lists;
    StoreError if it is. `read` never falls back to an older version of damaged data.
    """

    def __init__(self, folder: Path, *, encryption: Encryption | None = None) -> None:
        # One version only: no secret of an earlier step, attempt or round stays on the disk.
        self._store, self._folder = Store(folder, keep=1, encryption=encryption), folder
        self._store.lock()
        if len(self._store.numbers()) > 1 and (progress := self.read()):
            # A crash came between writing and removing: the older version may hold secrets.
            self.write(progress)

    def read(self) -> RoundProgress | None:
        """The last round written, None before the first; a SecAggError if the store is damaged."""
        newest, unreadable = None, None
        try:
            newest = self._store.read_newest()
        except StoreError as error:
            unreadable = error
        if self._store.skipped:
            raise SecAggError(
                f"the round state in {self._folder} is damaged ({self._store.skipped[0]}): restore "
                "a copy; without its last version the client could reveal a round twice"
            ) from unreadable
        if unreadable is not None:
            raise unreadable
        return _from_json(newest.meta) if newest else None

    def write(self, progress: RoundProgress) -> None:
        newest = max(self._store.numbers(), default=0)
        self._store.write({}, _to_json(progress), number=newest + 1)


def _to_json(progress: RoundProgress) -> dict[str, Any]:
    slots = [[*astuple(slot)] for slot in progress.terms.slots]
    adverts = [
        [a.client, a.encryption_key.hex(), a.masking_key.hex(), a.signature.hex(), [*a.slots]]
        for a in progress.adverts
    ]
    short = {"terms": asdict(progress.terms) | {"slots": slots}, "adverts": adverts}
    values = {each.name: getattr(progress, each.name) for each in fields(progress)}
    return {n: short[n] if n in short else value_to_json(v) for n, v in values.items()}


def _from_json(data: Mapping[str, Any]) -> RoundProgress:
    settings: dict[str, Any] = dict(data["terms"])
    terms = Terms(slots=tuple(Slot(*slot) for slot in settings.pop("slots")), **settings)
    adverts = list[KeyAdvert]()
    for client, *keys_and_signature, slots in data["adverts"]:
        encryption_key, masking_key, signature = map(bytes.fromhex, keys_and_signature)
        keys = encryption_key, masking_key, signature
        adverts.append(KeyAdvert(*keys, terms.digest, client, tuple(slots)))
    values = {"terms": terms, "adverts": tuple(adverts), "revealed": data["revealed"]}
    kinds = get_type_hints(RoundProgress).items()
    values |= {n: value_from_json(kind, data[n]) for n, kind in kinds if n not in values}
    return RoundProgress(**values)


class RevealLog:
    """A client's log of unmasked sums: `file` has a JSON line per round, with senders by slot.

    Call `require_consistent` before agreeing to unmask, and `record` before unmasking. Both, and
    the constructor, raise a SecAggError if the log is damaged.
    """

    def __init__(self, file: Path) -> None:
        self._log = AppendLog(file, chained=True)
        self._lines()  # before a client trains for a sum that it could not unmask

    def require_consistent(self, terms: Terms, input_digest: str, senders: SlotSenders) -> None:
        """Raise a SecAggError if unmasking these sums could reveal a difference of two sums.

        That is, if the round was unmasked under other terms, or if one of the slots was unmasked
        with the same input digest for other senders.
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
                            "a sum of other clients was unmasked from the same values or examples: "
                            f"the difference of both is what {', '.join(sorted(difference))} sent; "
                            "wait for the same clients, or, if that may be revealed, empty "
                            f"{self._log.file} and remove its .head file"
                        )

    def record(self, terms: Terms, input_digest: str, senders: SlotSenders) -> None:
        """Append a round's sums to the file and sync; call before the sums are unmasked.

        A round that is in the file is not written again. The first line of a file that is there and
        empty, as owners may leave it, gets the field `emptied`. Waits up to 60 s for the file's
        lock. Raises a SecAggError as `require_consistent` does, and a StoreError if the file cannot
        be written.
        """
        by_senders = dict[tuple[str, ...], list[str]]()
        for slot, clients in senders.items():
            by_senders.setdefault(clients, []).append(_short(slot))
        sums = [[list(clients), sorted(slots)] for clients, slots in sorted(by_senders.items())]
        line = {"input_digest": input_digest, "sums": sums}
        line |= {"reveal_id": terms.reveal_id, "terms": terms.digest.hex()}
        make_folder(self._log.file.parent)
        # Marked, so that the missing lines of earlier sums are not taken for lost ones.
        emptied = self._log.file.exists() and not self._log.file.stat().st_size
        with self._log.locked():
            self.require_consistent(terms, input_digest, senders)
            if not any(line.items() <= each.items() for each in self._lines()):
                self._log.append(line | ({"emptied": True} if emptied else {}))

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
