# SPDX-License-Identifier: Apache-2.0
"""In-memory cache of the activations of frozen layers, by example, with a size limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import Tensor, nn

from fedplan.tensors.devices import CPU
from fedplan.tensors.named import Tensors, full_digest, nbytes

DEFAULT_MEGABYTES = 1024
"""Default size limit of the cache, in units of 2**20 bytes."""
_STATES_PER_OWNER = 2
"""Model states that are cached for one set of examples: FedRep has two in a turn."""


@final
@dataclass
class CachedActivations:
    """Activations of one set of examples, for one state of the frozen layers.

    `key`: digest of that state. `rows`: tensors by slot, of each cached example's index.
    `common`: tensors that are the same for all examples; None until the first is computed.
    `owner`: keeps the examples alive, so that no other object gets their `id`.
    """

    key: str
    owner: object = None
    rows: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    common: Tensors | None = None


@final
class ActivationCache:
    """Activations of frozen layers by example, shared by all clients of a process.

    When the limit is reached, further activations are recomputed each time, and cached ones stay:
    clients take turns, so evicting the oldest would leave each client without its own.
    Activations reveal as much as the examples do, so they are never written to disk.

    `room`: limit in bytes. `used`: bytes in use.
    `misses`, `hits`: examples computed, and examples read from the cache.
    `cuts`: where each model was cut, by model class, trained params and precision.
    """

    def __init__(self, megabytes: int = DEFAULT_MEGABYTES) -> None:
        self.room, self.used = megabytes * 2**20, 0
        self.misses = self.hits = 0
        self.cuts: dict[str, Any] = {}
        self._entries: dict[str, list[CachedActivations]] = {}
        self._digests: dict[str, tuple[object, int, str]] = {}

    def open(self, examples_key: str, key: str, owner: object = None) -> CachedActivations:
        """Return the activations of some examples for one model state, creating them if missing.

        `examples_key` identifies the examples, `key` the model state; `owner` is kept alive. Only
        the two most recently opened states of the examples stay; older ones are dropped.
        """
        entries = self._entries.setdefault(examples_key, [])
        entry = next((e for e in entries if e.key == key), None) or CachedActivations(key, owner)
        ordered = [entry, *(other for other in entries if other is not entry)]
        for dropped in ordered[_STATES_PER_OWNER:]:
            self.used -= sum(map(nbytes, dropped.rows.values()))
        self._entries[examples_key] = ordered[:_STATES_PER_OWNER]
        return entry

    def get(self, entry: CachedActivations, index: int, compute: Callable[[], Tensors]) -> Tensors:
        """Return the activations of one example, on the CPU, computing them if missing.

        Computed activations are added to `entry` if they fit within the limit.
        """
        if (cached := entry.rows.get(index)) is not None:
            self.hits += 1
            return cached
        self.misses += 1
        computed = {name: _compact(tensor.to(CPU)) for name, tensor in compute().items()}
        if self.used + nbytes(computed) <= self.room:
            self.used += nbytes(computed)
            entry.rows[index] = computed
        return computed

    def digests(self, params: Mapping[str, nn.Parameter]) -> list[str]:
        """Return the digests of a model's params, in order.

        A param is read again only if torch's version counter says that it was written.
        """
        return [self._digest(name, tensor) for name, tensor in params.items()]

    def _digest(self, name: str, tensor: Tensor) -> str:
        """Return a tensor's digest, remembered by name until the tensor or its version changes."""
        version = tensor._version  # pyright: ignore[reportPrivateUsage]
        cached = self._digests.get(name)
        if cached is None or cached[0] is not tensor or cached[1] != version:
            cached = (tensor, version, full_digest(tensor.detach().to(CPU)))
            self._digests[name] = cached
        return cached[2]


def _compact(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if it is a view that would keep a larger storage alive."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor
