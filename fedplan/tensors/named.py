# SPDX-License-Identifier: Apache-2.0
"""Named tensors: values by their keys, their bytes, and digests that tell them apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any, cast
from weakref import ref

import torch
from blake3 import blake3
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Values by the keys of their params."""

Batch = Mapping[str, Tensor]
"""Rows that are run together, by the names of a model's inputs."""


_AT_ONCE = 2**16
"""Words of eight bytes that are added up at a time: what they take meanwhile stays in a cache."""


def nbytes(values: Tensors) -> int:
    """The bytes of some values, without any header."""
    return sum(v.nbytes for v in values.values())


def digest(tensor: Tensor) -> str:
    """Sixteen hex digits of a tensor's bytes and shape."""
    return whole_digest(tensor)[:16]


def whole_digest(tensor: Tensor) -> str:
    """A digest of which nobody finds two tensors: of sixteen digits, 2**32 trials find them.

    It is BLAKE3's: SHA-256 takes seven times as long where a processor has no words for it.
    """
    said = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    found = blake3(said)
    found.update(cast(Any, _bytes(tensor).numpy()))
    return found.hexdigest()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same bytes: a NaN is the same as itself, -0.0 is not 0.0."""
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    pair = [_bytes(one), _bytes(other)]
    # Eight at a time, where they lie so: bytes and short floats are slow to compare.
    if not any(each.numel() % 8 or each.storage_offset() % 8 for each in pair):
        pair = [each.view(torch.int64) for each in pair]
    return torch.equal(*pair)


def all_finite(tensor: Tensor) -> bool:
    """Whether every value is a number; to look for the largest needs no memory of its own."""
    if tensor.numel() == 0:
        return True
    return all(isfinite(float(end)) for end in torch.aminmax(tensor.detach()))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> Tensor:
    """A number that tells two tensors apart but for chance, worked out on their own device.

    Each word counts by its place. It is no digest: who wants two tensors of one number finds them.
    """
    flat = _bytes(tensor)
    whole = len(flat) // 8 * 8
    head = flat[:whole]
    odd_place = head.storage_offset() % 8 or head.data_ptr() % 8
    words = (head.clone() if odd_place else head).view(torch.int64)
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
    """Digests of tensors, each worked out once while somebody has it and nobody changes it.

    Whoever writes to a tensor moves its version on, as all operations of torch do; what is written
    past them (`.data`) is not seen.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[Tensor], int, str]] = {}

    def of(self, tensor: Tensor) -> str:
        """The digest of a tensor."""
        return self.whole(tensor)[:16]

    def whole(self, tensor: Tensor) -> str:
        """The whole digest of a tensor."""
        # How often it was written to; of one of inference nobody counts.
        version = 0 if tensor.is_inference() else tensor._version  # pyright: ignore
        number = id(tensor)
        known = self._known.get(number)
        if known is None or known[0]() is not tensor or known[1] != version:
            # Not held here: a site that stays would else keep the world of every round.
            held = ref(tensor, lambda _: self._known.pop(number, None))
            known = self._known[number] = (held, version, whole_digest(tensor))
        return known[2]

    def only(self, tensors: Iterable[Tensor]) -> None:
        """Forget all but these."""
        ids = {id(tensor) for tensor in tensors}
        self._known = {i: held for i, held in self._known.items() if i in ids}
