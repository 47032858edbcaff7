# SPDX-License-Identifier: Apache-2.0
"""Features: what frozen parts of a model have made of rows, kept within a bound for later turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn

from fedplan.tensors.devices import HOST
from fedplan.tensors.named import Tensors, nbytes, whole_digest

ROOM = 1024
"""How many megabytes (of 2**20 bytes) are kept, unless somebody says another number."""
_EACH = 2
"""The states of a model that are remembered for some rows: FedRep has two in a turn."""


@final
@dataclass
class Shelf:
    """What is kept of some rows, in one state of what is frozen.

    `common` is the same for all rows. `held` is there so that no other rows get its `id`.
    """

    key: str
    held: object = None
    rows: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    common: Tensors | None = None


@final
class Features:
    """Frozen outputs by row, so many megabytes of them in memory: one for all clients of a process.

    What does not fit is worked out again each time, and what came first stays: clients take turns,
    and were the oldest thrown out, each would find its own gone. Nothing of it is ever on a disk:
    features tell of rows as much as the rows do.
    """

    def __init__(self, room: int = ROOM) -> None:
        self.room, self.used = room * 2**20, 0
        self.made = self.found = 0
        self.cuts: dict[str, Any] = {}
        self._shelves: dict[str, list[Shelf]] = {}
        self._digests: dict[str, tuple[object, int, str]] = {}

    def shelf(self, owner: str, key: str, held: object = None) -> Shelf:
        """The shelf of an owner's rows for one state of the model; older states give way."""
        there = self._shelves.setdefault(owner, [])
        mine = next((each for each in there if each.key == key), None) or Shelf(key, held)
        kept = [mine, *(each for each in there if each is not mine)]
        for each in kept[_EACH:]:
            self.used -= sum(map(nbytes, each.rows.values()))
        self._shelves[owner] = kept[:_EACH]
        return mine

    def row(self, shelf: Shelf, number: int, make: Callable[[], Tensors]) -> Tensors:
        """What is kept of a row, or is made of it now."""
        if (found := shelf.rows.get(number)) is not None:
            self.found += 1
            return found
        self.made += 1
        made = {name: _alone(tensor.to(HOST)) for name, tensor in make().items()}
        if self.used + nbytes(made) <= self.room:
            self.used += nbytes(made)
            shelf.rows[number] = made
        return made

    def digests(self, tensors: Mapping[str, nn.Parameter]) -> list[str]:
        """Digests of a model's tensors; torch counts the writes to each, and none is read twice."""
        return [self._digest(name, tensor) for name, tensor in tensors.items()]

    def _digest(self, name: str, tensor: Tensor) -> str:
        version = tensor._version  # pyright: ignore[reportPrivateUsage]
        known = self._digests.get(name)
        if known is None or known[0] is not tensor or known[1] != version:
            known = self._digests[name] = (tensor, version, whole_digest(tensor.detach().to(HOST)))
        return known[2]


def _alone(tensor: Tensor) -> Tensor:
    """A tensor that keeps nothing alive but itself: of a view, all that it is of would stay."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
