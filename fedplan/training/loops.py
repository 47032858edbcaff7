# SPDX-License-Identifier: Apache-2.0
"""Loops: a training loop of your own, or a Trainer of transformers, as a client's local fit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedplan.data.examples import Examples, Seeded
from fedplan.errors import FedplanError
from fedplan.language.wording import phrase, stated
from fedplan.naming import Registry
from fedplan.tensors.devices import HOST, brought, device_of, forked
from fedplan.training.fit import Done, Fit, Job, adjust, plain
from fedplan.training.freezing import Marked, mark

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class RowsOf(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A client's examples as a dataset of torch: a DataLoader takes it, and so does a Trainer.

    Rows that are taken together are as long as the longest of them, so that any collator can stack
    them; `batch` stacks them at once, where the model is. `table` is the same as a Dataset of
    Hugging Face.
    """

    rows: Examples
    device: torch.device = HOST

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Some rows: a DataLoader asks for all rows of a batch at once."""
        batch = self.rows.batch(torch.as_tensor(indices))
        for name, values in batch.items():
            if len(values) != len(indices):
                raise FedplanError(f"{name!r} has no row for each example: take rows.batch instead")
        return [{name: values[i] for name, values in batch.items()} for i in range(len(indices))]

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some rows, stacked."""
        return brought(self.rows.batch(indices), self.device)

    def table(self) -> Dataset:
        """All rows with their own lengths, for a trainer that takes no other dataset, as TRL's."""
        from datasets import Dataset

        found = (self[i] for i in range(len(self)))
        return Dataset.from_list([{k: v.tolist() for k, v in row.items()} for row in found])


Work = Callable[[nn.Module, RowsOf, Marked], Any]
"""Trains a model on rows and says its mean loss, or gives a Trainer that is to do it."""


def attach(work: Work) -> Fit:
    """Have a training loop of your own be the local fit of a client: `Method(plan, loop=...)`.

    `work(model, rows, marked)` trains the model by an optimiser over `marked.parameters()`, and
    returns its mean loss. Or it returns a Trainer, of transformers or of TRL, over the model and
    the rows: it is given an optimiser over those parameters, of the class and the groups that its
    arguments say, and is run here. If anything else moves, the turn is refused. How long it trains
    and at what rates is its own affair: what a pace says is for our loop.

        def trainer(model, rows, marked):
            return Trainer(model, TrainingArguments(max_steps=8), train_dataset=rows)
        Method(share(), loop=attach(trainer))
    """

    @stated(phrase("attach", work))
    def attached(job: Job) -> Done:
        with forked(device_of(job.model), job.seed), mark(job.model, job.roles) as marked:
            if not list(marked.parameters()) or not len(job.rows):
                return Done(loss=nan, steps=0)
            with _watched(job, marked) as steps:
                loss = _worked(work, job, marked, steps)
            job.model.eval()
        if not steps.taken:
            raise FedplanError(f"{phrase('attach', work)} took no step by marked.parameters()")
        return Done(loss=loss, steps=steps.taken, distance=steps.distance)

    return attached


def _worked(work: Work, job: Job, marked: Marked, steps: _Steps) -> float:
    own = job.rows.seeded(job.seed) if isinstance(job.rows, Seeded) else job.rows
    rows = RowsOf(own, device_of(job.model))
    before = dict(job.model.named_parameters())
    devices = {tensor.device for tensor in before.values()}
    job.model.train()
    found = work(job.model, rows, marked)
    _require_same(before, devices, job.model)
    if isinstance(found, int | float | Tensor | None):
        loss = found.item() if isinstance(found, Tensor) else found
        return nan if loss is None else float(loss)
    from fedplan.training.trainers import run_trainer

    return run_trainer(found, job, marked, steps.clip_by)


def _require_same(
    before: dict[str, nn.Parameter], devices: set[torch.device], model: nn.Module
) -> None:
    """Refuse a loop that put other params into the model, or put it elsewhere."""
    after = dict(model.named_parameters())
    changed = [n for n in before.keys() | after.keys() if before.get(n) is not after.get(n)]
    if changed:
        raise FedplanError(
            f"the loop put another {min(changed)} into the model: what a method adds to a model is "
            "there before it is described (Method.adapt, model.adapter)"
        )
    if moved := {tensor.device for tensor in after.values()} - devices:
        raise FedplanError(
            f"the loop moved the model to {min(map(str, moved))}: say where it is trained, in the "
            "study and in the arguments of a Trainer (use_cpu)"
        )


class _Steps:
    """Stands before each step over the marked parameters: changes gradients, clips and counts."""

    def __init__(self, job: Job, marked: Marked) -> None:
        self.job, self.marked = replace(job, pace=replace(job.pace, clip=0.0)), marked
        self.taken, self.distance = 0, 0.0
        self._ours, self._optimiser = set(marked.parameters()), None
        self._model = {w: n for n, w in job.model.named_parameters() if w.requires_grad}

    def clip_by(self, norm: float) -> None:
        """Clip gradients once they are changed, and those of rows of fused tensors with them."""
        self.job = replace(self.job, pace=replace(self.job.pace, clip=norm))

    def __call__(self, optimiser: torch.optim.Optimizer, args: Any, named: Any) -> None:
        held = [weight for group in optimiser.param_groups for weight in group["params"]]
        for weight in held:
            if weight in self._model and weight not in self._ours:
                raise FedplanError(
                    f"{self._model[weight]} is trained in part, and the loop's optimiser holds all "
                    "of it: build it from marked.parameters(), not from model.parameters()"
                )
        if self._ours.isdisjoint(held):
            return
        if self.job.adjust:
            self._require_one(
                optimiser, closure=any(each is not None for each in (*args[1:], *named.values()))
            )
        adjust(self.marked, self.job)
        rates = {float(group["lr"]) for group in optimiser.param_groups}
        self.taken, self.distance = self.taken + 1, self.distance + _one(rates)

    def _require_one(self, optimiser: torch.optim.Optimizer, *, closure: bool) -> None:
        """Gradients are changed once before each step, so it must be one, and theirs."""
        if closure:
            raise FedplanError(
                "the method changes gradients, and the loop's optimiser asks for them by a closure "
                "of its own: call step() without one"
            )
        if self._optimiser not in (None, optimiser):
            raise FedplanError(
                "the method changes gradients before each step, and the loop has two optimisers: "
                "give it one, with groups"
            )
        self._optimiser = optimiser


def _one(rates: Iterable[float]) -> float:
    """The rate of a step; where groups have rates of their own, there is none."""
    rate, *others = rates
    return nan if others else rate


@contextmanager
def _watched(job: Job, marked: Marked) -> Generator[_Steps]:
    steps = _Steps(job, marked)
    hook = register_optimizer_step_pre_hook(steps)
    try:
        yield steps
    finally:
        hook.remove()


LOOP_NAMES: Registry[Fit] = Registry("loop", {"plain": plain})
"""All loops that a study can name."""


def loop_named(name: str) -> Fit:
    """The loop of a name, or that which stands at `package.module:attribute`: see `attach`."""
    return LOOP_NAMES.find(name).value
