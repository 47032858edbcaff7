# SPDX-License-Identifier: Apache-2.0
"""Runs a Trainer of transformers or TRL for one turn, over the trained params only."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from fedplan.errors import FedplanError
from fedplan.training.fit import Job
from fedplan.training.freezing import TrainableParams

if TYPE_CHECKING:
    from transformers import Trainer

_PARAM_KWARGS = {"params", "model", "optimizer_dict"}
"""Keyword arguments by which an optimizer of transformers chooses its parameters itself."""
_DISPLAY_CALLBACKS = ("ProgressCallback", "PrinterCallback")
"""Ends of the class names of callbacks that print."""


def run_trainer(
    trainer: object,
    job: Job,
    trainable_params: TrainableParams,
    set_max_grad_norm: Callable[[float], None],
) -> float:
    """Run a Trainer for one turn and return its mean loss.

    The Trainer saves, reports and evaluates nothing, and uses the job's seed. Its own gradient
    clipping is turned off, and `set_max_grad_norm` is called with its norm. Raises FedplanError if
    `trainer` is no Trainer, has another model, or has an optimizer that chooses its parameters.
    """
    from transformers import Trainer, set_seed

    if not isinstance(trainer, Trainer):
        raise FedplanError(
            f"the loop returned a {type(trainer).__name__}: return the mean loss, or a Trainer"
        )
    if trainer.model is not job.model:
        raise FedplanError("the Trainer has another model: build it with the model it is given")
    with TemporaryDirectory() as folder:
        _disable_outputs(trainer, folder, job.seed % 2**32)
        set_max_grad_norm(_disable_clipping(trainer))
        if trainer.optimizer is None and type(trainer).create_optimizer is Trainer.create_optimizer:
            trainer.optimizer = _make_optimizer(trainer, job, trainable_params)
        set_seed(job.seed % 2**32)
        with _restore_forward(job.model):
            output: Any = trainer.train()
    return float(output.training_loss)


@contextmanager
def _restore_forward(model: nn.Module) -> Generator[None]:
    """Restore a model's forward at the end: mixed precision wraps it, and the model stays."""
    names = ("forward", "_original_forward")
    originals = {name: vars(model)[name] for name in names if name in vars(model)}
    try:
        yield
    finally:
        for name in names:
            vars(model).pop(name, None)
        vars(model).update(originals)


def _disable_outputs(trainer: Trainer, folder: str, seed: int) -> None:
    """Give a Trainer a copy of its arguments that saves, logs and evaluates nothing.

    Sets its output folder and seeds, removes callbacks that print or report, and removes its
    original output folder if that is empty.
    """
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


def _disable_clipping(trainer: Trainer) -> float:
    """Turn off a Trainer's gradient clipping and return its norm; 0 if it was off.

    Its own clipping would miss the trained rows of fused tensors.
    """
    args: Any = trainer.args
    norm, args.max_grad_norm = float(args.max_grad_norm or 0.0), 0.0
    return norm


def _make_optimizer(
    trainer: Trainer, job: Job, trainable_params: TrainableParams
) -> torch.optim.Optimizer:
    """Create the optimizer that a Trainer's arguments name, over the trained params.

    Weight decay applies to the same params as in the Trainer. Raises FedplanError if the optimizer
    chooses its parameters itself.
    """
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
    leaves: dict[bool, list[Any]] = {True: [], False: []}
    for key, leaf in trainable_params.named_parameters():
        leaves[names.get(key, key) in decaying].append(leaf)
    weight_decay = {True: untyped.args.weight_decay, False: 0.0}
    groups = [
        {"params": params, "weight_decay": weight_decay[decays]}
        for decays, params in leaves.items()
        if params
    ]
    return make(groups, **settings)
