# SPDX-License-Identifier: Apache-2.0
"""Your own training loop, or a Trainer of transformers or TRL, as a client's local fit."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedplan.data.examples import Examples, SeededExamples
from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.naming import Registry
from fedplan.tensors.devices import CPU, fork_rng_state, model_device, to_device
from fedplan.training.fit import Fit, FitResult, Job, adjust_gradients, plain_fit
from fedplan.training.freezing import TrainableParams, trainable

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class ExamplesDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A client's examples as a torch Dataset, for a DataLoader or a Trainer.

    Examples that are loaded together are padded to the longest of them, so that any collator can
    stack them. `device`: the device of the batches that `batch` returns.
    """

    examples: Examples
    device: torch.device = CPU

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return some examples, one dict each; a DataLoader calls this once for each batch.

        Raises FedplanError if a tensor of the batch has no row for each example.
        """
        batch = self.examples.batch(torch.as_tensor(indices))
        for name, values in batch.items():
            if len(values) != len(indices):
                raise FedplanError(f"{name!r} has no row for each example: use batch() instead")
        return [{name: values[i] for name, values in batch.items()} for i in range(len(indices))]

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Return some examples as one batch on `device`."""
        return to_device(self.examples.batch(indices), self.device)

    def to_hf_dataset(self) -> Dataset:
        """Return all examples as a Hugging Face Dataset, for trainers such as TRL's.

        Each example keeps its own length.
        """
        from datasets import Dataset

        examples = (self[i] for i in range(len(self)))
        return Dataset.from_list([{k: v.tolist() for k, v in each.items()} for each in examples])


TrainingLoop = Callable[[nn.Module, ExamplesDataset, TrainableParams], Any]
"""Trains a model on examples and returns the mean loss; or returns a Trainer to be run."""


def attach(loop: TrainingLoop) -> Fit:
    """Return a local fit that runs your own training loop: `Method(plan, loop=attach(loop))`.

    `loop(model, dataset, trainable_params)` either trains the model by an optimizer over
    `trainable_params.parameters()` and returns the mean loss, or returns a Trainer of transformers
    or TRL over the model and the dataset. That Trainer is run with an optimizer over those
    parameters. Duration and learning rates are the loop's own: the study's train settings apply to
    the built-in loop only. The fit raises FedplanError if the loop took no step over these
    parameters, or replaced or moved the model's params.

        def trainer(model, dataset, trainable_params):
            return Trainer(model, TrainingArguments(max_steps=8), train_dataset=dataset)
        Method(share(), loop=attach(trainer))
    """

    @with_text(format_call("attach", loop))
    def attached(job: Job) -> FitResult:
        device = model_device(job.model)
        with (
            fork_rng_state(device, job.seed),
            trainable(job.model, job.roles) as trainable_params,
        ):
            if not list(trainable_params.parameters()) or not len(job.examples):
                return FitResult(loss=nan, steps=0)
            with _watch_steps(job, trainable_params) as watcher:
                loss = _run_loop(loop, job, trainable_params, watcher)
            job.model.eval()
        if not watcher.steps_taken:
            raise FedplanError(
                f"{format_call('attach', loop)} took no step with trainable_params.parameters()"
            )
        return FitResult(loss=loss, steps=watcher.steps_taken, lr_sum=watcher.lr_sum)

    return attached


def _run_loop(
    loop: TrainingLoop, job: Job, trainable_params: TrainableParams, watcher: _StepWatcher
) -> float:
    """Run a loop, and the Trainer if it returns one; return the mean loss, nan if unknown.

    Raises FedplanError if the loop replaced or moved params, or returned anything else.
    """
    examples = job.examples
    if isinstance(examples, SeededExamples):
        examples = examples.with_seed(job.seed)
    dataset = ExamplesDataset(examples, model_device(job.model))
    params_before = dict(job.model.named_parameters())
    devices_before = {tensor.device for tensor in params_before.values()}
    job.model.train()
    result = loop(job.model, dataset, trainable_params)
    _require_same_params(params_before, devices_before, job.model)
    if isinstance(result, int | float | Tensor | None):
        loss = result.item() if isinstance(result, Tensor) else result
        return nan if loss is None else float(loss)
    from fedplan.training.hf_trainer import run_trainer

    return run_trainer(result, job, trainable_params, watcher.set_max_grad_norm)


def _require_same_params(
    before: dict[str, nn.Parameter], devices: set[torch.device], model: nn.Module
) -> None:
    """Raise FedplanError if a loop replaced params of the model, or moved it to another device."""
    after = dict(model.named_parameters())
    changed = [n for n in before.keys() | after.keys() if before.get(n) is not after.get(n)]
    if changed:
        raise FedplanError(
            f"the loop replaced {min(changed)} in the model: a method adds params to a model "
            "before the run starts (Method.adapt, model.adapter)"
        )
    if moved := {tensor.device for tensor in after.values()} - devices:
        raise FedplanError(
            f"the loop moved the model to {min(map(str, moved))}: set the device in the study, and "
            "in the arguments of a Trainer (use_cpu)"
        )


class _StepWatcher:
    """Optimizer pre-step hook: adjusts gradients before each step over the trained params.

    `steps_taken`: steps over these params. `lr_sum`: sum of their learning rates; nan if the param
    groups of a step had several.
    """

    def __init__(self, job: Job, trainable_params: TrainableParams) -> None:
        self._job, self._trainable_params = job, trainable_params
        self.set_max_grad_norm(0.0)
        self.steps_taken, self.lr_sum = 0, 0.0
        self._trained, self._optimizer = set(trainable_params.parameters()), None
        self._names = {w: n for n, w in job.model.named_parameters() if w.requires_grad}

    def set_max_grad_norm(self, norm: float) -> None:
        """Clip gradients to a norm after all gradient hooks; 0 does not clip."""
        config = replace(self._job.train_config, max_grad_norm=norm)
        self._job = replace(self._job, train_config=config)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Adjust gradients and count the step, if the optimizer has trained params.

        Raises FedplanError if the optimizer has a whole tensor that is trained in part.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        for param in params:
            if param in self._names and param not in self._trained:
                raise FedplanError(
                    f"{self._names[param]} is trained in part, and the loop's optimizer holds all "
                    "of it: build it from trainable_params.parameters(), not from "
                    "model.parameters()"
                )
        if self._trained.isdisjoint(params):
            return
        if self._job.gradient_hooks:
            has_closure = any(each is not None for each in (*args[1:], *kwargs.values()))
            self._require_single_step(optimizer, has_closure=has_closure)
        adjust_gradients(self._trainable_params, self._job)
        lr = _common_lr({float(group["lr"]) for group in optimizer.param_groups})
        self.steps_taken, self.lr_sum = self.steps_taken + 1, self.lr_sum + lr

    def _require_single_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        """Raise FedplanError unless each step of one optimizer has one gradient: no closure."""
        if has_closure:
            raise FedplanError(
                "the method changes gradients, and the loop's optimizer calls a closure for new "
                "ones: call step() without a closure"
            )
        if self._optimizer not in (None, optimizer):
            raise FedplanError(
                "the method changes gradients before each step, and the loop has two optimizers: "
                "use one with param groups"
            )
        self._optimizer = optimizer


def _common_lr(lrs: Iterable[float]) -> float:
    """Return the only learning rate of a step; nan if there are several."""
    lr, *others = lrs
    return nan if others else lr


@contextmanager
def _watch_steps(job: Job, trainable_params: TrainableParams) -> Generator[_StepWatcher]:
    """Register a _StepWatcher for all optimizers within the context, and yield it."""
    watcher = _StepWatcher(job, trainable_params)
    hook = register_optimizer_step_pre_hook(watcher)
    try:
        yield watcher
    finally:
        hook.remove()


LOOP_NAMES: Registry[Fit] = Registry("loop", {"plain": plain_fit})
"""All training loops that a study can name."""


def get_training_loop(name: str) -> Fit:
    """Return the fit of a name, or at `package.module:attribute`; see `attach`.

    Raises UnknownName if there is none.
    """
    return LOOP_NAMES.find(name).value
