# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: training of one turn with example-level differential privacy.

Abadi et al., Deep Learning with Differential Privacy, 2016. Each step samples its examples
(Poisson), clips the gradient of each over all trained params, shared and personal, adds Gaussian
noise to every trained coordinate and divides by a public number. The loss is not reported: it would
be a release of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import isfinite, nan
from typing import cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss, SeededExamples
from fedplan.errors import PrivacyError
from fedplan.language.plan import Roles
from fedplan.privacy.dpsgd.factors import GhostClippingError
from fedplan.privacy.dpsgd.ghost_clipping import add_ghost_clipped, why_not_ghost_clipping
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    add_clipped_one_by_one,
    require_private_training,
    trained_tensors,
)
from fedplan.privacy.mechanisms.noise import grid_step
from fedplan.tensors.devices import fork_rng_state, model_device, sum_dtype, tensor_float32
from fedplan.training.fit import (
    Fit,
    FitResult,
    Job,
    TrainArguments,
    adjust_gradients,
    use_gradient_checkpointing,
)
from fedplan.training.freezing import TrainableParams, trainable

RoundedGaussian = Callable[[tuple[int, ...], float, float], Tensor]
"""Samples Gaussian noise of a shape and stddev, rounded to multiples of a grid step, float64;
`NoiseStream.rounded_gaussian` is one."""
Uniform = Callable[[int], Tensor]
"""Samples that many float64 numbers of (0, 1], cryptographically secure."""
ReportFault = Callable[[Exception], object]
"""Takes an error that must not leave the client, to log it there."""
ONE_BY_ONE = "ghost_clipping is off"
"""Reason of the default, one example at a time."""
_MAX_TOKENS = 2**12
"""Most tokens in a microbatch, to bound the memory of all layers' gradient factors."""
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
    ghost_clipping: run several examples at a time. Rounding then lets the examples of a microbatch
    change each other's gradients a little; a server that chooses values to amplify rounding can
    make this more than a little. False: one example at a time.
    microbatch_size: most examples that run at a time with ghost clipping; fewer of long texts.

    Raises a PrivacyError for values out of range.
    """

    max_grad_norm: float
    noise_multiplier: float
    expected_batch_size: int
    sampling_rate: float
    steps: int
    ghost_clipping: bool = False
    microbatch_size: int = 64

    def __post_init__(self) -> None:
        for name in ("expected_batch_size", "steps", "microbatch_size"):
            value: object = getattr(self, name)
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


@dataclass
class DPSGDStats:
    """Counts of one fit so far. Only `steps` is public; the rest must not leave the client.

    clipped: clipped gradients among the sampled examples; non_finite, failed: left out.
    slow_reason: why examples ran one by one; "" if ghost clipping worked throughout.
    """

    steps: int = 0
    examples: int = 0
    clipped: int = 0
    non_finite: int = 0
    failed: int = 0
    slow_reason: str = ""


def dp_sgd(
    config: DPSGDConfig,
    *,
    noise: RoundedGaussian,
    uniform: Uniform,
    trial: Examples | None = None,
    report_fault: ReportFault | None = None,
) -> Fit:
    """Make a fit function that trains the SHARE and KEEP params of a job by DP-SGD.

    Charge its steps to a privacy budget before each fit: the fit, `train_dp_sgd`, does not.
    noise, uniform: secure random sources, of the noise, and of the samples and the seed.
    """

    def fit(job: Job) -> FitResult:
        return train_dp_sgd(
            job, config, noise=noise, uniform=uniform, trial=trial, report_fault=report_fault
        )[0]

    return fit


def require_train_arguments(train_arguments: TrainArguments) -> None:
    """Raise a PrivacyError if a train config has a setting that DP-SGD does not support.

    These are gradient accumulation, fp16, tf32, torch_compile, group_by_length, cache_activations
    and num_workers above 0.
    """
    config = train_arguments
    refusals = {
        "gradient_accumulation_steps": config.gradient_accumulation_steps > 1
        and "a step samples its examples, and splits them into microbatches by itself: raise the "
        "batch size instead",
        "precision": {
            "fp16": "the gradient scaler of fp16 skips steps depending on the gradients, which is "
            "a release that is not charged: use bf16",
            "tf32": "norms would be rounded, and a gradient could exceed its bound: use bf16",
        }.get(config.precision),
        "torch_compile": config.torch_compile and "per-example gradients need hooks on each layer",
        "group_by_length": config.group_by_length and "a step samples its examples at random",
        "cache_activations": config.cache_activations
        and "each example's gradient goes through the whole model",
        "num_workers": config.num_workers > 0 and "the examples of a step are not known in advance",
    }
    for option, reason in refusals.items():
        if reason:
            raise PrivacyError(
                f"train.{option} cannot be used with example-level privacy: {reason}"
            )


def require_dp_sgd(
    model: nn.Module, roles: Roles, examples: Examples, loss: Loss, train_arguments: TrainArguments
) -> None:
    """Raise an error if DP-SGD cannot train the SHARE and KEEP params of a model.

    The outcome is visible, so call this before any charge, at a site with made-up examples and
    initial values. Raises as `require_train_arguments` and `require_private_training`.
    """
    require_train_arguments(train_arguments)
    with trainable(model, roles):
        tensors = trained_tensors(model, roles)
        require_private_training(Objective(model, tensors, examples, loss, train_arguments.dtype))


def train_dp_sgd(
    job: Job,
    config: DPSGDConfig,
    *,
    noise: RoundedGaussian,
    uniform: Uniform,
    trial: Examples | None = None,
    report_fault: ReportFault | None = None,
) -> tuple[FitResult, DPSGDStats]:
    """Train a job's SHARE and KEEP params in place by DP-SGD; return (result, counts).

    Steps and batch size are of `config`; optimizer, lr, schedule, weight decay, max_grad_norm (of
    the noisy gradient), bf16 and gradient checkpointing are of the job. trial: examples to test
    ghost clipping on; at a site no private ones, since a test with the server's values would be a
    release; None: the job's. report_fault: called once at the end if examples were left out,
    because of an exception or a gradient that is not finite; None raises the exception of an
    example instead. Gradient changes of the job, as of FedProx, apply to noisy gradients. The
    result's loss is nan; without trained params it has 0 steps. Charges no privacy budget. Does not
    check that model and loss treat examples apart: `require_dp_sgd` does, before the first charge.
    Raises a PrivacyError for unsupported settings, devices without float64, and random sources of a
    wrong shape or dtype.
    """
    require_train_arguments(job.train_arguments)
    device, examples = model_device(job.model), job.examples
    if sum_dtype(device) is not torch.float64:
        raise PrivacyError(
            f"the model is on {device}, which has no float64, the dtype in which clipped gradients "
            'are summed: use device = "cpu"'
        )
    # The seed is secret: with known dropout masks, an example would show in those after it.
    seed = int(float(_require_shape(uniform(1), (1,))) * 2**53)
    with (
        fork_rng_state(device, seed),
        trainable(job.model, job.roles) as params,
        use_gradient_checkpointing(job.model, job.train_arguments.gradient_checkpointing),
        tensor_float32(False),  # the process may have set it, and norms would be rounded
    ):
        if not list(params.parameters()):
            return FitResult(loss=nan, steps=0), DPSGDStats()
        job.model.train()
        seeded = examples.with_seed(seed) if isinstance(examples, SeededExamples) else examples
        tensors = trained_tensors(job.model, job.roles)
        objective = Objective(job.model, tensors, seeded, job.loss, job.train_arguments.dtype)
        tested = objective if trial is None else replace(objective, examples=trial)
        slow_reason = why_not_ghost_clipping(tested) if config.ghost_clipping else ONE_BY_ONE
        noisy = NoisyGradients(
            objective, config, params, noise, slow_reason, contain=report_fault is not None
        )
        stepper = job.stepper(params, config.steps)
        for _ in range(config.steps):
            draws = _require_shape(uniform(len(examples)), (len(examples),))
            noisy.write_gradients((draws <= config.sampling_rate).nonzero().flatten())
            stepper.step(lambda: adjust_gradients(params, job))
        job.model.eval()
    lr_sum = job.train_arguments.lr_sum(stepper.factor_sum)
    result = FitResult(loss=nan, steps=config.steps, lr_sum=lr_sum)
    stats = noisy.stats
    if report_fault is not None and stats.failed + stats.non_finite:
        fault = PrivacyError(
            f"{stats.failed} of {stats.examples} sampled examples failed and {stats.non_finite} "
            "have a gradient that is not finite: they were left out, and the answer was sent"
        ).with_code("training")
        fault.__cause__ = noisy.first_error
        report_fault(fault)
    return result, stats


class NoisyGradients:
    """Gradients of DP-SGD for one fit: call `write_gradients` once per step; counted in `stats`.

    slow_reason: why examples run one by one; "" for ghost clipping. contain: leave out an example
    that raises an exception, the first of which is `first_error`, instead of raising it.
    """

    def __init__(
        self,
        objective: Objective,
        config: DPSGDConfig,
        params: TrainableParams,
        noise: RoundedGaussian,
        slow_reason: str = ONE_BY_ONE,
        *,
        contain: bool = False,
    ) -> None:
        self._objective, self._config, self._noise = objective, config, noise
        self._params, self.stats = dict(params.named_parameters()), DPSGDStats()
        self.stats.slow_reason, self.first_error = slow_reason, cast("Exception | None", None)
        self._leave_out = self._count_failure if contain else None

    def _count_failure(self, error: Exception) -> None:
        self.stats.failed += 1
        self.first_error = self.first_error or error

    def write_gradients(self, indices: Tensor) -> None:
        """Set `.grad` of each param to the noisy mean of clipped gradients, and update the counts.

        Without `indices` of examples the gradient is noise alone. If ghost clipping fails, this and
        all later microbatches run one example at a time.
        """
        config = self._config
        stddev = config.noise_multiplier * config.max_grad_norm
        step = grid_step(stddev or config.max_grad_norm)
        clipped = ClippedSum(self._objective.tensors, config.max_grad_norm, step)
        stats = self.stats
        for microbatch in [indices] if stats.slow_reason else self._microbatches(indices):
            if stats.slow_reason or not self._add_ghost_clipped(microbatch, clipped):
                add_clipped_one_by_one(self._objective, microbatch, clipped, self._leave_out)
        sums = clipped.sums
        for trained in self._objective.tensors:
            for key, total in trained.views(sums[trained.name]).items():
                self._params[key].grad = self._noisy(total, stddev, step).to(self._params[key])
        stats.steps += 1
        stats.examples += len(indices)
        too_long = clipped.norms.isfinite() & (clipped.norms > clipped.max_grad_norm)
        stats.clipped += int(too_long.sum())
        stats.non_finite += clipped.non_finite

    def _microbatches(self, indices: Tensor) -> list[Tensor]:
        """Split the examples of a step into microbatches; one if an example cannot be read."""
        try:
            size = self._config.microbatch_size
            return list(_microbatches(self._objective.examples, indices, size))
        except Exception:
            if self._leave_out is None:
                raise
            return [indices]

    def _add_ghost_clipped(self, microbatch: Tensor, clipped: ClippedSum) -> bool:
        """Add a microbatch by ghost clipping; False, with the sum unchanged, if that fails."""
        try:
            add_ghost_clipped(self._objective, microbatch, clipped)
        except GhostClippingError as error:
            self.stats.slow_reason = str(error)
            return False
        except Exception:  # one by one, the example that fails is found and left out
            if self._leave_out is None:
                raise
            return False
        return True

    def _noisy(self, total: Tensor, stddev: float, step: float) -> Tensor:
        """Add noise to a sum of multiples of `step`, and divide by the expected batch size."""
        if stddev:
            noise = self._noise(tuple(total.shape), stddev, step)
            total = total + _require_shape(noise, tuple(total.shape)).to(total.device)
        return total / self._config.expected_batch_size


def _microbatches(examples: Examples, indices: Tensor, most: int) -> Iterator[Tensor]:
    """Split indices into microbatches of texts of equal length; too long a text is alone."""
    # No padding: the server's values could make a gradient depend on it, so that one example would
    # change what the others add.
    if not len(indices):
        return
    groups = {_DEFAULT_LENGTH: indices}
    if "attention_mask" in examples.batch(indices[:1]):
        lengths = examples.batch(indices)["attention_mask"].flatten(1).sum(1)
        unique = cast("list[int]", lengths.unique().tolist())
        groups = {length: indices[lengths == length] for length in unique}
    for length, same_length in groups.items():
        size = max(1, min(most, _MAX_TOKENS // max(1, length)))
        yield from cast("tuple[Tensor, ...]", same_length.split(size))


def _require_shape(numbers: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return random numbers, or raise a PrivacyError if they are not float64 of exactly `shape`."""
    # Fewer numbers would be broadcast: the same noise on many coordinates hides none.
    if numbers.shape != shape or numbers.dtype != torch.float64:
        actual = f"{tuple(numbers.shape)} of {numbers.dtype}"
        raise PrivacyError(f"a random source returned {actual}, not {shape} of torch.float64")
    return numbers
