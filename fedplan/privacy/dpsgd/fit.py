# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: a fit whose every step hides each single example of the client.

Abadi et al., Deep Learning with Differential Privacy, 2016. Each step draws its examples apart
(Poisson), clips the gradient of each over all trained params, shared and kept, adds Gaussian noise
to every trained coordinate and divides by a public number. Nothing else leaves the fit: its loss is
not said, since that would be a release of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite, nan
from typing import cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Seeded
from fedplan.privacy.accounting.events import Steps
from fedplan.privacy.dpsgd.factors import Unfactored
from fedplan.privacy.dpsgd.ghost import distrust, ghost
from fedplan.privacy.dpsgd.per_example import Subject, Sum, one_by_one, require_apart, trained
from fedplan.privacy.errors import PrivacyError
from fedplan.privacy.mechanisms.noise import finest, on_grid
from fedplan.tensors.devices import device_of, forked, widest
from fedplan.training.fit import Done, Fit, Job, Pace, adjust
from fedplan.training.freezing import Marked, mark
from fedplan.training.passes import checkpointed

Normal = Callable[[tuple[int, ...]], Tensor]
"""Gives float64 numbers of N(0, 1) in a shape, from a source that nobody can foresee."""
Uniform = Callable[[int], Tensor]
"""Gives so many float64 numbers of [0, 1), from a source that nobody can foresee."""
_TOKENS = 2**12
"""How many tokens run at a time: of more, the factors of all layers would need much memory."""
_CHUNK = 2**15
"""Coordinates that get their noise at a time: their scratch stays in a core's cache."""
_USUAL = 2**8
"""The tokens of an example that does not say them, such as a picture."""


@dataclass(frozen=True)
class DPSGD:
    """How a client hides each of its examples; all of it is public.

    `noise` is a multiple of `clip`. `rate` is the chance of each example to be in a step and
    `expected_batch` what the noisy sum is divided by: neither may be worked out from the number of
    rows that a client really has. `microbatch` is how many examples run at a time, at most: fewer
    of long texts.
    """

    clip: float
    noise: float
    expected_batch: int
    rate: float
    steps: int
    microbatch: int = 64

    def __post_init__(self) -> None:
        wholes = {
            "expected_batch": self.expected_batch,
            "steps": self.steps,
            "microbatch": self.microbatch,
        }
        for name, value in wholes.items():
            if type(value) is not int or value < 1:
                raise PrivacyError(f"{name} is {value!r}: give a whole number, 1 or more")
        if not 0 < self.rate <= 1:
            raise PrivacyError(f"rate is {self.rate!r}: give a number above 0 and at most 1")
        if not (self.clip > 0 and isfinite(self.clip)):
            raise PrivacyError(f"clip is {self.clip!r}: give a number above 0")
        if not (self.noise >= 0 and isfinite(self.noise)):
            raise PrivacyError(f"noise is {self.noise!r}: give 0, which hides nothing, or more")

    @property
    def event(self) -> Steps:
        """What one fit costs: to be charged before it begins."""
        return Steps(self.noise, self.rate, self.steps)


@dataclass(frozen=True)
class Sampled:
    """What a fit did. Only `steps`, the noisy steps it took, is public; the rest stays at home.

    `examples` counts those drawn over all steps, `clipped` those that were too long, `spoiled`
    those that counted for nothing because their gradient was not finite. `slow` says why examples
    had to be taken one by one, if they had.
    """

    steps: int = 0
    examples: int = 0
    clipped: int = 0
    spoiled: int = 0
    slow: str = ""


def dp_sgd(privately: DPSGD, *, normal: Normal, uniform: Uniform) -> Fit:
    """The fit by DP-SGD: it trains every SHARE and KEEP param.

    Of the pace it takes the optimiser, its rate and schedule, decay and momentum, the clip of the
    noisy gradient, bf16 and checkpointing; how many steps and of what size it says itself, and
    `require_pace` refuses the rest. What changes gradients, as FedProx does, changes noisy ones.
    """

    def fit(job: Job) -> Done:
        return train(job, privately, normal=normal, uniform=uniform)[0]

    return fit


def require_pace(pace: Pace) -> None:
    """Refuse what a fit by DP-SGD cannot take, rather than leave it out in silence."""
    refusals = {
        "accumulate": (
            pace.accumulate > 1,
            "a step draws its rows by chance, and takes as many at a time as fit: say a larger "
            "batch alone",
        ),
        "precision": (
            pace.dtype is torch.float16,
            "the scaler of fp16 leaves out steps by what the gradients are, which is a release "
            "that nobody pays for: take bf16",
        ),
        "compile": (bool(pace.compile), "what each example adds is heard layer by layer"),
        "by_length": (pace.by_length, "a step draws its rows by chance alone"),
        "reuse": (pace.reuse, "its loop takes each example's gradient through the whole model"),
        "workers": (pace.workers > 0, "nobody knows ahead which rows a step draws"),
    }
    for word, (wrong, why) in refusals.items():
        if wrong:
            raise PrivacyError(f"train.{word} does not go together with hiding examples: {why}")


def train(job: Job, privately: DPSGD, *, normal: Normal, uniform: Uniform) -> tuple[Done, Sampled]:
    """Train by DP-SGD, and say what was done."""
    require_pace(job.pace)
    _require_float64(job.model)
    # Were masks known, a row that is there would show in the masks of those after it.
    seed = int(float(_require(uniform(1), (1,))) * 2**53)
    with forked(device_of(job.model), seed), _marked(job) as marked:
        if not list(marked.parameters()):
            return Done(loss=nan, steps=0), Sampled()
        job.model.train()
        noisy = Noisy(_subject(job, seed), privately, marked, normal)
        stepper = job.stepper(marked, privately.steps)
        for _ in range(privately.steps):
            drawn = _require(uniform(len(job.rows)), (len(job.rows),))
            noisy.write_gradients((drawn < privately.rate).nonzero().flatten())
            stepper.step(lambda: adjust(marked, job))
        job.model.eval()
    done = Done(loss=nan, steps=noisy.taken, distance=job.pace.rate * stepper.factors)
    return done, noisy.sampled()


@contextmanager
def _marked(job: Job) -> Generator[Marked]:
    with mark(job.model, job.roles) as marked, checkpointed(job.model, job.pace.checkpointing):
        yield marked


def _subject(job: Job, seed: int) -> Subject:
    rows = job.rows.seeded(seed) if isinstance(job.rows, Seeded) else job.rows
    subject = Subject(job.model, trained(job.model, job.roles), rows, job.loss, job.pace.dtype)
    require_apart(subject)
    return subject


class Noisy:
    """The noisy gradients of one fit, step by step, and the count of all that went into them.

    `slow` says why examples are taken one by one, if they are.
    """

    def __init__(self, subject: Subject, privately: DPSGD, marked: Marked, normal: Normal) -> None:
        self._subject, self._privately, self._normal = subject, privately, normal
        self._leaves = dict(marked.named_parameters())
        self.slow = distrust(subject)
        self.taken = self._examples = self._clipped = self._spoiled = 0

    def write_gradients(self, drawn: Tensor) -> None:
        """Give each leaf the noisy mean over the rows drawn; there may be none."""
        found = Sum(self._subject.tensors, self._privately.clip)
        for indices in _portions(self._subject.rows, drawn, self._privately.microbatch):
            self._add(indices, found)
        for each in self._subject.tensors:
            for key, view in each.views(found.totals[each.name]).items():
                self._leaves[key].grad = self._noisy(view, self._leaves[key])
        self.taken += 1
        self._examples += len(drawn)
        self._clipped += int((found.lengths.isfinite() & (found.lengths > found.bound)).sum())
        self._spoiled += found.spoiled

    def _add(self, indices: Tensor, into: Sum) -> None:
        if not self.slow:
            try:
                return ghost(self._subject, indices, into)
            except Unfactored as error:
                self.slow = str(error)
        one_by_one(self._subject, indices, into)

    def _noisy(self, view: Tensor, leaf: nn.Parameter) -> Tensor:
        private, shape = self._privately, tuple(view.shape)
        drawn = _require(self._normal(shape), shape).to(view.device)
        made = torch.empty(shape, dtype=leaf.dtype, device=leaf.device)
        scale = private.noise * private.clip
        # A step is so fine that rounding, over all coordinates, stays within clipping's hair.
        step = finest(scale) * 2.0**12 if scale else 0.0
        for into, exact, noise in zip(*map(_chunks, (made, view, drawn)), strict=True):
            noisy = exact.to(torch.float64, copy=True)
            if step:
                noisy = on_grid(noisy, step).add_(on_grid(noise.mul_(scale), step))
            into.copy_(noisy.div_(private.expected_batch))
        return made

    def sampled(self) -> Sampled:
        """What went into them."""
        return Sampled(self.taken, self._examples, self._clipped, self._spoiled, self.slow)


def _chunks(tensor: Tensor) -> tuple[Tensor, ...]:
    return cast("tuple[Tensor, ...]", tensor.reshape(-1).split(_CHUNK))


def _portions(rows: Examples, drawn: Tensor, most: int) -> Iterator[Tensor]:
    """The rows drawn, in portions of at most so many tokens, each of texts of one length.

    Were a text filled up to the length of another, the values of a server might make its gradient
    follow from that: then one row would change what all others add.
    """
    if not len(drawn):
        return
    if "attention_mask" not in rows.batch(drawn[:1]):
        yield from cast("tuple[Tensor, ...]", drawn.split(_fitting(_USUAL, most)))
        return
    lengths = rows.batch(drawn)["attention_mask"].flatten(1).sum(1)
    for length in cast("list[int]", lengths.unique().tolist()):
        alike = drawn[lengths == length]
        yield from cast("tuple[Tensor, ...]", alike.split(_fitting(length, most)))


def _fitting(width: int, most: int) -> int:
    """How many rows of a width run at a time."""
    return max(1, min(most, _TOKENS // max(1, width)))


def _require_float64(model: nn.Module) -> None:
    device = device_of(model)
    if widest(device) is not torch.float64:
        raise PrivacyError(
            f"the model is on {device}, which has no float64, and clipped gradients are added up "
            'in that: say device = "cpu"'
        )


def _require(drawn: Tensor, shape: tuple[int, ...]) -> Tensor:
    """One number for each place: fewer would be spread over several, and hide none of them."""
    if drawn.shape != shape or drawn.dtype != torch.float64:
        found = f"{tuple(drawn.shape)} of {drawn.dtype}"
        raise PrivacyError(f"a source of chance gave {found}, and {shape} of float64 was asked for")
    return drawn
