# SPDX-License-Identifier: Apache-2.0
"""Client hooks: changes of local training by methods such as FedProx, FedRep and SCAFFOLD."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.language.plan import Role
from fedplan.models.params import Param
from fedplan.models.values import get_values
from fedplan.naming import Registry
from fedplan.tensors.devices import model_device, to_device
from fedplan.tensors.named import Tensors, aux_name
from fedplan.training.fit import ClientHook, Fit, FitResult, Job


def proximal(mu: float) -> ClientHook:
    """Return FedProx's hook: a loss term of mu/2 times the squared distance to the global model.

    The term is for SHARE params only, added as mu * (value - start) to the gradient; the reported
    loss does not include the term.
    """

    @with_text(format_call("proximal", mu))
    def hook(fit: Fit) -> Fit:
        def proximal_fit(job: Job) -> FitResult:
            # Gradient hooks run at every step, so their tensors are moved to the device once.
            shared = [p.key for p, role in job.roles.items() if role is Role.SHARE]
            global_values = to_device({k: job.start[k] for k in shared}, model_device(job.model))

            def add_proximal_gradient(param: Param, value: Tensor, gradient: Tensor) -> None:
                if param.key in global_values:
                    gradient.add_(value - global_values[param.key], alpha=mu)

            return fit(replace(job, gradient_hooks=(*job.gradient_hooks, add_proximal_gradient)))

        return proximal_fit

    return hook


def alternate(personal_epochs: int = 1) -> ClientHook:
    """Return FedRep's hook: train the KEEP params first, then the SHARE params.

    Fits twice: for `personal_epochs` epochs with the SHARE params frozen, at the job's seed + 1;
    then by the job's settings with the KEEP params held. Returns the result of the second fit.
    """

    @with_text(format_call("alternate", personal_epochs))
    def hook(fit: Fit) -> Fit:
        def alternating_fit(job: Job) -> FitResult:
            personal, shared = (
                {param: new if role is old else role for param, role in job.roles.items()}
                for old, new in ((Role.SHARE, Role.FREEZE), (Role.KEEP, Role.HOLD))
            )
            config = replace(job.train_arguments, epochs=personal_epochs, steps=0)
            fit(replace(job, roles=personal, train_arguments=config, seed=job.seed + 1))
            return fit(replace(job, roles=shared))

        return alternating_fit

    return hook


CONTROL = "control"
"""Kind of SCAFFOLD's auxiliary tensors: an estimate of each shared param's gradient."""


@with_text("controlled")
def control_variates(fit: Fit) -> Fit:
    """Wrap a fit with SCAFFOLD's correction: add c - c_i to the gradient of each SHARE param.

    c (`job.aux`) is the federation's control variate, c_i (`job.memory`) the client's; zeros if
    missing. c_i is updated by option II of the paper, which assumes plain SGD; with a learning rate
    schedule the sum of the rates takes the place of steps times rate. The result's `aux` has the
    change of c_i, and `memory` the new c_i. The fit raises FedplanError if a step had several
    learning rates.
    """

    def controlled_fit(job: Job) -> FitResult:
        shared = [p for p, role in job.roles.items() if role is Role.SHARE]

        def controls(aux: Tensors) -> dict[str, Tensor]:
            stored = {p.key: aux.get(aux_name(p.key, CONTROL)) for p in shared}
            return {
                k: torch.zeros_like(job.start[k]) if v is None else v for k, v in stored.items()
            }

        global_control, control = controls(job.aux), controls(job.memory)
        correction = {key: global_control[key] - control[key] for key in global_control}
        on_device = to_device(correction, model_device(job.model))

        def correct(param: Param, value: Tensor, gradient: Tensor) -> None:
            if param.key in on_device:
                gradient.add_(on_device[param.key])

        result = fit(replace(job, gradient_hooks=(*job.gradient_hooks, correct)))
        lr_sum = result.steps * job.train_arguments.lr if result.lr_sum is None else result.lr_sum
        if not lr_sum:  # no step, or all at a learning rate of zero
            unchanged = {aux_name(k, CONTROL): torch.zeros_like(v) for k, v in control.items()}
            return replace(result, aux=unchanged, memory=job.memory)
        if isnan(lr_sum):
            raise FedplanError(
                "SCAFFOLD needs one learning rate for all params in a step, and this loop's "
                "param groups have several: give them one"
            )
        scale, trained = 1 / lr_sum, get_values(job.model, shared)
        updated = {
            k: control[k] - global_control[k] + (job.start[k] - trained[k]) * scale for k in trained
        }
        return replace(
            result,
            aux={aux_name(k, CONTROL): updated[k] - control[k] for k in updated},
            memory={**job.memory, **{aux_name(k, CONTROL): updated[k] for k in updated}},
        )

    return controlled_fit


CLIENT_HOOK_NAMES: Registry[ClientHook] = Registry("client hook", {"alternate": alternate()})
"""All client hooks that a study can name; hooks with settings need a method."""


def get_client_hook(name: str) -> ClientHook:
    """Return the client hook of a name, or at `package.module:attribute`.

    Raises UnknownName if there is none.
    """
    return CLIENT_HOOK_NAMES.find(name).value
