# SPDX-License-Identifier: Apache-2.0
"""Ledgers: what was trained, sent and kept in each turn, with digests that prove it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.locks import synced
from fedplan.params import Params
from fedplan.plan import Role, Roles

LETTERS = {Role.SHARE: "S", Role.KEEP: "K", Role.FREEZE: "F", Role.HOLD: "H"}
ROLES = {letter: role for role, letter in LETTERS.items()}


def digest(tensor: Tensor) -> str:
    """Sixteen hex digits of a tensor's bytes and shape."""
    return whole_digest(tensor)[:16]


def whole_digest(tensor: Tensor) -> str:
    """A digest of which nobody finds two tensors: of sixteen digits, 2**32 trials find them."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    said = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    found = hashlib.sha256(said)
    found.update(cast(Any, flat.numpy()))
    return found.hexdigest()


def digests(values: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each value."""
    return {key: digest(value) for key, value in values.items()}


class Digests:
    """Digests of tensors that nobody changes, each worked out once while somebody has it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], str]] = {}

    def of(self, tensor: Tensor) -> str:
        """The digest of a tensor."""
        return self.whole(tensor)[:16]

    def whole(self, tensor: Tensor) -> str:
        """The whole digest of a tensor."""
        number = id(tensor)
        known = self._known.get(number)
        if known is None or known[0]() is not tensor:
            # Not held here: a site that stays would else keep the world of every round.
            held = ref(tensor, lambda _: self._known.pop(number, None))
            known = self._known[number] = (held, whole_digest(tensor))
        return known[1]

    def only(self, tensors: Iterable[Tensor]) -> None:
        """Forget all but these."""
        ids = {id(tensor) for tensor in tensors}
        self._known = {i: held for i, held in self._known.items() if i in ids}


def spelled(roles: Roles) -> str:
    """Roles as one letter a param, in the order of the params."""
    return "".join(LETTERS[role] for role in roles.values())


def joined(params: Params, known: Mapping[str, str]) -> str:
    """Digests one after the other, in the order of the params."""
    return "".join(known[p.key] for p in params)


def parted(params: Params, text: str) -> dict[str, str]:
    """The digests of a line, by key."""
    return {p.key: text[16 * i : 16 * i + 16] for i, p in enumerate(params)}


class Ledger:
    """A file of JSON lines that only grows, and can be taken back to a length it once had.

    `length` and `sha256` are those of all its lines: what a kill or a full disk left behind them is
    cut off before the next is written.
    """

    def __init__(self, file: Path, *, length: int | None = None, sha256: str = "") -> None:
        self.file = file
        if not file.exists():
            file.touch()
            synced(file.parent)
        content = file.read_bytes()
        self.length = len(content) if length is None else length
        if len(content) < self.length:
            raise FedplanError(
                f"{file} is shorter than the {length} bytes it once had: put a copy of it back"
            )
        self._hash = hashlib.sha256(content[: self.length])
        if sha256 and self.sha256 != sha256:
            raise FedplanError(f"{file} was changed since it was written: put a copy of it back")
        if len(content) > self.length:
            os.truncate(file, self.length)

    @property
    def sha256(self) -> str:
        """The digest of all its lines."""
        return self._hash.hexdigest()

    @property
    def mark(self) -> list[int | str]:
        """Its length and its digest, as a list for JSON."""
        return [self.length, self.sha256]

    def append(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines for good."""
        content = b"".join(json.dumps(line, sort_keys=True).encode() + b"\n" for line in lines)
        try:
            with self.file.open("r+b") as out:
                out.truncate(self.length)
                out.seek(self.length)
                out.write(content)
                out.flush()
                os.fsync(out.fileno())
        except OSError as error:
            raise FedplanError(
                f"{self.file} cannot be written: {error}; make room, then go on by --resume"
            ) from error
        self.length += len(content)
        self._hash.update(content)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a file, as far as they are whole: the last may be in writing, or cut off."""
    content = file.read_bytes()
    return [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
