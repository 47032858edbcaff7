# SPDX-License-Identifier: Apache-2.0
"""LoRA training at a client's own rank, below the rank of the tensors that all clients send."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.models.lora_layers import lora_layers
from fedplan.models.params import Param
from fedplan.models.values import get_values, set_values
from fedplan.tensors.devices import model_device, to_device
from fedplan.tensors.named import Tensors
from fedplan.training.fit import ClientHook, Fit, FitResult, Job


def train_at_client_rank(trait: str = "rank") -> ClientHook:
    """Return a client hook that trains LoRA at the rank given by a client's trait (`job.traits`).

    Rows of A and columns of B beyond the rank are set to zero in the model before training, and a
    gradient hook zeroes their gradients, so the client sends zeros, by which the server can see the
    rank. Put this hook after other client hooks that add gradient hooks. A client without the trait
    trains the full rank. The fit raises FedplanError if the trait is no whole number from 1 to the
    rank of each trained layer, or if a zeroed value was changed.
    """

    @with_text(format_call("narrowed", trait))
    def hook(fit: Fit) -> Fit:
        def fit_at_rank(job: Job) -> FitResult:
            if trait not in job.traits:
                return fit(job)
            layers = [e for e in lora_layers(tuple(job.roles)) if job.roles[e.a].is_trained]
            text, masks = job.traits[trait], dict[str, Tensor]()
            for layer in layers:
                if not text.isdecimal() or not 1 <= int(text) <= layer.rank:
                    raise FedplanError(
                        f"the trait {trait!r} is {text!r}: give a rank from 1 to {layer.rank}, as "
                        "in clients.traits"
                    )
                within = torch.arange(layer.rank) < int(text)
                masks |= {layer.a.key: within[:, None], **{b.key: within for b in layer.bs}}
            # Gradient hooks run at every step, so the masks are moved to the device once.
            on_device = to_device(masks, model_device(job.model))
            factors = [param for layer in layers for param in layer.factors]

            def masked(values: Tensors) -> dict[str, Tensor]:
                return {k: v * masks[k].to(v) if k in masks else v for k, v in values.items()}

            set_values(job.model, masked(get_values(job.model, factors)), factors)

            def mask_gradient(param: Param, value: Tensor, gradient: Tensor) -> None:
                if param.key in on_device:
                    gradient.mul_(on_device[param.key])

            gradient_hooks = (*job.gradient_hooks, mask_gradient)
            result = fit(replace(job, start=masked(job.start), gradient_hooks=gradient_hooks))
            trained = get_values(job.model, factors)
            for key, value in masked(trained).items():
                if not torch.equal(trained[key], value):
                    raise FedplanError(
                        f"{key} was trained beyond rank {int(text)}: this optimizer changes values "
                        "without gradient; use adamw or sgd"
                    )
            return result

        return fit_at_rank

    return hook
