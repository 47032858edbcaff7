# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: training of one turn with example-level differential privacy.

Abadi et al., Deep Learning with Differential Privacy, 2016. Each step samples its examples
(Poisson), clips the gradient of each over all trained params, shared and personal, adds Gaussian
noise to every trained coordinate and divides by a public number. The loss is not reported: it would
be a release of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from typing import cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, SeededExamples
from fedplan.privacy.accounting.events import DPSGDSteps
from fedplan.privacy.dpsgd.factors import GhostClippingError
from fedplan.privacy.dpsgd.ghost_clipping import add_ghost_clipped, why_not_ghost_clipping
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    add_clipped_one_by_one,
    require_independent_examples,
    trained_tensors,
)
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.noise import finest_grid_step, round_to_grid
from fedplan.tensors.devices import fork_rng_state, model_device, sum_dtype
from fedplan.training.fit import Fit, FitResult, Job, TrainConfig, adjust_gradients
from fedplan.training.forward_options import use_gradient_checkpointing
from fedplan.training.freezing import TrainableParams, trainable

Normal = Callable[[tuple[int, ...]], Tensor]
"""Samples a float64 tensor of N(0, 1) of a shape, cryptographically secure."""
Uniform = Callable[[int], Tensor]
"""Samples that many float64 numbers of [0, 1), cryptographically secure."""
_MAX_TOKENS = 2**12
"""Most tokens in a microbatch, to bound the memory of all layers' gradient factors."""
_CHUNK = 2**15
"""Coordinates that get their noise at a time, so that temporary tensors stay in the cache."""
_DEFAULT_LENGTH = 2**8
"""Tokens assumed for an example without an attention mask, such as an image."""


@dataclass(frozen=True)
class DPSGDConfig:
    """Settings of DP-SGD. All are public: none may depend on a client's number of examples.

    max_grad_norm: L2 norm to which each example's gradient is clipped.
    noise_multiplier: stddev of the noise divided by `max_grad_norm`; 0 is no privacy.
    expected_batch_size: number that the noisy sum of gradients is divided by.
    sampling_rate: probability of each example to be in a step.
    steps: steps of one fit.
    microbatch_size: most examples that run at a time; fewer of long texts.

    Raises a PrivacyError for values out of range.
    """

    max_grad_norm: float
    noise_multiplier: float
    expected_batch_size: int
    sampling_rate: float
    steps: int
    microbatch_size: int = 64

    def __post_init__(self) -> None:
        wholes = {
            "expected_batch_size": self.expected_batch_size,
            "steps": self.steps,
            "microbatch_size": self.microbatch_size,
        }
        for name, value in wholes.items():
            if type(value) is not int or value < 1:
                raise PrivacyError(f"{name} is {value!r}: give a whole number, 1 or more")
        if not 0 < self.sampling_rate <= 1:
            raise PrivacyError(
                f"sampling_rate is {self.sampling_rate!r}: give a number above 0 and at most 1"
            )
        if not (self.max_grad_norm > 0 and isfinite(self.max_grad_norm)):
            raise PrivacyError(f"max_grad_norm is {self.max_grad_norm!r}: give a number above 0")
        if not (self.noise_multiplier >= 0 and isfinite(self.noise_multiplier)):
            raise PrivacyError(
                f"noise_multiplier is {self.noise_multiplier!r}: give 0 (no privacy) or more"
            )

    @property
    def event(self) -> DPSGDSteps:
        """Privacy event of one fit, to be charged before it starts."""
        return DPSGDSteps(self.noise_multiplier, self.sampling_rate, self.steps)


@dataclass(frozen=True)
class DPSGDStats:
    """Counts of one fit. Only `steps` is public; the rest must not leave the client.

    examples: examples sampled over all steps; clipped: those whose gradient was clipped;
    non_finite: those whose gradient was not finite and was left out.
    slow_reason: why examples ran one by one instead of by ghost clipping; "" if they did not.
    """

    steps: int = 0
    examples: int = 0
    clipped: int = 0
    non_finite: int = 0
    slow_reason: str = ""


def dp_sgd(config: DPSGDConfig, *, normal: Normal, uniform: Uniform) -> Fit:
    """A fit that trains the SHARE and KEEP params of a job by DP-SGD. See `train_dp_sgd`.

    normal and uniform: sources of noise and of sampling.
    """

    def fit(job: Job) -> FitResult:
        return train_dp_sgd(job, config, normal=normal, uniform=uniform)[0]

    return fit


def require_train_config(train_config: TrainConfig) -> None:
    """Raise a PrivacyError for a training setting that DP-SGD does not support."""
    refusals = {
        "gradient_accumulation_steps": (
            train_config.gradient_accumulation_steps > 1,
            "a step samples its examples, and splits them into microbatches by itself: raise the "
            "batch size instead",
        ),
        "precision": (
            train_config.dtype is torch.float16,
            "the gradient scaler of fp16 skips steps depending on the gradients, which is a "
            "release that is not charged: use bf16",
        ),
        "torch_compile": (
            bool(train_config.torch_compile),
            "per-example gradients need hooks on each layer",
        ),
        "group_by_length": (train_config.group_by_length, "a step samples its examples at random"),
        "cache_activations": (
            train_config.cache_activations,
            "each example's gradient goes through the whole model",
        ),
        "num_workers": (
            train_config.num_workers > 0,
            "the examples of a step are not known in advance",
        ),
    }
    for option, (is_set, reason) in refusals.items():
        if is_set:
            raise PrivacyError(
                f"train.{option} cannot be used with example-level privacy: {reason}"
            )


def train_dp_sgd(
    job: Job, config: DPSGDConfig, *, normal: Normal, uniform: Uniform
) -> tuple[FitResult, DPSGDStats]:
    """Train a job's model in place by DP-SGD; return the result (its loss is nan) and the counts.

    Of the job's train config it uses the optimizer, lr, schedule, weight decay, max_grad_norm (of
    the noisy gradient), bf16 and gradient checkpointing; steps and batch size are those of
    `config`. Gradient changes of the job, as of FedProx, apply to noisy gradients. Raises a
    PrivacyError for unsupported settings, devices without float64, and models or losses that mix
    examples.
    """
    require_train_config(job.train_config)
    _require_float64(job.model)
    # The seed is secret: with known dropout masks, an example would show in those after it.
    seed = int(float(_require_shape(uniform(1), (1,))) * 2**53)
    with fork_rng_state(model_device(job.model), seed), _trainable(job) as params:
        if not list(params.parameters()):
            return FitResult(loss=nan, steps=0), DPSGDStats()
        job.model.train()
        noisy = NoisyGradients(_make_objective(job, seed), config, params, normal)
        stepper = job.stepper(params, config.steps)
        for _ in range(config.steps):
            draws = _require_shape(uniform(len(job.examples)), (len(job.examples),))
            noisy.write_gradients((draws < config.sampling_rate).nonzero().flatten())
            stepper.step(lambda: adjust_gradients(params, job))
        job.model.eval()
    result = FitResult(loss=nan, steps=noisy.steps, lr_sum=job.train_config.lr * stepper.factor_sum)
    return result, noisy.stats()


@contextmanager
def _trainable(job: Job) -> Generator[TrainableParams]:
    """The trainable params of a job, with gradient checkpointing as its config says."""
    with (
        trainable(job.model, job.roles) as params,
        use_gradient_checkpointing(job.model, job.train_config.gradient_checkpointing),
    ):
        yield params


def _make_objective(job: Job, seed: int) -> Objective:
    """Objective of a job. Raises a PrivacyError if its model or loss mixes examples."""
    examples = (
        job.examples.with_seed(seed) if isinstance(job.examples, SeededExamples) else job.examples
    )
    objective = Objective(
        job.model, trained_tensors(job.model, job.roles), examples, job.loss, job.train_config.dtype
    )
    require_independent_examples(objective)
    return objective


class NoisyGradients:
    """Writes the noisy gradient of each step of one fit into `.grad` of its params, and counts.

    slow_reason: why examples run one by one instead of by ghost clipping; "" if they do not.
    steps: gradients written so far.
    """

    def __init__(
        self, objective: Objective, config: DPSGDConfig, params: TrainableParams, normal: Normal
    ) -> None:
        self._objective, self._config, self._normal = objective, config, normal
        self._params = dict(params.named_parameters())
        self.slow_reason = why_not_ghost_clipping(objective)
        self.steps = self._examples = self._clipped = self._non_finite = 0

    def write_gradients(self, indices: Tensor) -> None:
        """Set `.grad` of each param to the noisy mean of the clipped gradients of some examples.

        Without examples it is noise alone.
        """
        clipped = ClippedSum(self._objective.tensors, self._config.max_grad_norm)
        size = self._config.microbatch_size
        for microbatch in _microbatches(self._objective.examples, indices, size):
            self._add(microbatch, clipped)
        for trained in self._objective.tensors:
            for key, total in trained.views(clipped.totals[trained.name]).items():
                self._params[key].grad = self._noisy(total, self._params[key])
        self.steps += 1
        self._examples += len(indices)
        too_long = clipped.norms.isfinite() & (clipped.norms > clipped.max_grad_norm)
        self._clipped += int(too_long.sum())
        self._non_finite += clipped.non_finite

    def _add(self, indices: Tensor, into: ClippedSum) -> None:
        """Add clipped gradients by ghost clipping; one by one, from now on, if that fails."""
        if not self.slow_reason:
            try:
                return add_ghost_clipped(self._objective, indices, into)
            except GhostClippingError as error:
                self.slow_reason = str(error)
        add_clipped_one_by_one(self._objective, indices, into)

    def _noisy(self, total: Tensor, param: nn.Parameter) -> Tensor:
        """A sum of clipped gradients plus noise, divided by the expected batch size.

        In the dtype and on the device of `param`.
        """
        config, shape = self._config, tuple(total.shape)
        samples = _require_shape(self._normal(shape), shape).to(total.device)
        gradient = torch.empty(shape, dtype=param.dtype, device=param.device)
        stddev = config.noise_multiplier * config.max_grad_norm
        # So fine that rounding, over all coordinates, stays within the margin left by clipping.
        step = finest_grid_step(stddev) * 2.0**12 if stddev else 0.0
        for target, exact, noise in zip(*map(_chunks, (gradient, total, samples)), strict=True):
            noisy = exact.to(torch.float64, copy=True)
            if step:
                noisy = round_to_grid(noisy, step).add_(round_to_grid(noise.mul_(stddev), step))
            target.copy_(noisy.div_(config.expected_batch_size))
        return gradient

    def stats(self) -> DPSGDStats:
        """The counts so far."""
        return DPSGDStats(
            self.steps, self._examples, self._clipped, self._non_finite, self.slow_reason
        )


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", tensor.reshape(-1).split(_CHUNK))


def _microbatches(examples: Examples, indices: Tensor, most: int) -> Iterator[Tensor]:
    """Split indices into microbatches of at most `most` examples, of texts of equal length each."""
    # No padding: the server's values could make a gradient depend on it, so that one example would
    # change what the others add.
    if not len(indices):
        return
    if "attention_mask" not in examples.batch(indices[:1]):
        size = _microbatch_size(_DEFAULT_LENGTH, most)
        yield from cast("tuple[Tensor, ...]", indices.split(size))
        return
    lengths = examples.batch(indices)["attention_mask"].flatten(1).sum(1)
    for length in cast("list[int]", lengths.unique().tolist()):
        same_length = indices[lengths == length]
        yield from cast("tuple[Tensor, ...]", same_length.split(_microbatch_size(length, most)))


def _microbatch_size(length: int, most: int) -> int:
    """Number of examples of a length that run at a time, at most `most`."""
    return max(1, min(most, _MAX_TOKENS // max(1, length)))


def _require_float64(model: nn.Module) -> None:
    """Raise a PrivacyError for a model on a device without float64."""
    device = model_device(model)
    if sum_dtype(device) is not torch.float64:
        raise PrivacyError(
            f"the model is on {device}, which has no float64, the dtype in which clipped gradients "
            'are summed: use device = "cpu"'
        )


def _require_shape(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return random numbers, or raise a PrivacyError if they are not float64 of this shape.

    Fewer numbers would be broadcast: the same noise on many coordinates hides none.
    """
    if numbers.shape != shape or numbers.dtype != torch.float64:
        actual = f"{tuple(numbers.shape)} of {numbers.dtype}"
        raise PrivacyError(f"a random source returned {actual}, not {shape} of torch.float64")
    return numbers
