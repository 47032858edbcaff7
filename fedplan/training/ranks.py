# SPDX-License-Identifier: Apache-2.0
"""Ranks: LoRA trained at a client's own rank, within the rank that all send."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.wording import phrase, stated
from fedplan.models.low_rank import LowRank, layers_of
from fedplan.models.params import Param
from fedplan.models.values import put, take
from fedplan.tensors.devices import brought, device_of
from fedplan.training.fit import Done, Fit, Job, Wrap


def narrowed(trait: str = "rank") -> Wrap:
    """Train LoRA at the rank that a client's trait says, within the rank that all send.

    Rows of the input side and columns of the output side beyond it are zero from the start of the
    turn. Their gradients are zero too, whatever another wrap adds, and they are sent as zeros. A
    client without the trait trains all. The server sees the zeros; the ledger, which holds digests,
    does not show them.
    """

    @stated(phrase("narrowed", trait))
    def wrap(fit: Fit) -> Fit:
        def narrowed_fit(job: Job) -> Done:
            if trait not in job.traits:
                return fit(job)
            layers = [e for e in layers_of(tuple(job.roles)) if job.roles[e.a].trained]
            ranks = {layer: _rank(job.traits[trait], trait, layer.rank) for layer in layers}
            masks = {k: m for each, rank in ranks.items() for k, m in _masks(each, rank).items()}
            # Each step asks for them where the model is: they are moved once.
            there = brought(masks, device_of(job.model))
            for layer, rank in ranks.items():
                put(job.model, _cut(job, layer, rank), layer.sides)
            start = {k: v * masks[k].to(v) if k in masks else v for k, v in job.start.items()}

            def within(param: Param, value: Tensor, gradient: Tensor) -> None:
                if param.key in there:
                    gradient.mul_(there[param.key])

            done = fit(replace(job, start=start, adjust=(*job.adjust, within)))
            for layer, rank in ranks.items():
                _require_narrow(job, layer, rank)
            return done

        return narrowed_fit

    return wrap


def _rank(said: str, trait: str, most: int) -> int:
    if not said.isdecimal() or not 1 <= int(said) <= most:
        raise FedplanError(
            f"the trait {trait!r} is {said!r}: give a rank from 1 to {most}, as in clients.traits"
        )
    return int(said)


def _cut(job: Job, layer: LowRank, rank: int) -> dict[str, Tensor]:
    """Both sides, with nothing beyond a rank."""
    values, masks = take(job.model, layer.sides), _masks(layer, rank)
    return {key: value * masks[key].to(value) for key, value in values.items()}


def _masks(layer: LowRank, rank: int) -> dict[str, Tensor]:
    """Which rows of the input side, and columns of the output side, are within a rank."""
    keeps = torch.arange(layer.rank) < rank
    return {layer.a.key: keeps[:, None], **{b.key: keeps for b in layer.bs}}


def _require_narrow(job: Job, layer: LowRank, rank: int) -> None:
    values = take(job.model, layer.sides)
    for key, cut in _cut(job, layer, rank).items():
        if not torch.equal(values[key], cut):
            raise FedplanError(
                f"{key} was trained beyond rank {rank}: this optimiser moves what has no gradient; "
                "take adamw or sgd"
            )
