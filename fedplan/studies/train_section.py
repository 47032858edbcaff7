# SPDX-License-Identifier: Apache-2.0
"""The [train] section of a study: how each client trains."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedplan.studies.field_types import Count, OptimizerName, Positive, Scalar, as_value_error
from fedplan.studies.sections import Section
from fedplan.training.activation_cache import DEFAULT_MEGABYTES, ActivationCache
from fedplan.training.fit import TrainArguments
from fedplan.training.optimizers import (
    DECAY,
    MOMENTUM,
    LRSchedule,
    make_client_optimizer,
    make_lr_schedule,
)

_CONFIG_FIELDS = tuple(
    f.name for f in fields(TrainArguments) if f.name not in ("optimizer", "lr_scheduler")
)
"""Fields that TrainArguments and the section have in common."""


class TrainConfig(Section):
    """Training arguments of a client's turn (the local training of one client in one round).

    Optimizer and learning rate: `optimizer`, `lr`, `lr_scheduler`, `warmup`, `weight_decay`,
    `momentum`, `optimizer_settings`, `lr_scheduler_settings`. Length: `rounds` of the run, and
    `epochs` or `steps` of a turn.
    Batches: `batch_size`, `gradient_accumulation_steps`, `max_grad_norm`, `group_by_length`,
    `num_workers`. Speed and memory: `precision`, `gradient_checkpointing`, `torch_compile`,
    `cache_activations`. All have defaults; `train_arguments` is the form for the training loop.
    """

    rounds: Positive = 10
    """Number of rounds."""
    optimizer: OptimizerName = TrainArguments.optimizer.name
    """Optimizer of the clients: a torch class in lower case, such as "adamw" or "sgd", or your
    own."""
    optimizer_settings: dict[str, Scalar | list[Scalar]] = Field(
        default_factory=dict[str, Scalar | list[Scalar]]
    )
    """Further arguments of the optimizer, by torch's names, such as { eps = 1e-6 }."""
    lr: Annotated[float, Field(gt=0)] = TrainArguments.lr
    """Learning rate, before the schedule."""
    lr_scheduler: str = TrainArguments.lr_scheduler.name
    """Learning-rate schedule by its transformers name, such as "linear" or "cosine"."""
    lr_scheduler_settings: dict[str, str | float] = Field(default_factory=dict[str, str | float])
    """Further arguments of the schedule, by their transformers names."""
    warmup: Annotated[float, Field(ge=0)] = LRSchedule.warmup
    """Learning-rate warm-up: below 1, a fraction of the schedule; else rounds or steps."""
    lr_scheduler_span: Literal["run", "round"] = "run"
    """Length of the schedule: the whole run ("run"), or each turn from its start ("round")."""
    weight_decay: Annotated[float, Field(ge=0)] = DECAY
    """Weight decay, if the optimizer has it."""
    decay_norm_and_bias: bool = TrainArguments.decay_norm_and_bias
    """Apply weight decay to norms and biases, too."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = MOMENTUM
    """Momentum, if the optimizer has it."""
    epochs: Positive = TrainArguments.epochs
    """Passes over the client's examples in each turn."""
    steps: Count = TrainArguments.steps
    """Optimizer steps in each turn; 0: as many as the epochs need."""
    batch_size: Positive = TrainArguments.batch_size
    """Examples in each batch."""
    gradient_accumulation_steps: Positive = TrainArguments.gradient_accumulation_steps
    """Batches per optimizer step (gradient accumulation)."""
    max_grad_norm: Annotated[float, Field(ge=0)] = TrainArguments.max_grad_norm
    """Maximum gradient norm of a step; 0: no clipping."""
    precision: str = TrainArguments.precision
    """Precision of forward passes: "float32", or mixed precision with "bf16" or "fp16"."""
    gradient_checkpointing: bool = TrainArguments.gradient_checkpointing
    """Use gradient checkpointing: recompute activations in the backward pass to save memory."""
    torch_compile: str = TrainArguments.torch_compile
    """Backend of torch.compile, such as "inductor"; default: do not compile."""
    group_by_length: bool = TrainArguments.group_by_length
    """Group texts of similar length into batches, to save padding."""
    num_workers: Count = TrainArguments.num_workers
    """Threads that prepare batches in advance; 0: none."""
    cache_activations: bool = TrainArguments.cache_activations
    """Cache the activations of frozen layers below all trained ones."""
    activation_cache_mb: Count = DEFAULT_MEGABYTES
    """Size of that activation cache per process, in megabytes; results do not depend on it."""

    @property
    def train_arguments(self) -> TrainArguments:
        """The training arguments as a TrainArguments, with optimizer and schedule objects."""
        decay_and_momentum = {
            name: value for name in ("weight_decay", "momentum") if (value := getattr(self, name))
        }
        settings = {**self.optimizer_settings, **decay_and_momentum}
        optimizer = make_client_optimizer(self.optimizer, settings)
        # A constant schedule does not depend on the rounds, so that rounds can be added later.
        is_constant = self.lr_scheduler == TrainArguments.lr_scheduler.name
        over = self.rounds if self.lr_scheduler_span == "run" and not is_constant else 0
        schedule = make_lr_schedule(
            self.lr_scheduler, self.lr_scheduler_settings, warmup=self.warmup, rounds=over
        )
        values = {name: getattr(self, name) for name in _CONFIG_FIELDS}
        return TrainArguments(optimizer, lr_scheduler=schedule, **values)

    @property
    def activation_cache(self) -> ActivationCache | None:
        """A new activation cache at each access; None without `cache_activations`."""
        return ActivationCache(self.activation_cache_mb) if self.cache_activations else None

    @model_validator(mode="after")
    def _validate_schedule(self) -> TrainConfig:
        """Raise ValueError if optimizer or schedule cannot be built.

        Also if `decay_norm_and_bias` is false without `weight_decay`.
        """
        with as_value_error():
            self.train_arguments.lr_scheduler.factor(self.lr, 1, 1)
        if not self.decay_norm_and_bias and not self.weight_decay:
            raise ValueError(
                "decay_norm_and_bias = false exempts norms and biases from weight decay: set "
                "weight_decay, too"
            )
        return self
