# SPDX-License-Identifier: Apache-2.0
"""Trainers: one of transformers, or of TRL, run for one turn over the marked parameters."""

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
from fedplan.training.freezing import Marked

if TYPE_CHECKING:
    from transformers import Trainer

_WHOLE = {"params", "model", "optimizer_dict"}
"""By one of these an optimiser of transformers takes parameters of its own choice."""


def run_trainer(made: object, job: Job, marked: Marked, clip_by: Callable[[float], None]) -> float:
    """Have a Trainer train for one turn, and say its mean loss.

    It saves, reports and evaluates nothing. Its seed is the job's. Gradients are clipped at the
    norm of its arguments, once the method has changed them.
    """
    from transformers import Trainer, set_seed

    if not isinstance(made, Trainer):
        raise FedplanError(
            f"the loop gave a {type(made).__name__}: return the mean loss, or a Trainer to be run"
        )
    if made.model is not job.model:
        raise FedplanError("the Trainer has another model: build it with the one that it is given")
    with TemporaryDirectory() as folder:
        _settle(made, folder, job.seed % 2**32)
        clip_by(_unclipped(made))
        if made.optimizer is None and type(made).create_optimizer is Trainer.create_optimizer:
            made.optimizer = _optimiser(made, job, marked)
        set_seed(job.seed % 2**32)
        with _own_forward(job.model):
            found: Any = made.train()
    return float(found.training_loss)


@contextmanager
def _own_forward(model: nn.Module) -> Generator[None]:
    """Mixed precision wraps a model's forward, and the model outlives the Trainer."""
    wrapped = ("forward", "_original_forward")
    held = {name: vars(model)[name] for name in wrapped if name in vars(model)}
    try:
        yield
    finally:
        for name in wrapped:
            vars(model).pop(name, None)
        vars(model).update(held)


def _settle(trainer: Trainer, folder: str, seed: int) -> None:
    """Take from a Trainer all that would leave something behind; its caller's arguments stay."""
    args: Any = copy.copy(trainer.args)
    # It makes its folder as soon as it is made, and nothing will be in it.
    with suppress(OSError):
        Path(args.output_dir).rmdir()
    args.output_dir, args.seed, args.data_seed = folder, seed, seed
    args.save_strategy = args.eval_strategy = args.logging_strategy = "no"
    args.load_best_model_at_end = args.push_to_hub = args.eval_on_start = False
    # On a CPU torch warns that there is nothing to pin for.
    args.dataloader_pin_memory = args.dataloader_pin_memory and args.device.type != "cpu"
    trainer.args = args
    for each in cast("list[Any]", list(trainer.callback_handler.callbacks)):
        name, module = type(each).__name__, type(each).__module__
        if module.startswith("transformers.integrations") or name.endswith(_TALKING):
            trainer.remove_callback(each)


_TALKING = ("ProgressCallback", "PrinterCallback")


def _unclipped(trainer: Trainer) -> float:
    """The norm that a Trainer clips at; it would leave out rows of fused tensors itself."""
    args: Any = trainer.args
    norm, args.max_grad_norm = float(args.max_grad_norm or 0.0), 0.0
    return norm


def _optimiser(trainer: Trainer, job: Job, marked: Marked) -> torch.optim.Optimizer:
    """The optimiser that a Trainer's arguments say, over the marked parameters."""
    owner: Any = trainer
    make, settings = owner.optimizer_cls_and_kwargs or owner.get_optimizer_cls_and_kwargs(
        trainer.args, job.model
    )
    if _WHOLE & set(settings) or not (
        isinstance(make, type) and issubclass(make, torch.optim.Optimizer)
    ):
        raise FedplanError(
            f"the Trainer's optimiser {owner.args.optim} chooses its parameters itself, and a plan "
            "does that here: take another, such as optim='adamw_torch'"
        )
    names = {param.key: param.name for param in job.roles}
    decaying = set(owner.get_decay_parameter_names(job.model))
    held: dict[bool, list[Any]] = {True: [], False: []}
    for key, leaf in marked.named_parameters():
        held[names.get(key, key) in decaying].append(leaf)
    decay = {True: owner.args.weight_decay, False: 0.0}
    groups = [{"params": held[each], "weight_decay": decay[each]} for each in held if held[each]]
    return make(groups, **settings)
