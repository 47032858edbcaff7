# SPDX-License-Identifier: Apache-2.0
"""Named tensors: values by their keys, their bytes, and digests that tell them apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Values by the keys of their params."""

Batch = Mapping[str, Tensor]
"""Rows that are run together, by the names of a model's inputs."""


_AT_ONCE = 2**16
"""Words of eight bytes that are added up at a time: what they take meanwhile stays in a cache."""


def nbytes(values: Tensors) -> int:
    """The bytes of some values, without any header."""
    return sum(v.numel() * v.element_size() for v in values.values())


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


def checksum(tensor: Tensor) -> Tensor:
    """A number that tells two tensors apart but for chance, worked out on their own device.

    Each word counts by its place. It is no digest: who wants two tensors of one number finds them.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    whole = len(flat) // 8 * 8
    head = flat[:whole]
    words = (head.clone() if head.data_ptr() % 8 else head).view(torch.int64)
    odd = torch.arange(1, 2 * _AT_ONCE, 2, device=tensor.device)
    total = (flat[whole:].long() * odd[: len(flat) - whole]).sum()
    for start in range(0, len(words), _AT_ONCE):
        some = words[start : start + _AT_ONCE]
        total += (some * odd[: len(some)]).sum() + 2 * start * some.sum()
    return total


def digests(values: Mapping[str, Tensor]) -> dict[str, str]:
    """The digest of each value."""
    return {key: digest(value) for key, value in values.items()}


class Digests:
    """Digests of tensors that nobody changes, each worked out once while somebody has it."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], str]] = {}
        self._sums: dict[int, tuple[ref[Tensor], int]] = {}

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

    def checksum(self, tensor: Tensor) -> int:
        """The checksum of a tensor."""
        number = id(tensor)
        known = self._sums.get(number)
        if known is None or known[0]() is not tensor:
            held = ref(tensor, lambda _: self._sums.pop(number, None))
            known = self._sums[number] = (held, int(checksum(tensor)))
        return known[1]

    def only(self, tensors: Iterable[Tensor]) -> None:
        """Forget all but these."""
        ids = {id(tensor) for tensor in tensors}
        self._known = {i: held for i, held in self._known.items() if i in ids}
        self._sums = {i: held for i, held in self._sums.items() if i in ids}
