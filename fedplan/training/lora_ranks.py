# SPDX-License-Identifier: Apache-2.0
"""LoRA training at a client's own rank, below the rank of the tensors that all clients send."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.models.lora_layers import LoraLayer, lora_layers
from fedplan.models.params import Param
from fedplan.models.values import get_values, set_values
from fedplan.tensors.devices import model_device, to_device
from fedplan.training.fit import ClientHook, Fit, FitResult, Job


def train_at_client_rank(trait: str = "rank") -> ClientHook:
    """Return a client hook that trains LoRA at the rank given by a client's trait.

    Rows of A and columns of B beyond the rank are set to zero before training; their gradients are
    zeroed after all other hooks, and they are sent as zeros, which the server can see. A client
    without the trait trains the full rank. The fit raises FedplanError if the trait is no rank of
    the layer, or if the optimizer changed a zeroed value.
    """

    @with_text(format_call("narrowed", trait))
    def hook(fit: Fit) -> Fit:
        def fit_at_rank(job: Job) -> FitResult:
            if trait not in job.traits:
                return fit(job)
            layers = [e for e in lora_layers(tuple(job.roles)) if job.roles[e.a].is_trained]
            ranks = {layer: _read_rank(job.traits[trait], trait, layer.rank) for layer in layers}
            masks = {k: m for layer, rank in ranks.items() for k, m in _masks(layer, rank).items()}
            # Gradient hooks run at every step, so the masks are moved to the device once.
            on_device = to_device(masks, model_device(job.model))
            for layer, rank in ranks.items():
                set_values(job.model, _masked_values(job, layer, rank), layer.factors)
            start = {k: v * masks[k].to(v) if k in masks else v for k, v in job.start.items()}

            def mask_gradient(param: Param, value: Tensor, gradient: Tensor) -> None:
                if param.key in on_device:
                    gradient.mul_(on_device[param.key])

            gradient_hooks = (*job.gradient_hooks, mask_gradient)
            result = fit(replace(job, start=start, gradient_hooks=gradient_hooks))
            for layer, rank in ranks.items():
                _require_rank(job, layer, rank)
            return result

        return fit_at_rank

    return hook


def _read_rank(text: str, trait: str, max_rank: int) -> int:
    """Return a trait's rank; raise FedplanError unless it is a whole number from 1 to max_rank."""
    if not text.isdecimal() or not 1 <= int(text) <= max_rank:
        raise FedplanError(
            f"the trait {trait!r} is {text!r}: give a rank from 1 to {max_rank}, as in "
            "clients.traits"
        )
    return int(text)


def _masked_values(job: Job, layer: LoraLayer, rank: int) -> dict[str, Tensor]:
    """Return the values of a layer's A and B with zeros beyond a rank."""
    values, masks = get_values(job.model, layer.factors), _masks(layer, rank)
    return {key: value * masks[key].to(value) for key, value in values.items()}


def _masks(layer: LoraLayer, rank: int) -> dict[str, Tensor]:
    """Return boolean masks of a layer's params: rows of A and columns of B within a rank."""
    within = torch.arange(layer.rank) < rank
    return {layer.a.key: within[:, None], **{b.key: within for b in layer.bs}}


def _require_rank(job: Job, layer: LoraLayer, rank: int) -> None:
    """Raise FedplanError if a layer's A or B has values other than zero beyond a rank."""
    values = get_values(job.model, layer.factors)
    for key, masked in _masked_values(job, layer, rank).items():
        if not torch.equal(values[key], masked):
            raise FedplanError(
                f"{key} was trained beyond rank {rank}: this optimizer changes values without "
                "gradient; use adamw or sgd"
            )
