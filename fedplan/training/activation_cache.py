# SPDX-License-Identifier: Apache-2.0
"""In-memory cache of the activations of frozen layers, by example, with a size limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from torch import nn

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

    `key`: digest of that state. `owner`: the examples, kept alive so that no other object gets the
    same `id`. `rows`: by index of a cached example, the tensors by slot (see ActivationCut).
    `common`: by slot, the tensors that are the same for all examples; None until computed.
    """

    key: str
    owner: object = None
    rows: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    common: Tensors | None = None


@final
class ActivationCache:
    """Activations of frozen layers by example, in memory, shared by all clients of a process.

    `open` the entry of some examples and model state, then `get` each example from that entry.
    `megabytes` is the limit; beyond the limit, activations are computed on each `get`, and cached
    ones stay. `room`: the limit in bytes. `used`: bytes of all cached rows. `misses`, `hits`:
    examples computed, and read from the cache. `cuts`: the CutResult of each model class, trained
    params and precision. Not thread-safe; nothing is written to disk.
    """

    # Clients take turns, so evicting the oldest would leave each client without its own. And
    # activations reveal as much as the examples do.

    def __init__(self, megabytes: int = DEFAULT_MEGABYTES) -> None:
        self.room, self.used = megabytes * 2**20, 0
        self.misses = self.hits = 0
        self.cuts: dict[str, Any] = {}
        self._entries: dict[str, list[CachedActivations]] = {}
        self._digests: dict[str, tuple[object, int, str]] = {}

    def open(self, examples_key: str, key: str, owner: object = None) -> CachedActivations:
        """Return the entry of some examples and one model state; created empty if missing.

        `examples_key` identifies the examples, `key` the model state; `owner` is kept alive by a
        new entry. The two most recently opened states of the examples stay; others are dropped.
        """
        entries = self._entries.setdefault(examples_key, [])
        entry = next((e for e in entries if e.key == key), None) or CachedActivations(key, owner)
        ordered = [entry, *(other for other in entries if other is not entry)]
        for dropped in ordered[_STATES_PER_OWNER:]:
            self.used -= sum(map(nbytes, dropped.rows.values()))
        self._entries[examples_key] = ordered[:_STATES_PER_OWNER]
        return entry

    def get(self, entry: CachedActivations, index: int, compute: Callable[[], Tensors]) -> Tensors:
        """Return the activations of the example at `index` by slot, on the CPU.

        If `entry` does not have the example, `compute()` is called, and the result is added to
        `entry` within the limit. The tensors are those of the cache: do not change them.
        """
        if (cached := entry.rows.get(index)) is not None:
            self.hits += 1
            return cached
        self.misses += 1
        computed = {name: tensor.to(CPU) for name, tensor in compute().items()}
        for name, tensor in computed.items():
            # A view would keep a larger storage alive.
            if tensor.untyped_storage().nbytes() > tensor.nbytes:
                computed[name] = tensor.clone()
        if self.used + nbytes(computed) <= self.room:
            self.used += nbytes(computed)
            entry.rows[index] = computed
        return computed

    def digests(self, params: Mapping[str, nn.Parameter]) -> list[str]:
        """Return the digests of a model's params, in order.

        A digest is remembered by name until the tensor, or the tensor's version counter, changes.
        """
        digests = list[str]()
        for name, tensor in params.items():
            version = tensor._version  # pyright: ignore[reportPrivateUsage]
            cached = self._digests.get(name)
            if cached is None or cached[0] is not tensor or cached[1] != version:
                cached = (tensor, version, full_digest(tensor.detach().to(CPU)))
                self._digests[name] = cached
            digests.append(cached[2])
        return digests
