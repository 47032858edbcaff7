# SPDX-License-Identifier: Apache-2.0
"""Training with cached activations: frozen layers below the trained ones run once per example.

The cache is in memory, by example, and has a size limit.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from fedplan.data.examples import Examples, SeededExamples, SparseExamples
from fedplan.errors import FedplanError
from fedplan.tensors.devices import CPU, autocast, fork_rng_state, model_device, to_device
from fedplan.tensors.named import Batch, DigestCache, Tensors, nbytes
from fedplan.training.activation_cuts import (
    ActivationCut,
    CachedForward,
    LossFn,
    find_cut,
    list_tensors,
    record_activations,
)

if TYPE_CHECKING:
    from fedplan.training.fit import Job


DEFAULT_MEGABYTES = 1024
"""Default size limit of the cache, in units of 2**20 bytes."""
_STATES_PER_OWNER = 2
"""Model states that are cached for one set of examples: FedRep has two in a turn."""


@final
@dataclass
class CachedActivations:
    """Activations of one set of examples, for one state (digest `key`) of the frozen layers.

    `owner`: the examples, kept alive so that no other object gets the same `id`. `rows`: by index
    of an example, the tensors by slot (see ActivationCut). `common`: by slot, the tensors that are
    the same for all examples; None until computed.
    """

    key: str
    owner: object = None
    rows: dict[int, Tensors] = field(default_factory=dict[int, Tensors])
    common: Tensors | None = None


@final
class ActivationCache:
    """Activations of frozen layers by example, in memory, shared by all clients of a process.

    Beyond the limit of `megabytes`, activations are computed on each `get`, and cached ones stay.
    `room`: the limit in bytes. `used`: bytes of all cached rows. `misses`, `hits`: examples
    computed, and read from the cache. `cuts`: the CutResult of each model class, trained params and
    precision. Not thread-safe; nothing is written to disk.
    """

    # Clients take turns, so evicting the oldest would leave each client without its own. And
    # activations reveal as much as the examples do.

    def __init__(self, megabytes: int = DEFAULT_MEGABYTES) -> None:
        self.room, self.used = megabytes * 2**20, 0
        self.misses = self.hits = 0
        self.cuts, self._digests = dict[str, Any](), DigestCache()
        self._entries: dict[str, list[CachedActivations]] = {}

    def open(self, examples_key: str, key: str, owner: object = None) -> CachedActivations:
        """Return the entry of some examples and one model state; created empty if missing.

        `owner` is kept alive by a new entry. The two most recently opened states of the examples
        stay; others are dropped.
        """
        entries = self._entries.setdefault(examples_key, [])
        entry = next((e for e in entries if e.key == key), None) or CachedActivations(key, owner)
        ordered = [entry, *(other for other in entries if other is not entry)]
        for dropped in ordered[_STATES_PER_OWNER:]:
            self.used -= sum(map(nbytes, dropped.rows.values()))
        self._entries[examples_key] = ordered[:_STATES_PER_OWNER]
        return entry

    def get(self, entry: CachedActivations, index: int, compute: Callable[[], Tensors]) -> Tensors:
        """Return the activations of the example at `index` by slot, on the CPU; do not change them.

        If `entry` does not have them, `compute()` makes them, and they are added within the limit.
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
        """Return the digests of a model's params, in order; remembered until a tensor changes."""
        return [self._digests.full_digest(param) for param in params.values()]


log = logging.getLogger("fedplan")

_TOLERANCE = {None: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative difference between a batch's loss with and without the cache, by dtype."""
Shapes = tuple[dict[str, Any], dict[str, torch.Size]]
"""Outputs of skipped modules on the meta device, and shapes of cached slots, of one example."""


@final
@dataclass
class CutResult:
    """Where a model can be cut; found once per model class, trained params and precision.

    `cut`: the cut, or None for a `reason`. `common`: slots (see ActivationCut) that are the same
    for all examples, as the texts of classes. `fixed`: slots of outputs with a shape that does not
    depend on the batch size. `inputless`: the trained part runs without the examples' inputs.
    `shapes`: the Shapes of one example, by the signature of a batch; filled on use.
    """

    cut: ActivationCut | None
    reason: str
    common: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    inputless: bool = False
    shapes: dict[object, Shapes] = field(default_factory=dict[object, Shapes])


@final
@dataclass(frozen=True)
class InputlessExamples:
    """Examples whose batches leave out the model inputs, which cached activations replace."""

    examples: SparseExamples
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return a batch without inputs."""
        return self.examples.batch_without_inputs(indices)


@final
class FrozenPrefix:
    """The frozen part of a job's model in one turn, replaced by cached activations.

    Within `forward.install()`, load batches from `examples`, and call `enter(batch, indices)`
    before each forward pass. Each example runs through the frozen part alone, without padding; the
    activations are then padded with zeros to the length of the batch. So an activation does not
    depend on the batch.
    """

    def __init__(
        self, job: Job, examples: Examples, result: CutResult, cache: ActivationCache
    ) -> None:
        assert result.cut is not None
        self._examples, self._result, self._cut, self._cache = examples, result, result.cut, cache
        self._model, self._loss_fn, self._device = job.model, _loss_fn(job), model_device(job.model)
        self.forward = CachedForward(job.model, result.cut, fixed=result.fixed)
        params = dict(job.model.named_parameters())
        seed = job.seed if isinstance(job.examples, SeededExamples) else None
        digests = cache.digests({name: params[name] for name in self._cut.params})
        cut_text = f"{' '.join(self._cut.skipped)} | {' '.join(self._cut.slots)}"
        state = [cut_text, digests, job.train_arguments.precision, str(self._device), seed]
        key = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        examples_key = job.examples_digest or f"id {id(job.examples)}"
        self._entry = cache.open(examples_key, key, job.examples)

    @property
    def examples(self) -> Examples:
        """The examples for training: without inputs if the trained part does not need them."""
        examples = self._examples
        if isinstance(examples, SparseExamples) and self._result.inputless:
            return InputlessExamples(examples, len(examples))
        return examples

    def enter(self, batch: Batch, indices: Tensor) -> None:
        """Put the activations of the examples at `indices` into the model, for the next pass.

        Raises FedplanError if activations of several lengths cannot be padded.
        """
        self.forward.on = False
        signature = tuple((name, each.shape[1:], each.dtype) for name, each in batch.items())
        if (shapes := self._result.shapes.get(signature)) is None:
            # A pass of the first example, at the width of the batch.
            one = {name: each[:1] for name, each in batch.items()}
            if self._result.inputless:
                one = self._examples.batch(indices[:1])
            cut = self._cut
            outputs, tensors = record_activations(
                self._model, cut.skipped, cut.slots, one, self._loss_fn
            )
            shapes = outputs, {slot: each.shape for slot, each in tensors.items()}
            self._result.shapes[signature] = shapes
        self.forward.shapes, slot_shapes = shapes
        numbers = cast("list[int]", indices.tolist())
        rows = [self._cache.get(self._entry, i, lambda i=i: self._compute(i)) for i in numbers]
        common = self._entry.common or {}
        stacked = {s: _stack([row[s] for row in rows], slot_shapes[s]) for s in rows[0]}
        self.forward.tensors = to_device({**common, **stacked}, self._device)
        self.forward.count, self.forward.on = len(numbers), True

    def _compute(self, index: int) -> Tensors:
        """Run the example at `index` through the frozen part and return the activations by slot.

        Activations that all examples have in common are stored in the cache entry instead.
        """
        one, common = self._examples.batch(torch.tensor([index])), self._result.common
        _, tensors = record_activations(self._model, (), self._cut.slots, one, self._loss_fn)
        self._entry.common = {slot: each for slot, each in tensors.items() if slot in common}
        return {slot: each for slot, each in tensors.items() if slot not in common}


@contextmanager
def frozen_prefix(job: Job, examples: Examples) -> Generator[FrozenPrefix | None]:
    """Context manager that replaces the frozen part of a job's model by cached activations.

    Use within `trainable(...)`, with the model in train mode. Yields the FrozenPrefix; or None if
    `train_arguments.cache_activations` is off, there are no examples, or the model cannot be cut
    (the reason is logged). Raises FedplanError if the loss differs when examples run through the
    frozen part one by one.
    """
    if not job.train_arguments.cache_activations or not len(examples):
        yield None
        return
    cache = ActivationCache(0) if job.activation_cache is None else job.activation_cache
    model_class = type(job.model).__name__
    trained = [name for name, each in job.model.named_parameters() if each.requires_grad]
    signature = json.dumps([model_class, trained, job.train_arguments.precision])
    if (result := cast("CutResult | None", cache.cuts.get(signature))) is None:
        with fork_rng_state(model_device(job.model)):
            result = _find_cut(job, examples)
            if result.cut is None:
                message = "train.cache_activations has no effect on %s: %s"
                log.info(message, model_class, result.reason)
            else:
                _require_same_loss(job, examples, result, cache)
        cache.cuts[signature] = result
    if result.cut is None:
        yield None
        return
    prefix = FrozenPrefix(job, examples, result, cache)
    with prefix.forward.install():
        yield prefix


def _find_cut(job: Job, examples: Examples) -> CutResult:
    """Find the cut of a job's model by passes of the first example, once and twice in a batch."""
    one, again, twice = (examples.batch(torch.tensor(which)) for which in ([0], [0], [0, 0]))
    if not all(torch.equal(one[name], again[name]) for name in one):
        return CutResult(None, "its examples differ each time, as by augmentation")
    loss_fn = _loss_fn(job)
    cut, reason = find_cut(job.model, one, loss_fn)
    if cut is None:
        return CutResult(None, reason)
    (one_shapes, single), (two_shapes, double) = (
        record_activations(job.model, cut.skipped, cut.slots, batch, loss_fn)
        for batch in (one, twice)
    )
    common = {slot for slot, each in single.items() if torch.equal(each, double[slot])}
    doubled = {slot: (2, *each.shape[1:]) for slot, each in single.items() if slot not in common}
    if any(len(single[slot]) != 1 or double[slot].shape != size for slot, size in doubled.items()):
        return CutResult(None, "activations of its frozen part have no dimension for examples")
    if not doubled:
        return CutResult(None, "no activation depends on the examples")
    fixed = set[str]()  # outputs of the same shape for one and for two examples
    for name, output in one_shapes.items():
        pairs = zip(list_tensors(output), list_tensors(two_shapes[name]), strict=True)
        fixed |= {f"{name}>{i}" for i, (one, two) in enumerate(pairs) if one.shape == two.shape}
    return CutResult(cut, "", frozenset(common), frozenset(fixed))


@torch.no_grad()
def _require_same_loss(
    job: Job, examples: Examples, result: CutResult, cache: ActivationCache
) -> None:
    """Raise FedplanError if cached activations change the loss of the first batch of examples.

    Differences up to _TOLERANCE are accepted. Sets `result.inputless` to whether the loss stays the
    same without the inputs. Adds the activations of the batch to the cache.
    """
    indices = torch.arange(min(len(examples), job.train_arguments.batch_size))
    loss_fn, device = _loss_fn(job), model_device(job.model)
    with fork_rng_state(device, 0):
        expected = loss = float(loss_fn(examples.batch(indices)))
    for inputless in (True, False) if isinstance(examples, SparseExamples) else (False,):
        result.inputless = inputless
        prefix = FrozenPrefix(job, examples, result, cache)
        with prefix.forward.install():
            batch = prefix.examples.batch(indices)
            prefix.enter(batch, indices)
            with fork_rng_state(device, 0):
                loss = float(loss_fn(batch))
        if abs(loss - expected) <= _TOLERANCE[job.train_arguments.dtype] * max(1.0, abs(expected)):
            return
    raise FedplanError(
        f"train.cache_activations runs examples one by one through frozen layers, and the loss of "
        f"{type(job.model).__name__} then differs (a loss of {expected:.6g} in a batch, "
        f"{loss:.6g} one by one): leave train.cache_activations out"
    )


def _loss_fn(job: Job) -> LossFn:
    """Return a function from a batch to the job's loss, on the model's device and in autocast."""
    device = model_device(job.model)

    def loss_fn(batch: Batch) -> Tensor:
        with autocast(device, job.train_arguments.dtype):
            return job.loss(job.model, to_device(batch, device))

    return loss_fn


def _stack(rows: Sequence[Tensor], size: torch.Size) -> Tensor:
    """Concatenate tensors of one example each, padded with zeros to the shape `size`.

    Only dimension 1 of three-dimensional tensors can be padded: raises FedplanError if a row
    differs from `size` in another way.
    """
    if all(row.shape == size for row in rows):
        return torch.cat(list(rows))
    if len(size) != 3 or any(row.shape[2] != size[2] for row in rows):
        raise FedplanError(
            f"train.cache_activations cannot pad activations of shape {tuple(size)} for examples "
            "of several lengths: leave train.cache_activations out"
        )
    return torch.cat([pad(row, (0, 0, 0, size[1] - row.shape[1])) for row in rows])
