# SPDX-License-Identifier: Apache-2.0
"""Journals: a client's memory on its own disk, what it keeps and what it answered."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor

from fedplan.errors import StoreError
from fedplan.storage.encryption import Encryption
from fedplan.storage.errors import explained
from fedplan.storage.failpoints import reach
from fedplan.storage.generations import Skipped
from fedplan.storage.names import folder_named
from fedplan.storage.store import Meta, Read, Store, Tensors
from fedplan.storage.tensor_file import NONE, Names

FIRST = 1
"""The number of a journal's first commit: before a later one there must have been another."""


def home_of(run: Path, client: str) -> Path:
    """Where a run keeps a client's journal: one folder, whatever the client is called.

    Two digests of its name stand above it, so that of a million homes no folder holds thousands.
    """
    shard = hashlib.sha256(client.encode("utf-8", "surrogatepass")).hexdigest()
    return run / "homes" / shard[:2] / shard[2:4] / folder_named(client)


class Journal:
    """A client's memory: what it keeps and what it answered, committed together.

    Before a client works on a request it asks `answered`; what stands there it sends again. Without
    `replies` only what it keeps is written: the same request is then worked out again, from what
    was kept before it. With a `seal` nothing of it can be read from the disk. Who is only `reading`
    changes nothing on it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        replies: bool = True,
        seal: Encryption | None = None,
        reading: bool = False,
    ) -> None:
        self._store = Store(folder, seal=seal, reading=reading)
        self._folder, self._replies, self.seal = folder, replies, seal

    @property
    def folder(self) -> Path:
        """Where it lies, once there is something to keep."""
        return self._folder

    def made(self) -> Path:
        """Its folder, made if nothing was put into it yet."""
        return self._store.made()

    @property
    def skipped(self) -> list[Skipped]:
        """The generations that the last look passed over, and why."""
        return self._store.skipped

    def faults(self) -> list[str]:
        """What is damaged or lost of it, in words."""
        return self._store.faults()

    def last(self, before: str = "") -> str:
        """The last request that was answered: now, or before another one. Nothing at first."""
        found = self._store.find(lambda meta: meta.get("request") != before, NONE)
        return str(found.meta["request"] or "") if found else ""

    def answered(self, request: str) -> Read | None:
        """The reply that was committed for this very request, if it was one of the last two."""
        if not self._replies:
            return None
        found = self._store.find(lambda meta: meta.get("request") == request, _named("reply/"))
        return found and (_under("reply/", found.tensors), found.meta["reply"])

    def home(self, before: str = "") -> Read:
        """What the client keeps, and its notes: now, or before a request. Empty at first."""
        found = self._store.find(lambda meta: meta.get("request") != before, _named("home/"))
        if found:
            return _under("home/", found.tensors), found.meta["notes"]
        begun = any(each.number < FIRST for each in self.skipped)
        if begun or max(self._store.standing(), default=0) > FIRST:
            raise StoreError(
                f"what was kept before request {before!r} is lost from {self._folder} "
                f"({'; '.join(map(str, self.skipped)) or 'no older generation'}): put a copy of "
                "the folder back, or remove it to begin anew"
            )
        return {}, {}

    def begin(self, home: Tensors) -> None:
        """Keep this before the first request, unless there is something already."""
        if self._store.numbers():
            return
        tensors = {f"home/{name}": tensor for name, tensor in home.items()}
        self._store.write(tensors, {"request": None, "notes": {}, "reply": {}}, number=FIRST - 1)

    def commit(
        self, request: str, home: Tensors, notes: Meta, reply: Tensors, reply_meta: Meta
    ) -> None:
        """Write both or neither. After a StoreError, `answered` tells which."""
        if self.answered(request):
            raise StoreError(f"request {request!r} was answered: send answered() of it again")
        tensors = {f"home/{name}": tensor for name, tensor in home.items()}
        if self._replies:
            tensors |= {f"reply/{name}": tensor for name, tensor in reply.items()}
        meta = {"request": request, "notes": dict(notes), "reply": dict(reply_meta)}
        with explained(f"request {request!r} was not finished in {self._folder}", "ask answered()"):
            reach("journal.before_commit")
            self._store.write(tensors, meta, number=self._number(request))
            reach("journal.after_commit")

    def _number(self, request: str) -> int:
        """The next number, or that of the same request if it is committed again."""
        # Reading comes first: it finds out which generations still stand.
        last = self._store.find(lambda _: True, NONE) if not self._replies else None
        newest = max(self._store.standing(), default=FIRST - 1)
        return newest if last and last.meta.get("request") == request else newest + 1


def _named(prefix: str) -> Names:
    return lambda name: name.startswith(prefix)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
