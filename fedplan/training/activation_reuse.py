# SPDX-License-Identifier: Apache-2.0
"""Training with cached activations: frozen layers below the trained ones run once per example."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedplan.data.examples import Examples, SeededExamples, SparseExamples
from fedplan.errors import FedplanError
from fedplan.tensors.devices import autocast, fork_rng_state, model_device, to_device
from fedplan.tensors.named import Batch, Tensors
from fedplan.training.activation_cache import ActivationCache, CachedActivations
from fedplan.training.activation_cuts import (
    ActivationCut,
    CachedForward,
    LossFn,
    batch_independent_slots,
    find_cut,
    record_activations,
)

if TYPE_CHECKING:
    from fedplan.training.fit import Job

log = logging.getLogger("fedplan")

_TOLERANCE = {None: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""Largest relative difference between a batch's loss with and without the cache, by dtype."""
Shapes = tuple[dict[str, Any], dict[str, torch.Size]]
"""Outputs of skipped modules on the meta device, and shapes of cached slots, of one example."""


@final
@dataclass
class CutResult:
    """Where a model with some trained params can be cut, found once per model and params.

    `cut`: None if the model cannot be cut; `reason` then says why.
    `common`: slots that are the same for all examples, such as the texts of classes.
    `fixed`: outputs of skipped modules whose shape does not depend on the batch size.
    `inputless`: whether the trained part runs without the examples' inputs.
    `shapes`: Shapes by the batch's tensor shapes and dtypes.
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
    """Examples whose batches leave out the inputs, since cached activations replace them."""

    examples: SparseExamples
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return a batch without inputs."""
        return self.examples.batch_without_inputs(indices)


@final
class FrozenPrefix:
    """The frozen part of a model in one turn, replaced by cached activations.

    Each example runs through it alone, at its own length, and is then padded with zeros to its
    batch's length. So an activation depends neither on the batch nor on whether it was cached.

    `forward`: the hooks that put cached activations into the model.
    """

    def __init__(
        self,
        job: Job,
        examples: Examples,
        result: CutResult,
        cut: ActivationCut,
        cache: ActivationCache,
    ) -> None:
        self._job, self._examples, self._result = job, examples, result
        self._cut, self._cache = cut, cache
        self._device = model_device(job.model)
        self._entry = self._open_entry()
        self.forward = CachedForward(job.model, cut, fixed=result.fixed)

    @property
    def examples(self) -> Examples:
        """The examples for training: without inputs if the trained part does not need them."""
        examples = self._examples
        if isinstance(examples, SparseExamples) and self._result.inputless:
            return InputlessExamples(examples, len(examples))
        return examples

    def enter(self, batch: Batch, indices: Tensor) -> None:
        """Put the activations of some examples into the model, for the next pass of their batch.

        Activations that are not cached are computed, and cached if there is room.
        """
        self.forward.on = False
        signature = tuple((name, each.shape[1:], each.dtype) for name, each in batch.items())
        shapes = self._result.shapes.get(signature)
        if shapes is None:
            shapes = self._result.shapes[signature] = self._record_shapes(batch, indices)
        output_shapes, slot_shapes = shapes
        numbers = cast("list[int]", indices.tolist())
        rows = [self._cache.get(self._entry, i, lambda i=i: self._compute(i)) for i in numbers]
        common = self._entry.common or {}
        stacked = {s: _stack([row[s] for row in rows], slot_shapes[s]) for s in rows[0]}
        self.forward.tensors = to_device({**common, **stacked}, self._device)
        self.forward.shapes, self.forward.count, self.forward.on = output_shapes, len(numbers), True

    def _open_entry(self) -> CachedActivations:
        """Open the cache entry for the examples and the present values of the frozen params."""
        job, params = self._job, dict(self._job.model.named_parameters())
        seed = job.seed if isinstance(job.examples, SeededExamples) else None
        digests = self._cache.digests({name: params[name] for name in self._cut.params})
        state = [self._cut.text, digests, job.train_config.precision, str(self._device), seed]
        key = hashlib.sha256(json.dumps(state).encode()).hexdigest()
        examples_key = job.examples_digest or f"id {id(job.examples)}"
        return self._cache.open(examples_key, key, job.examples)

    def _record_shapes(self, batch: Batch, indices: Tensor) -> Shapes:
        """Return the Shapes of a batch, from a pass of its first example at the batch's width."""
        one = {name: each[:1] for name, each in batch.items()}
        if self._result.inputless:
            one = self._examples.batch(indices[:1])
        cut = self._cut
        shapes, tensors = record_activations(
            self._job.model, cut.skipped, cut.slots, one, _loss_fn(self._job)
        )
        return shapes, {slot: each.shape for slot, each in tensors.items()}

    def _compute(self, index: int) -> Tensors:
        """Run one example through the frozen part and return its own activations by slot.

        Stores the activations that all examples have in common in the cache entry.
        """
        batch = self._examples.batch(torch.tensor([index]))
        _, tensors = record_activations(
            self._job.model, (), self._cut.slots, batch, _loss_fn(self._job)
        )
        common = self._result.common
        self._entry.common = {slot: each for slot, each in tensors.items() if slot in common}
        return {slot: each for slot, each in tensors.items() if slot not in common}


@contextmanager
def frozen_prefix(job: Job, examples: Examples) -> Generator[FrozenPrefix | None]:
    """Replace the frozen part of a job's model by cached activations within the context.

    The model must have its params marked as trainable and be in train mode. Yields None, and leaves
    the model alone, if `train_config.cache_activations` is off, there are no examples, or nothing
    can be cut.
    Raises FedplanError if the model's loss differs when examples run one by one.
    """
    cache = ActivationCache(0) if job.activation_cache is None else job.activation_cache
    if not job.train_config.cache_activations or not len(examples):
        yield None
        return
    trained = [name for name, each in job.model.named_parameters() if each.requires_grad]
    signature = json.dumps([type(job.model).__name__, trained, job.train_config.precision])
    if (result := cache.cuts.get(signature)) is None:
        result = cache.cuts[signature] = _find_and_check_cut(job, examples, cache)
    if result.cut is None:
        yield None
        return
    prefix = FrozenPrefix(job, examples, result, result.cut, cache)
    with prefix.forward.install():
        yield prefix


def _find_and_check_cut(job: Job, examples: Examples, cache: ActivationCache) -> CutResult:
    """Find the cut of a job's model and check the loss of the first batch; keep the random state.

    Logs the reason if the model cannot be cut.
    """
    with fork_rng_state(model_device(job.model)):
        result = _find_cut(job, examples)
        if result.cut is None:
            log.info(
                "train.cache_activations has no effect on %s: %s",
                type(job.model).__name__,
                result.reason,
            )
        else:
            _require_same_loss(job, examples, result, result.cut, cache)
    return result


def _find_cut(job: Job, examples: Examples) -> CutResult:
    """Find the cut of a model by passes of its first example, once and twice in a batch."""
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
    return CutResult(cut, "", frozenset(common), batch_independent_slots(one_shapes, two_shapes))


@torch.no_grad()
def _require_same_loss(
    job: Job, examples: Examples, result: CutResult, cut: ActivationCut, cache: ActivationCache
) -> None:
    """Raise FedplanError if the first batch has another loss with cached activations.

    Sets `result.inputless` if the trained part gives the same loss without the inputs.
    """
    indices = torch.arange(min(len(examples), job.train_config.batch_size))
    loss_fn, device = _loss_fn(job), model_device(job.model)
    with fork_rng_state(device, 0):
        expected = loss = float(loss_fn(examples.batch(indices)))
    for inputless in (True, False) if isinstance(examples, SparseExamples) else (False,):
        result.inputless = inputless
        prefix = FrozenPrefix(job, examples, result, cut, cache)
        with prefix.forward.install():
            batch = prefix.examples.batch(indices)
            prefix.enter(batch, indices)
            with fork_rng_state(device, 0):
                loss = float(loss_fn(batch))
        if abs(loss - expected) <= _TOLERANCE[job.train_config.dtype] * max(1.0, abs(expected)):
            return
    raise FedplanError(
        f"train.cache_activations runs examples one by one through frozen layers, and the loss of "
        f"{type(job.model).__name__} then differs (a loss of {expected:.6g} in a batch, "
        f"{loss:.6g} one by one): leave train.cache_activations out"
    )


def _loss_fn(job: Job) -> LossFn:
    """Return a function from a batch to its loss, on the model's device and under autocast."""
    device = model_device(job.model)

    def loss_fn(batch: Batch) -> Tensor:
        with autocast(device, job.train_config.dtype):
            return job.loss(job.model, to_device(batch, device))

    return loss_fn


def _stack(rows: Sequence[Tensor], size: torch.Size) -> Tensor:
    """Concatenate one-example tensors, padding dimension 1 with zeros to `size` where needed.

    Raises FedplanError if tensors of several lengths do not have three dimensions.
    """
    if all(row.shape == size for row in rows):
        return torch.cat(list(rows))
    if len(size) != 3 or any(row.shape[2] != size[2] for row in rows):
        raise FedplanError(
            f"train.cache_activations cannot pad activations of shape {tuple(size)} for examples "
            "of several lengths: leave train.cache_activations out"
        )
    return torch.cat([pad(row, (0, 0, 0, size[1] - row.shape[1])) for row in rows])
