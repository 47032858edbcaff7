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
    """A client's last round: its secret, and the messages that it has accepted and sent.

    secret: random bytes that all of the client's keys and seeds of the round derive from. Kept
        until the next round, since a restarted server may ask for the same messages again.
    slots: names of the slots that the client declared.
    input_digest: digest of everything that its input depends on.
    adverts: the roster that it accepted.
    ciphertexts: the shares forwarded to it, by sender.
    masked_digest: digest of the masked input that it sent.
    survivors: the survivor list that it signed.
    revealed: whether it has sent its unmask shares.
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
    """Storage of a client's last round."""

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
    """A store in a folder, encrypted if an `encryption` is given. It survives a crash.

    Locks the folder: two processes could sign different survivor lists. A damaged store is an
    error; an older version of it would let the client contradict itself.
    """

    def __init__(self, folder: Path, *, encryption: Encryption | None = None) -> None:
        self._store, self._folder = Store(folder, encryption=encryption), folder
        self._store.lock()

    def read(self) -> RoundProgress | None:
        """The last round written, None before the first. Raises a SecAggError if it is damaged."""
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
            "agreed": terms.agreement_digest,
            "round": terms.round,
            "base": terms.base_digest,
            "threshold": terms.threshold,
            "floor": terms.min_senders,
            "slots": [[*asdict(slot).values()] for slot in terms.slots],
            "attempt": terms.attempt,
        },
        "secret": progress.secret.hex(),
        "slots": list(progress.slots),
        "ground": progress.input_digest,
        "adverts": adverts,
        "boxes": {client: box.hex() for client, box in progress.ciphertexts.items()},
        "masked": progress.masked_digest,
        "survivors": list(progress.survivors),
        "answered": progress.revealed,
    }


def _from_json(data: Mapping[str, Any]) -> RoundProgress:
    """The progress that `_to_json` wrote."""
    fields = data["terms"]
    terms = Terms(
        experiment=fields["experiment"],
        run=fields["run"],
        agreement_digest=fields["agreed"],
        round=fields["round"],
        base_digest=fields["base"],
        threshold=fields["threshold"],
        min_senders=fields["floor"],
        slots=tuple(Slot(*slot) for slot in fields["slots"]),
        attempt=fields["attempt"],
    )
    return RoundProgress(
        terms=terms,
        secret=bytes.fromhex(data["secret"]),
        slots=tuple(data["slots"]),
        input_digest=data["ground"],
        adverts=tuple(_advert(terms.digest, *advert) for advert in data["adverts"]),
        ciphertexts={client: bytes.fromhex(box) for client, box in data["boxes"].items()},
        masked_digest=data["masked"],
        survivors=tuple(data["survivors"]),
        revealed=data["answered"],
    )


def _advert(
    terms_digest: bytes,
    client: str,
    encryption_key: str,
    masking_key: str,
    signature: str,
    slots: list[str],
) -> KeyAdvert:
    """A key advert from its stored fields, in hex."""
    keys = bytes.fromhex(encryption_key), bytes.fromhex(masking_key)
    return KeyAdvert(terms_digest, client, *keys, tuple(slots), bytes.fromhex(signature))
