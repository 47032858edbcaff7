# SPDX-License-Identifier: Apache-2.0
"""Progress of a client in its last secure aggregation round, stored before each message leaves.

All that a client draws in a round follows from one secret. So a client that is restarted sends the
same messages again, and cannot contradict an earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fedplan.privacy.secagg.crypto import SecAggError
from fedplan.privacy.secagg.messages import KeyAdvert
from fedplan.privacy.secagg.terms import Slot, Terms
from fedplan.storage.encryption import Encryption
from fedplan.storage.store import Store


@dataclass(frozen=True)
class RoundProgress:
    """A client's last round: terms, secret, and the messages that the client accepted and sent.

    secret: random bytes that all of the client's keys and seeds of the round derive from. Kept
    until the next round, since a restarted server may request the same messages again.
    slots: names of the slots that the client declared.
    input_digest: digest of everything that the client's input depends on.
    adverts: the accepted roster; () before, as all fields below are empty before their step.
    ciphertexts: the shares forwarded to the client, by sender.
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
        """The last round written, None before the first."""
        return self._progress

    def write(self, progress: RoundProgress) -> None:
        """Keep a round until the process ends."""
        self._progress = progress


class DiskProgressStore:
    """A store in a folder, created if missing, that survives a crash.

    encryption: encrypts the files; None: plain. The constructor locks the folder as long as the
    object exists, since two processes could sign different survivor lists, and raises a StoreError
    if another process has locked it. `read` never falls back to an older version of damaged data.
    """

    def __init__(self, folder: Path, *, encryption: Encryption | None = None) -> None:
        self._store, self._folder = Store(folder, encryption=encryption), folder
        self._store.lock()

    def read(self) -> RoundProgress | None:
        """The last round written, None before the first; a SecAggError if the store is damaged."""
        newest = self._store.read_newest()
        if self._store.skipped:
            raise SecAggError(
                f"the round state in {self._folder} is damaged ({self._store.skipped[0]}): restore "
                "a copy; without its last version the client could reveal a round twice"
            )
        return _from_json(newest.meta) if newest else None

    def write(self, progress: RoundProgress) -> None:
        """Write a round to disk and sync it."""
        newest = max(self._store.numbers(), default=0)
        self._store.write({}, _to_json(progress), number=newest + 1)


def _to_json(progress: RoundProgress) -> dict[str, Any]:
    """Progress as a JSON object with the keys of the stored format."""
    terms = progress.terms
    adverts = [
        [
            advert.client,
            *(b.hex() for b in (advert.encryption_key, advert.masking_key, advert.signature)),
            [*advert.slots],
        ]
        for advert in progress.adverts
    ]
    return {
        "terms": {
            "experiment": terms.experiment,
            "run": terms.run,
            "agreement_digest": terms.agreement_digest,
            "round": terms.round,
            "base_digest": terms.base_digest,
            "threshold": terms.threshold,
            "min_senders": terms.min_senders,
            "slots": [[*asdict(slot).values()] for slot in terms.slots],
            "attempt": terms.attempt,
        },
        "secret": progress.secret.hex(),
        "slots": list(progress.slots),
        "input_digest": progress.input_digest,
        "adverts": adverts,
        "ciphertexts": {name: shares.hex() for name, shares in progress.ciphertexts.items()},
        "masked_digest": progress.masked_digest,
        "survivors": list(progress.survivors),
        "revealed": progress.revealed,
    }


def _from_json(data: Mapping[str, Any]) -> RoundProgress:
    """Inverse of `_to_json`."""
    fields = data["terms"]
    terms = Terms(
        experiment=fields["experiment"],
        run=fields["run"],
        agreement_digest=fields["agreement_digest"],
        round=fields["round"],
        base_digest=fields["base_digest"],
        threshold=fields["threshold"],
        min_senders=fields["min_senders"],
        slots=tuple(Slot(*slot) for slot in fields["slots"]),
        attempt=fields["attempt"],
    )
    adverts = list[KeyAdvert]()
    for client, *keys_and_signature, slots in data["adverts"]:
        encryption_key, masking_key, signature = map(bytes.fromhex, keys_and_signature)
        keys = (encryption_key, masking_key)
        adverts.append(KeyAdvert(terms.digest, client, *keys, tuple(slots), signature))
    return RoundProgress(
        terms=terms,
        secret=bytes.fromhex(data["secret"]),
        slots=tuple(data["slots"]),
        input_digest=data["input_digest"],
        adverts=tuple(adverts),
        ciphertexts={name: bytes.fromhex(shares) for name, shares in data["ciphertexts"].items()},
        masked_digest=data["masked_digest"],
        survivors=tuple(data["survivors"]),
        revealed=data["revealed"],
    )
