# SPDX-License-Identifier: Apache-2.0
"""Named tensors: types, names of auxiliary tensors, bitwise comparison, digests, checksums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import isfinite, nan
from typing import Any, cast
from weakref import ref

import torch
from blake3 import blake3
from torch import Tensor

Tensors = Mapping[str, Tensor]
"""Values by param key."""

Batch = Mapping[str, Tensor]
"""One batch of examples, by the names of the model's inputs."""

_CHECKSUM_WORDS = 2**16
"""Words of eight bytes that a checksum adds at a time, so that they fit a core's cache."""


def nbytes(values: Tensors) -> int:
    """Return the total bytes of some tensors."""
    return sum(v.nbytes for v in values.values())


def digest(tensor: Tensor) -> str:
    """Return the first 16 hex digits of a tensor's `full_digest`."""
    return full_digest(tensor)[:16]


def full_digest(tensor: Tensor) -> str:
    """Return the BLAKE3 hex digest of a tensor's dtype, shape and bytes; it resists collisions."""
    # SHA-256 takes seven times as long on processors without instructions for it.
    hasher = _dtype_and_shape(tensor.dtype, tensor.shape).copy()
    if tensor.dtype is torch.float32 and tensor.is_contiguous() and tensor.numel():
        # The same bytes in half the calls, for models of many small tensors.
        hasher.update(memoryview(cast(Any, tensor.detach().numpy())).cast("B"))
    else:
        hasher.update(cast(Any, _bytes(tensor).numpy()))
    return hasher.hexdigest()


@lru_cache(maxsize=4096)
def _dtype_and_shape(dtype: torch.dtype, shape: torch.Size) -> blake3:
    return blake3(f"{dtype} {tuple(shape)}".encode())


def number_digest(tensor: Tensor) -> str:
    """Return a digest of a tensor's numbers, equal for tensors that calculate alike.

    It is the `full_digest` of the tensor with 0.0 for -0.0, and one NaN for all NaN.
    """
    if tensor.is_floating_point():
        numbers = tensor.detach() + 0.0  # -0.0 + 0.0 is 0.0
        tensor = numbers.masked_fill_(numbers.isnan(), nan)
    return full_digest(tensor)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether the tensors `one` and `other` have the same shape, dtype, device and bytes.

    Equal NaN bits are equal, and -0.0 differs from 0.0.
    """
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    pair = [_bytes(one), _bytes(other)]
    # Eight bytes at a time where aligned: single bytes and short floats are slow to compare.
    if not any(flat.numel() % 8 or flat.storage_offset() % 8 for flat in pair):
        pair = [flat.view(torch.int64) for flat in pair]
    return torch.equal(*pair)


def all_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite."""
    if tensor.numel() == 0:
        return True
    # The extremes take no extra memory, as a mask would.
    return all(isfinite(float(extreme)) for extreme in torch.aminmax(tensor.detach()))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 checksum of a tensor's bytes, as a scalar on the device of the tensor.

    Words are weighted by position. Detects accidental changes only: collisions are easy to make.
    """
    flat = _bytes(tensor)
    word_bytes = len(flat) // 8 * 8
    head = flat[:word_bytes]
    unaligned = head.storage_offset() % 8 or head.data_ptr() % 8
    words = (head.clone() if unaligned else head).view(torch.int64)
    odd = torch.arange(1, 2 * _CHECKSUM_WORDS, 2, device=tensor.device)
    total = (flat[word_bytes:].long() * odd[: len(flat) - word_bytes]).sum()
    for start in range(0, len(words), _CHECKSUM_WORDS):
        chunk = words[start : start + _CHECKSUM_WORDS]
        total += (chunk * odd[: len(chunk)]).sum() + 2 * start * chunk.sum()
    return total


def digests(values: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the 16-digit digest of each tensor."""
    return {key: digest(value) for key, value in values.items()}


class DigestCache:
    """Digests of tensor objects, each computed once while the tensor is alive and unchanged.

    `short_digest` and `full_digest` return the digest, computed if it is not cached. A change is
    detected by torch's version counter; writes that bypass the counter (`.data`) are missed. The
    cache has weak references only, so it keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[ref[Tensor], int, str]] = {}

    def short_digest(self, tensor: Tensor) -> str:
        """Return the 16-digit digest of a tensor, cached."""
        return self.full_digest(tensor)[:16]

    def full_digest(self, tensor: Tensor) -> str:
        """Return the `full_digest` of a tensor, computed only if not cached."""
        key = id(tensor)
        entry = self._entries.get(key)
        # Inference tensors have no version counter.
        version = 0 if tensor.is_inference() else tensor._version  # pyright: ignore
        if entry is None or entry[0]() is not tensor or entry[1] != version:
            # A weak reference: a long-lived site would else keep the global model of every round.
            weak = ref(tensor, lambda _: self._entries.pop(key, None))
            entry = self._entries[key] = (weak, version, full_digest(tensor.to("cpu")))
        return entry[2]

    def keep_only(self, tensors: Iterable[Tensor]) -> None:
        """Drop the cached digests of all other tensors."""
        ids = {id(tensor) for tensor in tensors}
        self._entries = {i: entry for i, entry in self._entries.items() if i in ids}


SEPARATOR = "#"
"""Between the key of a param and the kind of the auxiliary tensor."""


def aux_name(key: str, kind: str) -> str:
    """Return the name of a param's auxiliary tensor.

    >>> aux_name("head.weight", "control")
    'head.weight#control'
    """
    return f"{key}{SEPARATOR}{kind}"


def aux_names(keys: Iterable[str], kinds: Iterable[str]) -> list[str]:
    """Return the names of all auxiliary tensors of these kinds, kind by kind."""
    return [aux_name(key, kind) for kind in kinds for key in keys]


def param_key(name: str) -> str:
    """Return the param's key from the name of the param, its auxiliary tensor or encoded part.

    >>> param_key("head.weight#control")
    'head.weight'
    """
    return name.partition(SEPARATOR)[0]


def is_aux(name: str) -> bool:
    """Return whether a name is of an auxiliary tensor or encoded part, not of a param."""
    return SEPARATOR in name


def only_aux(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the auxiliary tensors among some tensors."""
    return {name: value for name, value in values.items() if is_aux(name)}


def split_aux(
    values: Mapping[str, Tensor], kinds: tuple[str, ...]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Split a client's tensors into encoded values and auxiliary tensors of these kinds."""
    endings = tuple(SEPARATOR + kind for kind in kinds)
    aux = {name: value for name, value in values.items() if endings and name.endswith(endings)}
    return {name: value for name, value in values.items() if name not in aux}, aux
