# SPDX-License-Identifier: Apache-2.0
"""A client's journal on disk: its state and its replies, committed together."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage.checkpoints import NameFilter, SkippedCheckpoint, no_tensors
from fedplan.storage.encryption import Encryption
from fedplan.storage.files import failpoint, safe_folder_name, wrap_disk_errors
from fedplan.storage.locks import sync_file_system
from fedplan.storage.store import Meta, Store, TensorsAndMeta
from fedplan.tensors.named import Tensors

FIRST = 1
"""Number of the first commit of a journal; `initialize` writes the number before it."""


def client_state_folder(run: Path, client: str) -> Path:
    """Return the path of a client's journal in the run folder `run`, for any client name.

    Nothing is created. Two levels of digest prefixes keep folders small for a million clients.
    """
    shard = hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()
    return run / "clients" / shard[:2] / shard[2:4] / safe_folder_name(client)


class Journal:
    """A client's state and its replies to the server, committed together in a Store.

    `folder` is made by the first write and keeps the last two commits. For each request of the
    server: send the reply of `reply_for` again if there is one; else take `client_state`, work, and
    `commit` the new state and reply in one atomic step. With `keep_replies=False` only the state is
    stored, and a repeated request is computed again from `client_state(before=request)`.
    `encryption` encrypts all content; `read_only` changes nothing on disk. `optional`: the client
    keeps nothing between rounds, so that rounds without a commit are no loss. With `synced=False` a
    commit is durable only after `sync_journals`. One process writes at a time.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_replies: bool = True,
        encryption: Encryption | None = None,
        read_only: bool = False,
        optional: bool = False,
        synced: bool = True,
    ) -> None:
        self._store = Store(folder, encryption=encryption, read_only=read_only, synced=synced)
        self.folder, self._keep_replies, self.encryption = folder, keep_replies, encryption
        self.optional, self.synced = optional, synced

    def make_folder(self) -> Path:
        """Create the folder if it is missing, and return it."""
        return self._store.make_folder()

    @property
    def skipped(self) -> list[SkippedCheckpoint]:
        """Checkpoints that the last read skipped, and why."""
        return self._store.skipped

    def find_damage(self) -> list[str]:
        """Describe every checkpoint that is damaged or missing; empty if all are intact."""
        return self._store.find_damage()

    def last_request(self, before: str = "") -> str:
        """Return the id of the last committed request other than `before`; "" if there is none."""
        checkpoint = self._store.find(lambda meta: meta.get("request") != before, no_tensors)
        return str(checkpoint.meta["request"] or "") if checkpoint else ""

    def reply_for(self, request: str) -> TensorsAndMeta | None:
        """Return tensors and meta of the reply that was committed for the request id `request`.

        None if no reply is stored: never committed, older than the last two commits, or
        `keep_replies` is off. Raises StoreError if the journal cannot be read.
        """
        if not self._keep_replies:
            return None
        checkpoint = self._store.find(
            lambda meta: meta.get("request") == request, _prefixed("reply/")
        )
        return checkpoint and (_strip("reply/", checkpoint.tensors), checkpoint.meta["reply"])

    def client_state(self, before: str = "") -> TensorsAndMeta:
        """Return the client's tensors and notes (a JSON object), as of the last commit.

        With `before`, a request id, the state before this request's commit. Both are empty for a
        client without a commit. Raises StoreError if the state existed but is lost.
        """
        checkpoint = self._store.find(
            lambda meta: meta.get("request") != before, _prefixed("state/")
        )
        if checkpoint:
            return _strip("state/", checkpoint.tensors), checkpoint.meta["notes"]
        initialized = any(each.number < FIRST for each in self.skipped)
        if initialized or max(self._store.valid_numbers(), default=0) > FIRST:
            raise StoreError(
                f"the client state before request {before!r} is lost from {self.folder} "
                f"({'; '.join(map(str, self.skipped)) or 'no older checkpoint'}): restore the "
                "folder from a backup, or remove it to begin anew"
            )
        return {}, {}

    def initialize(self, client_state: Tensors) -> None:
        """Store the state that the first request starts from; do nothing if a checkpoint exists."""
        if self._store.numbers():
            return
        tensors = {f"state/{name}": tensor for name, tensor in client_state.items()}
        self._store.write(tensors, {"request": None, "notes": {}, "reply": {}}, number=FIRST - 1)

    def commit(
        self, request: str, client_state: Tensors, notes: Meta, reply: Tensors, reply_meta: Meta
    ) -> None:
        """Write the client's new state and notes, and the reply to a request, atomically.

        Raises StoreError if a reply to this request is stored already, or if the disk fails; after
        a disk error `reply_for` shows whether the commit happened. With `keep_replies=False`, a
        repeated commit of the last request replaces the former.
        """
        if self.reply_for(request):
            raise StoreError(f"request {request!r} was answered: send reply_for() of it again")
        tensors = {f"state/{name}": tensor for name, tensor in client_state.items()}
        if self._keep_replies:
            tensors |= {f"reply/{name}": tensor for name, tensor in reply.items()}
        meta = {"request": request, "notes": dict(notes), "reply": dict(reply_meta)}
        problem = f"request {request!r} was not finished in {self.folder}"
        with wrap_disk_errors(problem, "call reply_for()"):
            failpoint("journal.before_commit")
            # Reading comes first: it finds out which checkpoints are valid.
            last = self._store.find(lambda _: True, no_tensors) if not self._keep_replies else None
            newest = max(self._store.valid_numbers(), default=FIRST - 1)
            repeated = last and last.meta.get("request") == request
            self._store.write(tensors, meta, number=newest if repeated else newest + 1)
            failpoint("journal.after_commit")


def sync_journals(run: Path) -> None:
    """Make the journals in a run's folder durable together; StoreError if the disk fails."""
    with wrap_disk_errors(f"the state of clients in {run} is not on disk", "mend the disk"):
        sync_file_system(run)


def _prefixed(prefix: str) -> NameFilter:
    return lambda name: name.startswith(prefix)


def _strip(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with `prefix`, named without the prefix."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
