# SPDX-License-Identifier: Apache-2.0
"""Client hooks: changes of local training by methods such as FedProx, SCAFFOLD and Ditto."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isnan

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.canonical import format_call, with_text
from fedplan.language.plan import Role
from fedplan.models.params import Param
from fedplan.models.values import get_values, set_values
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


FIRST = "first"
"""Kind of a client's memory: the value with which a KEEP param begins every turn."""


@with_text("begin_afresh")
def begin_afresh(fit: Fit) -> Fit:
    """Wrap a fit so that KEEP params begin every turn with the values of the client's first turn.

    So the client's personal values are those of its last turn alone. The first values stay in the
    client's memory, which takes as much space again.
    """

    def fresh_fit(job: Job) -> FitResult:
        kept = [p for p, role in job.roles.items() if role is Role.KEEP]
        first = {p.key: job.memory.get(aux_name(p.key, FIRST), job.start[p.key]) for p in kept}
        set_values(job.model, first, kept)
        result = fit(job)
        stored = {aux_name(key, FIRST): value for key, value in first.items()}
        return replace(result, memory={**result.memory, **stored})

    return fresh_fit


@with_text("keep_optimizer")
def keep_optimizer(fit: Fit) -> Fit:
    """Wrap the built-in fit so that the optimizer continues with its state of the last turn.

    The state (AdamW: both moments and the number of steps) stays in the client's memory and is
    never sent. A tensor that is trained for the first time, or in other rows than before, begins
    without state. Only `plain_fit` does so, so a method has no other hook and no loop beside it.
    """

    def continued_fit(job: Job) -> FitResult:
        return fit(replace(job, keep_optimizer=True))

    return continued_fit


CONTROL = "control"
"""Kind of SCAFFOLD's auxiliary tensors: an estimate of each shared param's gradient."""
LINEAR = "linear"
"""Kind of a client's memory for FedDyn: the linear term of each shared param."""
COPY = "copy"
"""Kind of a client's memory: its own copy of a shared param, which its personal model has."""


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

        global_control, control = (
            _stored_values(aux, CONTROL, job.start, shared) for aux in (job.aux, job.memory)
        )
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
                "SCAFFOLD needs one learning rate for all params in a step, and there are several: "
                "leave lr_by_part out; give the param groups of your own loop one rate"
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


def dynamic(alpha: float) -> ClientHook:
    """Return FedDyn's hook: a proximal term of weight `alpha`, and a linear term by each client.

    Adds alpha * (value - start) - d to the gradient of each SHARE param. d estimates the gradient
    of the client's own loss; it is zero at first, stays in the client's memory and is never sent.
    """

    @with_text(format_call("dynamic", alpha))
    def hook(fit: Fit) -> Fit:
        pulled = proximal(alpha)(fit)

        def dynamic_fit(job: Job) -> FitResult:
            shared = [p for p, role in job.roles.items() if role is Role.SHARE]
            linear = _stored_values(job.memory, LINEAR, job.start, shared)
            on_device = to_device(linear, model_device(job.model))

            def add_linear_gradient(param: Param, value: Tensor, gradient: Tensor) -> None:
                if param.key in on_device:
                    gradient.sub_(on_device[param.key])

            hooks = (*job.gradient_hooks, add_linear_gradient)
            result = pulled(replace(job, gradient_hooks=hooks))
            updated = {
                aux_name(k, LINEAR): linear[k] - alpha * (v - job.start[k])
                for k, v in get_values(job.model, shared).items()
            }
            return replace(result, memory={**result.memory, **updated})

        return dynamic_fit

    return hook


def train_own_copy(lam: float) -> ClientHook:
    """Return Ditto's hook: after the local training, train the client's own copy of SHARE params.

    The copy starts from the global values in the client's first turn, and later from the client's
    memory, where it stays. It is trained by the job's settings at seed + 1, with lam/2 times the
    squared distance to the global values as a loss term, and with KEEP params held. A param that is
    frozen by now has the copy's value meanwhile. The update is that of the first training.
    """

    @with_text(format_call("train_own_copy", lam))
    def hook(fit: Fit) -> Fit:
        pulled = proximal(lam)(fit)

        def fit_both(job: Job) -> FitResult:
            result = fit(job)
            copied = [
                p
                for p, role in job.roles.items()
                if role is Role.SHARE
                or (role is Role.FREEZE and aux_name(p.key, COPY) in job.memory)
            ]
            trained = get_values(job.model, copied)
            copies = {k: job.memory.get(aux_name(k, COPY), job.start[k]) for k in trained}
            set_values(job.model, copies, copied)
            roles = {p: Role.HOLD if r is Role.KEEP else r for p, r in job.roles.items()}
            pulled(replace(job, roles=roles, seed=job.seed + 1, gradient_hooks=()))
            own = {aux_name(k, COPY): v for k, v in get_values(job.model, copied).items()}
            set_values(job.model, trained, copied)
            return replace(result, memory={**result.memory, **own})

        return fit_both

    return hook


def normalize_steps(steps: int) -> ClientHook:
    """Return FedNova's hook: scale the change of SHARE params to that of `steps` local steps.

    The change of a client that took n steps is multiplied by steps / n, so that clients with more
    steps do not weigh more than by their examples.
    """

    @with_text(format_call("normalize_steps", steps))
    def hook(fit: Fit) -> Fit:
        def normalized_fit(job: Job) -> FitResult:
            result = fit(job)
            if result.steps:
                shared = [p for p, role in job.roles.items() if role is Role.SHARE]
                scale, trained = steps / result.steps, get_values(job.model, shared)
                scaled = {k: torch.lerp(job.start[k], v, scale) for k, v in trained.items()}
                set_values(job.model, scaled, shared)
            return result

        return normalized_fit

    return hook


def _stored_values(
    aux: Tensors, kind: str, start: Tensors, params: Iterable[Param]
) -> dict[str, Tensor]:
    """Return the auxiliary tensors of a kind by the keys of `params`; zeros for missing ones."""
    stored = {p.key: aux.get(aux_name(p.key, kind)) for p in params}
    return {k: torch.zeros_like(start[k]) if v is None else v for k, v in stored.items()}


CLIENT_HOOK_NAMES: Registry[ClientHook] = Registry(
    "client hook",
    {"alternate": alternate(), "begin_afresh": begin_afresh, "keep_optimizer": keep_optimizer},
)
"""All client hooks that a study can name; hooks with settings need a method."""


def get_client_hook(name: str) -> ClientHook:
    """Return the client hook of a name, or at `package.module:attribute`.

    Raises UnknownName if there is none.
    """
    return CLIENT_HOOK_NAMES.find(name).value
