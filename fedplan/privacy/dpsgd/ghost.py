# SPDX-License-Identifier: Apache-2.0
"""Ghost: the contributions of many examples by one forward and one backward pass.

The model runs on the whole batch, and each layer with trained tensors is heard: its inputs and the
slopes of its outputs are the factors of every example's gradient. This is right where no example
changes the outputs of another; `distrust` tries it out.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from fedplan.privacy.dpsgd.factors import Factor, Unfactored, bounds, joined
from fedplan.privacy.dpsgd.hooks import heard
from fedplan.privacy.dpsgd.per_example import (
    Subject,
    Sum,
    Trained,
    one_by_one,
    slopes,
    square,
    telling,
)
from fedplan.privacy.dpsgd.row_losses import losses
from fedplan.tensors.devices import at_rest, device_of, forked

_BOUND = 1e-6
_AGREES = 1e-4


def ghost(subject: Subject, indices: Tensor, into: Sum) -> None:
    """Add what each of some rows contributes, all of them at once.

    What is added of a row is, in exact numbers, at most the bound long: `factors` says why. That is
    so whatever the model, its dtype or autocast made of the factors, since length and sum are of
    the same ones. What stands beside a row may change the last bits of its factors, never that.
    """
    factors = factored(subject, indices)
    total = torch.zeros(len(indices), dtype=torch.float64)
    for several in factors.values():
        total += bounds(several)
    scales = into.scales(total)
    finite = total.isfinite()
    for name, several in factors.items():
        room = into.totals[name]
        for factor in several:
            # What is not finite stays so when it is multiplied by zero.
            kept = factor if finite.all() else factor.only(finite.to(room.device))
            kept.add(room, scales[finite].to(room))


def factored(subject: Subject, indices: Tensor) -> dict[str, tuple[Factor, ...]]:
    """The gradients of some rows, by the names of the tensors."""
    count = len(indices)
    with heard(subject, count) as calls:
        loss = losses(subject, subject.batch(indices), count).sum()
    known = {each.name for call in calls for each in call.own.values()}
    unheard = [each for each in subject.tensors if each.name not in known]
    asked = [call.output for call in calls] + [each.tensor for each in unheard]
    found = slopes(loss, asked)
    for each, slope in zip(unheard, found[len(calls) :], strict=True):
        if slope is not None:
            raise Unfactored(f"{each.name} is used outside of its own layer")
    factors: dict[str, list[Factor]] = {}
    for call, slope in zip(calls, found, strict=False):
        for name, factor in call.factors(slope, subject) if slope is not None else ():
            factors.setdefault(name, []).append(factor)
    return {name: joined(several) for name, several in factors.items()}


def distrust(subject: Subject) -> str:
    """Why rows must be taken one by one, or nothing: both ways are tried on two and three rows.

    Tensors of nothing but zeros, such as fresh adapters, would hide others from the trial, and are
    filled meanwhile. Whatever goes wrong in the faster way is a reason for the other.
    """
    if not len(subject.rows):
        return "there are no rows to try"
    if any(getattr(module, "gradient_checkpointing", False) for module in subject.model.modules()):
        return "gradient checkpointing runs layers twice"
    if any(getattr(module, "layerdrop", 0) for module in subject.model.modules()):
        return "whole layers are left out by chance, for all rows of a batch at once"
    found, subject = telling(subject.rows), replace(subject, dtype=None)
    rows = found[torch.arange(3) % len(found)]
    with at_rest(subject.model), _in_steps(), _filled(subject.tensors):
        right = Sum(subject.tensors, _BOUND)
        one_by_one(subject, rows[:1], right)
        for count in (2, 3):
            one_by_one(subject, rows[count - 1 : count], right)
            tried = Sum(subject.tensors, _BOUND)
            try:
                ghost(subject, rows[:count], tried)
            except Exception as error:
                return str(error) or type(error).__name__
            if wrong := _apart(subject.tensors, right, tried):
                return f"the gradient of {wrong} is another when rows run together"
    seen = right.lengths.isfinite() & (right.lengths > 0)
    if seen.sum() < 2:
        return "too few rows have a gradient to try"
    return "" if _alone_among_others(subject, rows) else "a row's loss is another beside others"


def _alone_among_others(subject: Subject, rows: Tensor) -> bool:
    """Whether the first row's loss, as the model trains, is the same whatever stands beside it."""
    found = list[Tensor]()
    for beside in ([0, 1, 2, 2], [0, 1, 2, 1]):
        with forked(device_of(subject.model), seed=0), torch.no_grad():
            found.append(losses(subject, subject.batch(rows[beside]), len(beside))[0])
    return torch.allclose(found[0], found[1], rtol=1e-5, atol=1e-7, equal_nan=True)


def _apart(tensors: tuple[Trained, ...], one: Sum, other: Sum) -> str:
    """The tensor in which two sums differ, if any does."""
    if not torch.allclose(one.lengths, other.lengths, rtol=_AGREES, atol=0, equal_nan=True):
        return "an example"
    for each in tensors:
        was, now = each.views(one.totals[each.name]), each.views(other.totals[each.name])
        for key, values in was.items():
            far, length = square(values - now[key]).sqrt(), square(values).sqrt()
            if not far <= _AGREES * length + 1e-5 * one.bound:
                return each.name
    return ""


@contextmanager
def _in_steps() -> Generator[None]:
    """Layers of torch as when they train: at rest they take a way that has no gradients."""
    was = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was)


@contextmanager
def _filled(tensors: tuple[Trained, ...]) -> Generator[None]:
    """Tensors of zeros filled with small numbers, and zeros again in the end."""
    empty = [each.tensor for each in tensors if not each.tensor.any()]
    try:
        with torch.no_grad():
            for tensor in empty:
                places = torch.arange(1, tensor.numel() + 1, device=tensor.device)
                tensor.copy_((places.sin() * 0.01).view(tensor.shape))
        yield
    finally:
        with torch.no_grad():
            for tensor in empty:
                tensor.zero_()
