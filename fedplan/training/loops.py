# SPDX-License-Identifier: Apache-2.0
"""Your own training loop, or a Trainer of transformers or TRL, as a client's local fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import nan
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fedplan.data.examples import Examples, RowExamples, SeededExamples
from fedplan.errors import FedplanError, import_extra
from fedplan.language.canonical import format_call, with_text
from fedplan.naming import Registry
from fedplan.tensors.devices import (
    CPU,
    fork_rng_state,
    model_device,
    sharded_model_error,
    to_device,
)
from fedplan.training.fit import Fit, FitResult, Job, adjust_gradients, plain_fit
from fedplan.training.freezing import TrainableParams, trainable
from fedplan.training.restoring import (
    all_named_parameters,
    fork_python_rng_state,
    require_same_params,
    same_params,
    without_additions,
)

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import Trainer


_PARAM_KWARGS = {"params", "model", "optimizer_dict"}
"""Keyword arguments by which an optimizer of transformers chooses its parameters itself."""
_DISPLAY_CALLBACKS = ("ProgressCallback", "PrinterCallback")
"""Ends of the class names of callbacks that print."""


def run_trainer(trainer: object, watcher: _StepWatcher) -> float:
    """Train the job of a `watcher` by a Trainer for one turn, and return the mean loss.

    The Trainer saves, reports and evaluates nothing, and uses the job's seed. It gets an optimizer
    over the watcher's params, unless it has its own. Its gradient clipping is turned off, and the
    watcher clips to its norm. Raises FedplanError if `trainer` is no Trainer, has another model, or
    an unsuitable optimizer. Changes `trainer`, and the global random state.
    """
    from transformers import Trainer, set_seed

    if not isinstance(trainer, Trainer):
        raise FedplanError(
            f"the loop returned a {type(trainer).__name__}: return the mean loss, or a Trainer"
        )
    job = watcher.job
    if trainer.model is not job.model:
        raise FedplanError(
            "the Trainer has another model: build it with the model that the loop is given, and "
            "call get_peft_model before the run instead of giving the Trainer a peft_config"
        )
    if trainer.is_fsdp_enabled:
        raise sharded_model_error("the Trainer has an FSDP plugin of accelerate")
    with TemporaryDirectory() as folder:
        _disable_outputs(trainer, folder, job.seed % 2**32)
        args: Any = trainer.args
        # The Trainer's own clipping would miss the trained rows of fused tensors.
        norm, args.max_grad_norm = float(args.max_grad_norm or 0.0), 0.0
        watcher.set_max_grad_norm(norm)
        if trainer.optimizer is None and type(trainer).create_optimizer is Trainer.create_optimizer:
            trainer.optimizer = _make_optimizer(trainer, watcher)
        set_seed(job.seed % 2**32)
        output: Any = trainer.train()
    return float(output.training_loss)


def _disable_outputs(trainer: Trainer, folder: str, seed: int) -> None:
    """Replace a Trainer's arguments by a copy that saves, logs and evaluates nothing."""
    args: Any = copy.copy(trainer.args)
    # A Trainer creates its output folder in its constructor.
    with suppress(OSError):
        Path(args.output_dir).rmdir()
    args.output_dir, args.seed, args.data_seed = folder, seed, seed
    args.save_strategy = args.eval_strategy = args.logging_strategy = "no"
    args.load_best_model_at_end = args.push_to_hub = args.eval_on_start = False
    # On a CPU torch warns that pinning has no effect.
    args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
    trainer.args = args
    for callback in cast("list[Any]", list(trainer.callback_handler.callbacks)):
        name, module = type(callback).__name__, type(callback).__module__
        if module.startswith("transformers.integrations") or name.endswith(_DISPLAY_CALLBACKS):
            trainer.remove_callback(callback)


def _make_optimizer(trainer: Trainer, watcher: _StepWatcher) -> torch.optim.Optimizer:
    """Create the optimizer of a Trainer's arguments, over the params of a `watcher`."""
    job = watcher.job
    untyped: Any = trainer
    make, settings = untyped.optimizer_cls_and_kwargs or untyped.get_optimizer_cls_and_kwargs(
        trainer.args, job.model
    )
    if _PARAM_KWARGS & set(settings) or not (
        isinstance(make, type) and issubclass(make, torch.optim.Optimizer)
    ):
        raise FedplanError(
            f"the Trainer's optimizer {untyped.args.optim} chooses its parameters itself, and here "
            "the plan chooses them: use another, such as optim='adamw_torch'"
        )
    names = {param.key: param.name for param in job.roles}
    decaying = set(untyped.get_decay_parameter_names(job.model))
    groups: dict[bool, dict[str, Any]] = {
        True: {"params": [], "weight_decay": untyped.args.weight_decay},
        False: {"params": [], "weight_decay": 0.0},
    }
    trained_and_added = {**dict(watcher.trainable_params.named_parameters()), **watcher.added}
    for key, leaf in trained_and_added.items():
        groups[names.get(key, key) in decaying]["params"].append(leaf)
    return make([group for group in groups.values() if group["params"]], **settings)


@dataclass(frozen=True)
class ExamplesDataset(torch.utils.data.Dataset[dict[str, Tensor]]):
    """A client's examples as a torch Dataset of dicts, for a DataLoader or a Trainer.

    A DataLoader loads all examples of a batch by one call, which pads them to the same length, so
    that any collator works. `batch(indices)` returns one batch on `device`. `raw_rows` and
    `to_table` return the examples as they were given, before tokenizing, collating or padding.
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

    @property
    def raw_rows(self) -> Any:
        """The client's data as given to `simulate`: a Dataset of torch or `datasets`, or a list.

        A list or a Dataset of `datasets` is a copy, so that a loop may sort or format it. Raises
        FedplanError if the task keeps prepared examples alone, as fedplan's own tasks do.
        """
        if not isinstance(self.examples, RowExamples):
            raise FedplanError(
                f"{type(self.examples).__name__} keeps prepared examples, and no rows: use batch() "
                "or to_hf_dataset(); or give the data to a CustomTask, or to a task of your own "
                "whose examples have an attribute `raw_rows`"
            )
        from datasets import Dataset

        rows = self.examples.raw_rows
        # The copy of a Dataset has the same memory.
        return copy.deepcopy(rows) if isinstance(cast("object", rows), list | Dataset) else rows

    def to_table(self) -> Dataset:
        """Return `raw_rows` as a Hugging Face Dataset, as trainers of TRL need them.

        A Dataset of `datasets` keeps its columns; other rows must be mappings, and are loaded
        into memory. Raises FedplanError as `raw_rows`, and for rows that are no mappings.
        """
        from datasets import Dataset

        rows = self.raw_rows
        if isinstance(rows, Dataset):
            return rows
        entries = [rows[i] for i in range(len(rows))]
        if not all(isinstance(entry, Mapping) for entry in entries):
            raise FedplanError(
                f"a row is a {type(entries[0]).__name__}: give rows that are dicts, or use raw_rows"
            )
        return Dataset.from_list([dict(entry) for entry in entries])

    def to_hf_dataset(self) -> Dataset:
        """Return all examples, collated, as a Hugging Face Dataset of lists: for TRL's SFTTrainer.

        Examples are not padded. For rows as they were given use `to_table`. Loads all examples into
        memory.
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
    or TRL over the model and the dataset, which is then run with an optimizer over these
    parameters. Duration and learning rates are the loop's own: the study's train settings apply to
    the built-in loop only. Before each step of the optimizer the method's gradient hooks run. The
    fit raises FedplanError if the loop took no step over these parameters, returned another value,
    or replaced or moved the model's params. Modules that the loop adds for itself, such as a
    reference adapter or a value head, are removed after the turn, and in no update.

        def trainer(model, dataset, trainable_params):
            return Trainer(model, TrainingArguments(max_steps=8), train_dataset=dataset)
        Method(share(), loop=attach(trainer))
    """

    @with_text(format_call("attach", loop))
    def attached(job: Job) -> FitResult:
        device = model_device(job.model)
        with (
            fork_rng_state(device, job.seed),
            fork_python_rng_state(job.seed),
            trainable(job.model, job.roles) as trainable_params,
        ):
            if not list(trainable_params.parameters()) or not len(job.examples):
                return FitResult(loss=nan, steps=0)
            watcher = _StepWatcher(job, trainable_params)
            hook = register_optimizer_step_pre_hook(watcher)
            try:
                loss = _run_loop(loop, watcher)
            finally:
                hook.remove()
            job.model.eval()
        if not watcher.steps_taken:
            raise FedplanError(
                "the loop took no step with trainable_params.parameters(): build its optimizer "
                "from them, and call step() at least once"
            )
        return FitResult(loss=loss, steps=watcher.steps_taken, lr_sum=watcher.lr_sum)

    return attached


def _run_loop(loop: TrainingLoop, watcher: _StepWatcher) -> float:
    """Run a loop on the job of a `watcher`, then the Trainer if the loop returns one.

    Modules, hooks and attributes that they add to the model are removed at the end.
    """
    job, examples = watcher.job, watcher.job.examples
    if isinstance(examples, SeededExamples):
        examples = examples.with_seed(job.seed)
    dataset = ExamplesDataset(examples, model_device(job.model))
    params_before = all_named_parameters(job.model)
    flags = {tensor: tensor.requires_grad for tensor in params_before.values()}
    with without_additions(job.model), same_params(job, params_before), torch.enable_grad():
        job.model.train()
        try:
            result = loop(job.model, dataset, watcher.trainable_params)
        except ImportError:  # perhaps of a Trainer, which transformers raises without a name
            import_extra("accelerate", "a Trainer of transformers")
            raise
        if isinstance(result, Tensor) and result.numel() != 1:
            raise FedplanError(
                f"the loop returned a tensor of {result.numel()} values: return the mean loss"
            )
        if isinstance(result, Real | Tensor | None):
            loss = result.item() if isinstance(result, Tensor) else result
            return nan if loss is None else float(loss)
        require_same_params(job.model, params_before)
        # peft decides anew which params are trained when a Trainer adds an adapter.
        for tensor, requires_grad in flags.items():
            tensor.requires_grad_(requires_grad)
        params = cast("Iterable[tuple[str, nn.Parameter]]", job.model.named_parameters())
        new = {n: each for n, each in params if n not in params_before and each.requires_grad}
        watcher.added = new
        return run_trainer(result, watcher)


class _StepWatcher:
    """Optimizer pre-step hook that runs the job's gradient hooks, clips, and counts steps.

    Register with `register_optimizer_step_pre_hook`. Steps of optimizers without any of
    `trainable_params` are ignored. `added`: params by name that a Trainer added to the model, which
    are clipped with the others. `steps_taken`: the number of other steps. `lr_sum`: the sum of the
    learning rates of these steps; nan if the param groups of a step had several. Clips to the norm
    set by `set_max_grad_norm`, initially not at all.
    """

    def __init__(self, job: Job, trainable_params: TrainableParams) -> None:
        self.job, self.trainable_params = job, trainable_params
        self.set_max_grad_norm(0.0)
        self.added: Mapping[str, nn.Parameter] = {}
        self.steps_taken, self.lr_sum = 0, 0.0
        self._trained, self._optimizer = set(trainable_params.parameters()), None
        self._names = {w: n for n, w in job.model.named_parameters() if w.requires_grad}

    def set_max_grad_norm(self, norm: float) -> None:
        """Clip gradients to a norm after all gradient hooks; 0 does not clip."""
        config = replace(self.job.train_arguments, max_grad_norm=norm)
        self.job = replace(self.job, train_arguments=config)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Adjust gradients and count the step, if the optimizer has trained params."""
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
        if self.job.gradient_hooks:
            if any(each is not None for each in (*args[1:], *kwargs.values())):
                raise FedplanError(
                    "the method changes gradients, and the loop's optimizer calls a closure for "
                    "new ones: call step() without a closure"
                )
            if self._optimizer not in (None, optimizer):
                raise FedplanError(
                    "the method changes gradients before each step, and the loop has two "
                    "optimizers: use one with param groups"
                )
            self._optimizer = optimizer
        adjust_gradients(self.trainable_params, self.job, self.added.values())
        lr, *others = {float(group["lr"]) for group in optimizer.param_groups}
        self.steps_taken, self.lr_sum = self.steps_taken + 1, self.lr_sum + (nan if others else lr)


LOOP_NAMES: Registry[Fit] = Registry("loop", {"plain": plain_fit})
"""All training loops that a study can name."""


def get_training_loop(name: str) -> Fit:
    """Return the fit of a name, or at `package.module:attribute`; see `attach`.

    Raises UnknownName if there is none.
    """
    return LOOP_NAMES.find(name).value
