# SPDX-License-Identifier: Apache-2.0
"""Per example: what each example adds to a private step, at most a bound long.

An example's gradient is that of the loss on its row alone, over all trained params as one vector.
Here the rows are taken one by one, which is right for every model; `ghost` is the faster way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import isfinite
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.language.plan import Roles
from fedplan.models.params import Param, Params
from fedplan.models.quantised import mixes_rows
from fedplan.privacy.errors import PrivacyError
from fedplan.tensors.devices import at_rest, autocast, brought, device_of, forked

_PIECE = 2**14
_HAIR = 1 - 2.0**-20
"""What is clipped ends a hair inside the bound, so that rounding never puts it outside."""
_SLACK = 0.05
_SMALLEST = 1e-300


@dataclass(frozen=True)
class Trained:
    """A tensor of a model that is trained, all of it or some of its `rows`."""

    name: str
    tensor: nn.Parameter
    rows: Params = ()

    def views(self, whole: Tensor) -> dict[str, Tensor]:
        """What is trained of a tensor of this shape, by the keys that `mark` gives the leaves."""
        return {p.key: p.view(whole) for p in self.rows} if self.rows else {self.name: whole}


def trained(model: nn.Module, roles: Roles) -> tuple[Trained, ...]:
    """The tensors that a turn trains."""
    held: dict[str, list[Param]] = {}
    for param in roles:
        held.setdefault(param.name, []).append(param)
    found = list[Trained]()
    for name, tensor in model.named_parameters():
        awake = [param for param in held.get(name, []) if roles[param].trained]
        if awake:
            whole = len(awake) == len(held[name])
            found.append(Trained(name, tensor, () if whole else tuple(awake)))
    return tuple(found)


@dataclass(frozen=True)
class Subject:
    """What gradients are taken of: a model with some tensors trained, and a loss on rows."""

    model: nn.Module
    tensors: tuple[Trained, ...]
    rows: Examples
    loss: Loss
    dtype: torch.dtype | None = None

    @property
    def name(self) -> str:
        """The model as an error names it."""
        return type(self.model).__name__

    def autocast(self) -> AbstractContextManager[Any]:
        """Where forward passes belong, as in any other fit."""
        return autocast(device_of(self.model), self.dtype)

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Some rows, where the model is."""
        return brought(self.rows.batch(indices), device_of(self.model))

    def loss_of(self, indices: Tensor) -> Tensor:
        """The loss on some rows."""
        with self.autocast():
            return self.loss(self.model, self.batch(indices))


class Sum:
    """Clipped gradients of examples, added up, and the length that each had before.

    Lengths and sums are in float64, so that a sum of any order is that of the clipped gradients but
    for a share of 2**-53 of each number in it. A gradient that is not finite adds nothing. What is
    added to the frozen rows of a tensor is nobody's: only the views of `Trained` count.
    """

    def __init__(self, tensors: Iterable[Trained], bound: float) -> None:
        self.bound = bound
        self.totals = {each.name: _zeros(each.tensor) for each in tensors}
        self.lengths = torch.empty(0, dtype=torch.float64)

    @property
    def spoiled(self) -> int:
        """How many gradients were not finite."""
        return int((~self.lengths.isfinite()).sum())

    def scales(self, squares: Tensor) -> Tensor:
        """What gradients of these squared lengths are multiplied by; their lengths are noted."""
        lengths = squares.double().cpu().sqrt()
        self.lengths = torch.cat([self.lengths, lengths])
        clipped = self.bound * _HAIR / lengths.clamp(min=_SMALLEST)
        scales = torch.where(lengths <= self.bound * _HAIR, 1.0, clipped)
        return torch.where(lengths.isfinite(), scales, 0.0)


def one_by_one(subject: Subject, indices: Tensor, into: Sum) -> None:
    """Add what each of some rows contributes, one backward pass each."""
    leaves = [each.tensor for each in subject.tensors]
    for index in cast("tuple[Tensor, ...]", indices.split(1)):
        loss = subject.loss_of(index)
        pairs = zip(subject.tensors, slopes(loss, leaves), strict=True)
        gradients = {each: gradient for each, gradient in pairs if gradient is not None}
        views = [v for each, whole in gradients.items() for v in each.views(whole).values()]
        squares = torch.stack([torch.zeros((), dtype=torch.float64), *map(square, views)]).sum()
        scale = float(into.scales(squares[None]))
        for each, gradient in gradients.items() if scale else ():
            into.totals[each.name].add_(gradient, alpha=scale)


def slopes(
    loss: Tensor, of: Sequence[Tensor], times: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    """The gradient of a loss in each of some tensors, None in one that it does not depend on."""
    if not loss.requires_grad:
        return (None,) * len(of)
    return torch.autograd.grad(loss, of, times, allow_unused=True)


def square(tensor: Tensor) -> Tensor:
    """The squared length of a tensor, in float64: of pieces, whose scratch stays in a cache."""
    flat = tensor.detach().reshape(-1)
    pieces = (piece.double() for piece in cast("tuple[Tensor, ...]", flat.split(_PIECE)))
    return torch.stack([torch.dot(piece, piece) for piece in pieces]).sum().cpu()


def require_apart(subject: Subject) -> None:
    """Refuse what mixes the examples of a batch: then no example has a gradient of its own.

    The loss on rows together must be their mean, weighted or not, or their sum. Those tried are of
    one length: a server's values must not decide by what fills a row up whether there is an answer.
    """
    _require_no_statistics(subject)
    rows = alike(subject.rows)
    if not len(rows):
        return
    _require_no_memory(subject, rows)
    with at_rest(subject.model), torch.no_grad():
        alone = [subject.loss_of(row).item() for row in cast("tuple[Tensor, ...]", rows.split(1))]
        together, twice = subject.loss_of(rows).item(), subject.loss_of(rows[[0, 0]]).item()
    if not all(map(isfinite, (*alone, together, twice))):
        return
    if not (_mixes_not(alone, together) and _mixes_not([alone[0]] * 2, twice)):
        raise PrivacyError(
            f"the loss of {subject.name} on several examples is neither a mean nor the sum of "
            "their own: each is compared with the others, as contrastive losses do, so no example "
            "has a gradient of its own to clip. Take a loss of single examples, such as image-text "
            "against the classes, or privacy at the level of clients"
        )


def _require_no_statistics(subject: Subject) -> None:
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    modules: dict[str, nn.Module] = dict(subject.model.named_modules())
    for name, module in modules.items():
        if isinstance(module, batch_norms) and module.training:
            raise PrivacyError(
                f"{name} of {subject.name} is a {type(module).__name__}: it takes the mean of a "
                "batch, so that examples change each other's gradients. Put GroupNorm or LayerNorm "
                "in its place, or take privacy at the level of clients"
            )
        if mixes_rows(module):
            raise PrivacyError(
                f"{name} of {subject.name} is packed in int8, and takes the columns apart in which "
                "any example of a batch has a large number, so that examples change each other's "
                "gradients. Pack it in nf4, or take privacy at the level of clients"
            )


def alike(rows: Examples) -> Tensor:
    """Up to three rows of one length, that of most."""
    some = torch.arange(min(1000, len(rows)))
    if not len(some) or "attention_mask" not in rows.batch(some[:1]):
        return some[:3]
    lengths = rows.batch(some)["attention_mask"].flatten(1).sum(1)
    return some[lengths == lengths.mode().values][:3]


def telling(rows: Examples) -> Tensor:
    """Up to three rows to try things on: of texts, the shortest and the longest among them."""
    some = torch.arange(min(1000, len(rows)))
    if not len(some) or "attention_mask" not in rows.batch(some[:1]):
        return some[:3]
    order = rows.batch(some)["attention_mask"].flatten(1).sum(1).argsort(stable=True)
    return order[[0, -1, len(order) // 2]] if len(order) > 2 else order


def _require_no_memory(subject: Subject, rows: Tensor) -> None:
    """Refuse a model that writes something of its rows into a buffer while it trains."""
    held = {name: buffer.clone() for name, buffer in subject.model.named_buffers()}
    with forked(device_of(subject.model)), torch.no_grad():
        subject.loss_of(rows)
    for name, buffer in subject.model.named_buffers():
        was = held.get(name)
        if was is None or was.shape != buffer.shape or not torch.equal(was, buffer):
            raise PrivacyError(
                f"{name} of {subject.name} changes while it trains: it remembers rows, so that "
                "they change the gradients of those after them. Take privacy at the level of "
                "clients, or a model without such a memory"
            )


def _mixes_not(alone: list[float], together: float) -> bool:
    slack = _SLACK * max(map(abs, alone)) + 1e-4
    mean = min(alone) - slack <= together <= max(alone) + slack
    return mean or abs(sum(alone) - together) <= slack * len(alone)


def _zeros(tensor: Tensor) -> Tensor:
    """Room for a sum."""
    return torch.zeros_like(tensor, dtype=torch.float64)
