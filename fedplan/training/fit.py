# SPDX-License-Identifier: Apache-2.0
"""Local training in one turn: its settings, its inputs and result, and the default loop."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import partial, reduce
from itertools import islice
from math import ceil, nan
from operator import add
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import (
    Examples,
    Loss,
    SeededExamples,
    count_labels,
    epoch_steps,
    prefetch,
    split_step,
    token_lengths,
)
from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.language.plan import Roles
from fedplan.models.params import Param
from fedplan.tensors.devices import (
    autocast,
    fork_rng_state,
    grad_scaler,
    model_device,
    read_floats,
    tensor_float32,
    to_device,
)
from fedplan.tensors.named import Tensors
from fedplan.training.activation_cache import ActivationCache, frozen_prefix
from fedplan.training.freezing import TrainableParams, trainable
from fedplan.training.optimizers import (
    ClientOptimizer,
    LRByPart,
    LRSchedule,
    adamw,
    load_optimizer_state,
    read_optimizer_state,
)
from fedplan.training.ranks import Ranks


class Stepper:
    """Takes the optimizer steps of one turn: call `backward` for each batch, then `step`.

    `factor`: maps the number of a step, from 0, to the factor of the learning rate. `scaler`: the
    gradient scaler, which skips steps with overflowing gradients under float16. `steps_taken`,
    `factor_sum`: steps so far, without skipped ones, and the sum of their factors.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        factor: Callable[[int], float],
        scaler: torch.amp.GradScaler,
    ) -> None:
        self._optimizer, self._factor, self._scaler = optimizer, factor, scaler
        self._base_lrs = [group.get("lr") for group in optimizer.param_groups]
        self._last_factor, self._attempts = 1.0, 0
        self.steps_taken, self.factor_sum = 0, 0.0
        # A rank without an example in the first step scales no loss, and unscales all the same.
        scaler.scale(torch.zeros((), device=optimizer.param_groups[0]["params"][0].device))

    def state(self, trainable_params: TrainableParams) -> dict[str, Tensor]:
        """Return the optimizer's state, as `load_optimizer_state` takes it."""
        return read_optimizer_state(self._optimizer, trainable_params)

    def backward(self, loss: Tensor) -> None:
        """Backpropagate a loss; gradients accumulate until `step`."""
        self._scaler.scale(loss).backward()

    def step(self, adjust: Callable[[], None]) -> None:
        """Unscale the gradients, call `adjust`, set the learning rate, step, zero the gradients.

        Raises FedplanError if the rate changes and a param group of the optimizer has no `lr`.
        """
        self._scaler.unscale_(self._optimizer)
        adjust()
        factor, scale = self._factor(self._attempts), self._scaler.get_scale()
        if factor != self._last_factor:
            for group, base_lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
                if base_lr is None:
                    kind = type(self._optimizer).__name__
                    raise FedplanError(
                        f"{kind} keeps no lr in its groups, so no schedule can set it"
                    )
                group["lr"] = base_lr * factor
            self._last_factor = factor
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
        self._attempts += 1
        if self._scaler.get_scale() >= scale:
            self.steps_taken, self.factor_sum = self.steps_taken + 1, self.factor_sum + factor


PRECISIONS: dict[str, torch.dtype | None] = {
    "float32": None,
    "tf32": None,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Autocast dtype of each precision; None turns autocast off, as for tf32 of CUDA."""


@contextmanager
def use_gradient_checkpointing(model: nn.Module, on: bool) -> Generator[None]:
    """Context manager that turns on a model's gradient checkpointing, if `on`, until exit.

    A model that already has gradient checkpointing on stays so. Raises FedplanError if the model
    has no method `gradient_checkpointing_enable`, or the method raises ValueError.
    """
    if not on or getattr(model, "is_gradient_checkpointing", False):
        yield
        return
    enable: Any = getattr(model, "gradient_checkpointing_enable", None)
    try:
        if enable is None:
            raise ValueError("the model has no gradient_checkpointing_enable")
        # Reentrant checkpointing loses gradients of blocks whose inputs need none, as under LoRA.
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    except ValueError as error:
        raise FedplanError(
            f"{type(model).__name__} does not support checkpointing: "
            "leave train.gradient_checkpointing out"
        ) from error
    try:
        yield
    finally:
        cast("Any", model).gradient_checkpointing_disable()


def compile_model(model: nn.Module, backend: str) -> nn.Module:
    """Return the model compiled by a backend of torch.compile, sharing the model's tensors.

    An empty backend returns the model itself. Raises FedplanError for an unknown backend.
    """
    if not backend:
        return model
    backends = sorted(torch.compiler.list_backends(None))
    if backend not in backends:
        raise FedplanError(f"torch.compile has no backend {backend!r}: use one of {backends}")
    return cast("nn.Module", torch.compile(model, backend=backend))


_DEFAULT_OPTIMIZER = adamw()
_CONSTANT_LR = LRSchedule()


@dataclass(frozen=True)
class TrainArguments:
    """Training arguments of a client, as a value that server and clients compare.

    `optimizer`, `lr`, `lr_scheduler`: the optimizer, the learning rate, and the rate's schedule.
    `lr_by_part`: pairs of a part and its own learning rate, which has the same schedule.
    `epochs`: passes over the examples in a turn; ignored if `steps` is set.
    `steps`: optimizer steps in a turn; 0 uses `epochs`.
    `batch_size`: examples in one forward pass.
    `gradient_accumulation_steps`: batches in one optimizer step.
    `max_grad_norm`: gradients are clipped to this norm; 0 does not clip.
    `decay_norm_and_bias`: False excludes norms and biases from weight decay.
    `precision`: bf16 or fp16, autocast of forward passes; float32 or tf32, without autocast.
    `gradient_checkpointing`: recompute activations in the backward pass to save memory.
    `torch_compile`: a backend of torch.compile; empty does not compile.
    `group_by_length`: put texts of similar length into one batch.
    `num_workers`: threads that load batches ahead.
    `cache_activations`: compute the activations of frozen layers below all trained layers once per
    example, and cache the activations for later steps and turns.
    Raises FedplanError for gradient_accumulation_steps below 1, negative num_workers, an unknown
    precision, or cache_activations together with torch_compile; other values are not checked.
    """

    optimizer: ClientOptimizer = _DEFAULT_OPTIMIZER
    lr: float = 1e-3
    epochs: int = 1
    steps: int = 0
    batch_size: int = 32
    max_grad_norm: float = 0.0
    lr_scheduler: LRSchedule = _CONSTANT_LR
    gradient_accumulation_steps: int = 1
    decay_norm_and_bias: bool = True
    precision: str = "float32"
    gradient_checkpointing: bool = False
    torch_compile: str = ""
    group_by_length: bool = False
    num_workers: int = 0
    cache_activations: bool = False
    lr_by_part: LRByPart = ()

    def __post_init__(self) -> None:
        for name, least in (("gradient_accumulation_steps", 1), ("num_workers", 0)):
            if (value := getattr(self, name)) < least:
                raise FedplanError(f"{name} is {value}: give {least} or more")
        if self.precision not in PRECISIONS:
            raise FedplanError(
                f"there is no precision {self.precision!r}: use one of {', '.join(PRECISIONS)}"
            )
        if self.cache_activations and self.torch_compile:
            raise FedplanError(
                "cache_activations cannot be combined with torch_compile = "
                f"{self.torch_compile!r}, which runs the whole model: leave one of them out"
            )

    @property
    def text(self) -> str:
        """All settings in one line; part of the text that server and clients compare."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        if not self.lr_by_part:  # so that runs without it keep the text of earlier versions
            del values["lr_by_part"]
        return format_call("train", **values)

    @property
    def dtype(self) -> torch.dtype | None:
        """Autocast dtype of forward passes; None leaves the model's own dtype."""
        return PRECISIONS[self.precision]

    def step_count(self, example_count: int) -> int:
        """Return the number of optimizer steps of a turn on so many examples; 0 for none."""
        if not example_count:
            return 0
        step_size = self.batch_size * self.gradient_accumulation_steps
        return self.steps or self.epochs * ceil(example_count / step_size)

    def draw_steps(self, examples: Examples, seed: int) -> Iterator[Tensor]:
        """Yield the example indices of each step of a turn, in an order drawn by the seed.

        Every epoch has a new order. With `steps` set, epochs repeat until the steps are done.
        Raises FedplanError if `group_by_length` is set and examples have no attention_mask.
        """
        generator, remaining = torch.Generator().manual_seed(seed), self.step_count(len(examples))
        lengths = token_lengths(examples) if self.group_by_length else None
        step_size = self.batch_size * self.gradient_accumulation_steps
        while remaining:
            steps = epoch_steps(len(examples), step_size, generator, lengths)
            for indices in islice(steps, remaining):
                remaining -= 1
                yield indices

    def lr_sum(self, factor_sum: float) -> float:
        """Return the sum of the learning rates of all steps; nan if params have several rates."""
        return nan if self.lr_by_part else self.lr * factor_sum

    def make_optimizer(self, trainable_params: TrainableParams) -> torch.optim.Optimizer:
        """Create the torch optimizer of one turn, without state from earlier turns."""
        return self.optimizer.make_optimizer(
            trainable_params, self.lr, self.lr_by_part, decay_all=self.decay_norm_and_bias
        )


GradientHook = Callable[[Param, Tensor, Tensor], None]
"""Called before each step as `hook(param, value, gradient)`; changes the gradient in place."""


@dataclass(frozen=True)
class Job:
    """Inputs of one local fit: a client's model, examples and settings in one round.

    `model`: trained in place. `roles`: role of each param; SHARE and KEEP params are trained.
    `loss`: function of a model and a batch. `seed`: for the order of examples and dropout.
    `start`: values of the params before the turn, by key.
    `aux`: auxiliary tensors received from the server, as SCAFFOLD's control variates.
    `memory`: auxiliary tensors that the client stored in its last turn.
    `gradient_hooks`: called in order for each trained param before each step.
    `traits`: the client's traits. `round`: number of the round, from 1.
    `activation_cache`: cache of frozen activations, used with `train_arguments.cache_activations`.
    `examples_digest`: key of the examples in that cache; empty uses the object's id.
    `keep_optimizer`: the optimizer goes on with its state in `memory`, which the result's has.
    `client`: the client's name. `ranks`: this process's place among those that train the model
    together, each with the same job; None trains here alone.
    """

    model: nn.Module
    roles: Roles
    examples: Examples
    loss: Loss
    train_arguments: TrainArguments
    seed: int
    start: Tensors
    aux: Tensors = field(default_factory=dict[str, Tensor])
    memory: Tensors = field(default_factory=dict[str, Tensor])
    gradient_hooks: tuple[GradientHook, ...] = ()
    traits: Mapping[str, str] = field(default_factory=dict[str, str])
    round: int = 1
    activation_cache: ActivationCache | None = None
    examples_digest: str = ""
    keep_optimizer: bool = False
    client: str = ""
    ranks: Ranks | None = None

    def stepper(self, trainable_params: TrainableParams, steps: int) -> Stepper:
        """Create the Stepper of this turn: optimizer, learning rates of `steps` steps, and scaler.

        Raises FedplanError if precision is fp16 and a trained param is in float16 itself, or if
        the optimizer or the schedule cannot be created.
        """
        config, device = self.train_arguments, model_device(self.model)
        fp16 = config.dtype is torch.float16
        for key, tensor in trainable_params.named_parameters() if fp16 else ():
            # Gradient scaling needs params of a finer dtype than the forward pass.
            if tensor.dtype is torch.float16:
                raise FedplanError(
                    f"{key} is in float16, and precision fp16 needs params of a finer dtype than "
                    "it computes in: load the model in float32"
                )
        factor = config.lr_scheduler.factor(config.lr, self.round, steps)
        optimizer = config.make_optimizer(trainable_params)
        if self.keep_optimizer:
            load_optimizer_state(optimizer, trainable_params, self.memory)
        return Stepper(optimizer, factor, grad_scaler(device, config.dtype))


@dataclass(frozen=True)
class FitResult:
    """Result of one local fit.

    `loss`: mean training loss over all steps; nan without trained params. `steps`: optimizer steps
    taken.
    `aux`: auxiliary tensors for the server, sent beside the update.
    `memory`: auxiliary tensors that the client stores for the next turn.
    `lr_sum`: sum of the learning rates of all steps; None if every step used `train_arguments.lr`,
    nan if params had several.
    """

    loss: float
    steps: int
    aux: Tensors = field(default_factory=dict[str, Tensor])
    memory: Tensors = field(default_factory=dict[str, Tensor])
    lr_sum: float | None = None


Fit = Callable[[Job], FitResult]
"""Trains a client's model, in place, for one turn."""

ClientHook = Callable[[Fit], Fit]
"""Wraps a fit into another: a method's change to local training, such as FedProx's."""


@with_text("plain")
def plain_fit(job: Job) -> FitResult:
    """Train every SHARE and KEEP param of `job.model` in place, and leave the model in eval mode.

    Random numbers are drawn from the job's seed; the global random state is restored at the end.
    Without trained params nothing runs, and the result has loss nan and 0 steps; without examples
    the loss is 0. Raises FedplanError as `Job.stepper`, `TrainArguments.draw_steps`,
    `frozen_prefix`, `use_gradient_checkpointing` and `compile_model` do.
    """
    config, device, losses = job.train_arguments, model_device(job.model), list[Tensor]()
    ranks = job.ranks
    with (
        fork_rng_state(device, ranks.seed(job.seed) if ranks else job.seed),
        trainable(job.model, job.roles) as trainable_params,
        use_gradient_checkpointing(job.model, config.gradient_checkpointing),
        tensor_float32(config.precision == "tf32"),
    ):
        if not list(trainable_params.parameters()):
            return FitResult(loss=nan, steps=0)
        examples = job.examples
        if isinstance(examples, SeededExamples):
            examples = examples.with_seed(job.seed)
        stepper = job.stepper(trainable_params, config.step_count(len(examples)))
        model = compile_model(job.model, config.torch_compile)
        job.model.train()
        with frozen_prefix(job, examples) as prefix:
            loaded = prefix.examples if prefix else examples
            load_step = partial(split_step, loaded, size=config.batch_size)
            steps = config.draw_steps(loaded, job.seed)
            steps = map(ranks.share, steps) if ranks else steps
            for batches in prefetch(load_step, steps, config.num_workers):
                step_losses = list[Tensor]()
                for batch, share, indices in batches:
                    if prefix:
                        prefix.enter(batch, indices)
                    with autocast(device, config.dtype):
                        loss = job.loss(model, to_device(batch, device))
                    stepper.backward(loss * share)
                    step_losses.append(loss.detach().reshape(()) * share)
                if ranks:
                    params, labels = trainable_params.parameters(), count_labels(batches)
                    step_losses = [ranks.average_step(params, step_losses, labels)]
                losses += step_losses
                stepper.step(lambda: adjust_gradients(trainable_params, job))
        job.model.eval()
        memory = stepper.state(trainable_params) if job.keep_optimizer else {}
    mean = reduce(add, read_floats(losses), 0.0) / max(config.step_count(len(job.examples)), 1)
    lr_sum = config.lr_sum(stepper.factor_sum)
    return FitResult(mean, stepper.steps_taken, memory=memory, lr_sum=lr_sum)


@torch.no_grad()
def adjust_gradients(
    trainable_params: TrainableParams, job: Job, others: Iterable[nn.Parameter] = ()
) -> None:
    """Change the gradients of `trainable_params` in place: run the job's hooks, then clip.

    Clips to the norm `max_grad_norm` of the job's train config, together with the gradients of
    `others`, params that no hook changes; 0 does not clip.
    """
    for param, value, gradient in trainable_params.gradients() if job.gradient_hooks else ():
        for hook in job.gradient_hooks:
            hook(param, value, gradient)
    if job.train_arguments.max_grad_norm:
        nn.utils.clip_grad_norm_(
            [*trainable_params.parameters(), *others], job.train_arguments.max_grad_norm
        )
