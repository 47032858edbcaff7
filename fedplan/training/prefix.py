# SPDX-License-Identifier: Apache-2.0
"""Prefixes: the frozen part of a model below what a turn trains, worked out once for each row."""

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

from fedplan.data.examples import Examples, Hollow, Seeded
from fedplan.errors import FedplanError
from fedplan.tensors.devices import autocast, brought, device_of, forked
from fedplan.tensors.named import Batch, Tensors
from fedplan.training.cuts import Cut, Run, Scene, find_cut, fixed_in, record
from fedplan.training.features import Features, Shelf

if TYPE_CHECKING:
    from fedplan.training.fit import Job

log = logging.getLogger("fedplan")

_NEAR = {None: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
"""How near the loss of rows one by one must be to that of their batch, as a share of it."""
Widths = tuple[dict[str, Any], dict[str, torch.Size]]
"""What still modules hand out for one row of some width, and the shapes of what is kept."""


@final
@dataclass
class Known:
    """What was found out of a model with some params trained: its cut, or why it has none.

    `common` are the slots of what is the same for all rows, such as the texts of classes, and
    `fixed` those of what no kept tensor is, and does not grow with the rows.
    """

    cut: Cut | None
    why: str
    common: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    hollow: bool = False
    widths: dict[object, Widths] = field(default_factory=dict[object, Widths])


@final
@dataclass(frozen=True)
class Emptied:
    """Rows whose inputs are left out: what is made of them is kept."""

    rows: Hollow
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some rows without their inputs."""
        return self.rows.hollow(indices)


@final
class Prefix:
    """The frozen part of one turn's model, which stands still while the turn trains.

    Each row runs through it alone, at its own length, and is then filled up with zeros to the
    length of its batch: so what is made of a row depends neither on its batch, nor on whether it
    was kept.
    """

    def __init__(self, job: Job, rows: Examples, known: Known, cut: Cut, kept: Features) -> None:
        self._job, self._all, self._known, self._cut, self._kept = job, rows, known, cut, kept
        self._device = device_of(job.model)
        self._shelf = self._opened()
        self.scene = Scene(job.model, cut, fixed=known.fixed)

    @property
    def rows(self) -> Examples:
        """The rows as steps take them."""
        rows, count = self._all, len(self._all)
        return Emptied(rows, count) if isinstance(rows, Hollow) and self._known.hollow else rows

    def enter(self, batch: Batch, rows: Tensor) -> None:
        """Have what is kept of some rows stand in the model, for the pass of their batch."""
        self.scene.on = False
        sign = tuple((name, each.shape[1:], each.dtype) for name, each in batch.items())
        width = self._known.widths.get(sign)
        if width is None:
            width = self._known.widths[sign] = self._looked(batch, rows)
        shapes, sizes = width
        numbers = cast("list[int]", rows.tolist())
        held = [self._kept.row(self._shelf, i, lambda i=i: self._made(i)) for i in numbers]
        common = self._shelf.common or {}
        fresh = {s: _stacked([row[s] for row in held], sizes[s]) for s in held[0]}
        self.scene.now = brought({**common, **fresh}, self._device)
        self.scene.shapes, self.scene.count, self.scene.on = shapes, len(numbers), True

    def _opened(self) -> Shelf:
        job, named = self._job, dict(self._job.model.named_parameters())
        seed = job.seed if isinstance(job.rows, Seeded) else None
        values = self._kept.digests({name: named[name] for name in self._cut.values})
        said = [self._cut.text, values, job.pace.precision, str(self._device), seed]
        key = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        return self._kept.shelf(job.mark or f"id {id(job.rows)}", key, job.rows)

    def _looked(self, batch: Batch, rows: Tensor) -> Widths:
        """How wide things are in a batch, from one row that is as wide."""
        one = {name: each[:1] for name, each in batch.items()}
        if self._known.hollow:
            one = self._all.batch(rows[:1])
        run = _run(self._job)
        shapes, kept = record(self._job.model, self._cut.still, self._cut.kept, one, run)
        return shapes, {slot: each.shape for slot, each in kept.items()}

    def _made(self, number: int) -> Tensors:
        """What the frozen part makes of one row."""
        batch = self._all.batch(torch.tensor([number]))
        _, kept = record(self._job.model, (), self._cut.kept, batch, _run(self._job))
        common = self._known.common
        self._shelf.common = {slot: each for slot, each in kept.items() if slot in common}
        return {slot: each for slot, each in kept.items() if slot not in common}


@contextmanager
def prefix_of(job: Job, rows: Examples) -> Generator[Prefix | None]:
    """The frozen part of a job's model, which is marked and in training, if it has one to keep."""
    kept = Features(0) if job.features is None else job.features
    if not job.pace.reuse or not len(rows):
        yield None
        return
    trained = [name for name, each in job.model.named_parameters() if each.requires_grad]
    sign = json.dumps([type(job.model).__name__, trained, job.pace.precision])
    if (known := kept.cuts.get(sign)) is None:
        known = kept.cuts[sign] = _found(job, rows, kept)
    if known.cut is None:
        yield None
        return
    prefix = Prefix(job, rows, known, known.cut, kept)
    with prefix.scene.set():
        yield prefix


def _found(job: Job, rows: Examples, kept: Features) -> Known:
    """The cut of a model, tried on the first rows, and what came of it."""
    with forked(device_of(job.model)):
        known = _tried(job, rows)
        if known.cut is None:
            log.info("train.reuse leaves %s as it is: %s", type(job.model).__name__, known.why)
        else:
            _require_near(job, rows, known, known.cut, kept)
    return known


def _tried(job: Job, rows: Examples) -> Known:
    """The cut of a model by its first row, and by that row twice."""
    one, again, twice = (rows.batch(torch.tensor(which)) for which in ([0], [0], [0, 0]))
    if not all(torch.equal(one[name], again[name]) for name in one):
        return Known(None, "its rows are another each time, as by augmentation")
    run = _run(job)
    cut, why = find_cut(job.model, one, run)
    if cut is None:
        return Known(None, why)
    (few, single), (more, double) = (
        record(job.model, cut.still, cut.kept, b, run) for b in (one, twice)
    )
    common = {slot for slot, each in single.items() if torch.equal(each, double[slot])}
    wide = {slot: (2, *each.shape[1:]) for slot, each in single.items() if slot not in common}
    if any(len(single[slot]) != 1 or double[slot].shape != size for slot, size in wide.items()):
        return Known(None, "what its frozen part makes of rows does not stand row by row")
    if not wide:
        return Known(None, "nothing follows from rows")
    return Known(cut, "", frozenset(common), fixed_in(few, more))


@torch.no_grad()
def _require_near(job: Job, rows: Examples, known: Known, cut: Cut, kept: Features) -> None:
    """Refuse a model for which rows one by one are something else than rows together."""
    some = torch.arange(min(len(rows), job.pace.batch))
    run, device = _run(job), device_of(job.model)
    with forked(device, 0):
        truth = found = float(run(rows.batch(some)))
    for hollow in (True, False) if isinstance(rows, Hollow) else (False,):
        known.hollow = hollow
        prefix = Prefix(job, rows, known, cut, kept)
        with prefix.scene.set():
            batch = prefix.rows.batch(some)
            prefix.enter(batch, some)
            with forked(device, 0):
                found = float(run(batch))
        if abs(found - truth) <= _NEAR[job.pace.dtype] * max(1.0, abs(truth)):
            return
    raise FedplanError(
        f"train.reuse runs rows one by one through what is frozen, and {type(job.model).__name__} "
        f"does something else with rows together (a loss of {truth:.6g}, not {found:.6g}): leave "
        "it out"
    )


def _run(job: Job) -> Run:
    """The loss of a batch as a step works it out."""
    device = device_of(job.model)

    def run(batch: Batch) -> Tensor:
        with autocast(device, job.pace.dtype):
            return job.loss(job.model, brought(batch, device))

    return run


def _stacked(rows: Sequence[Tensor], size: torch.Size) -> Tensor:
    """Rows one after the other, each filled up with zeros behind its last token."""
    if all(each.shape == size for each in rows):
        return torch.cat(list(rows))
    if len(size) != 3 or any(each.shape[2] != size[2] for each in rows):
        raise FedplanError(
            f"train.reuse keeps tensors of shape {tuple(size)} for rows of several lengths, and it "
            "does not know how to fill these up: leave it out"
        )
    return torch.cat([pad(each, (0, 0, 0, size[1] - each.shape[1])) for each in rows])
