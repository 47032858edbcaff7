# SPDX-License-Identifier: Apache-2.0
"""Runs a Trainer of transformers or TRL for one turn, over the trained params only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import torch

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
    """Train the job's model by a Trainer for one turn, and return the mean loss.

    The Trainer saves, reports and evaluates nothing, and uses the job's seed. The Trainer gets an
    optimizer over `trainable_params`, unless it was given an optimizer or its class overrides
    create_optimizer. The Trainer's own gradient clipping is turned off, and `set_max_grad_norm` is
    called with its norm (0: no clipping). Raises FedplanError if `trainer` is no Trainer, has
    another model, or has arguments with an unsuitable optimizer (see `_make_optimizer`). Changes
    `trainer`, and the global random state.
    """
    from transformers import Trainer, set_seed

    if not isinstance(trainer, Trainer):
        raise FedplanError(
            f"the loop returned a {type(trainer).__name__}: return the mean loss, or a Trainer"
        )
    if trainer.model is not job.model:
        raise FedplanError("the Trainer has another model: build it with the model it is given")
    attributes, names = vars(job.model), ("forward", "_original_forward")
    with TemporaryDirectory() as folder:
        _disable_outputs(trainer, folder, job.seed % 2**32)
        args: Any = trainer.args
        # The Trainer's own clipping would miss the trained rows of fused tensors.
        norm, args.max_grad_norm = float(args.max_grad_norm or 0.0), 0.0
        set_max_grad_norm(norm)
        if trainer.optimizer is None and type(trainer).create_optimizer is Trainer.create_optimizer:
            trainer.optimizer = _make_optimizer(trainer, job, trainable_params)
        set_seed(job.seed % 2**32)
        originals = {name: attributes[name] for name in names if name in attributes}
        try:
            output: Any = trainer.train()
        finally:
            # Mixed precision wraps the forward, and the model stays.
            for name in names:
                attributes.pop(name, None)
            attributes.update(originals)
    return float(output.training_loss)


def _disable_outputs(trainer: Trainer, folder: str, seed: int) -> None:
    """Replace a Trainer's arguments by a copy that saves, logs and evaluates nothing.

    The copy has the given output folder and seed. Also removes callbacks that print or report, and
    deletes the original output folder if that is empty.
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


def _make_optimizer(
    trainer: Trainer, job: Job, trainable_params: TrainableParams
) -> torch.optim.Optimizer:
    """Create the optimizer that a Trainer's arguments name, over `trainable_params`.

    Weight decay applies to the same params of the job's model as in the Trainer. Raises
    FedplanError for an optimizer that cannot be built over given parameters: one that is made from
    the model or from its own param groups (as GaLore and LOMO), or is no torch optimizer.
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
    groups: dict[bool, dict[str, Any]] = {
        True: {"params": [], "weight_decay": untyped.args.weight_decay},
        False: {"params": [], "weight_decay": 0.0},
    }
    for key, leaf in trainable_params.named_parameters():
        groups[names.get(key, key) in decaying]["params"].append(leaf)
    return make([group for group in groups.values() if group["params"]], **settings)
