# SPDX-License-Identifier: Apache-2.0
"""Wraps: the ways in which methods change a local fit."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.language.plan import Role
from fedplan.language.wording import phrase, stated
from fedplan.models.params import Param
from fedplan.models.values import take
from fedplan.naming import Registry
from fedplan.tensors.devices import brought, device_of
from fedplan.tensors.named import Tensors
from fedplan.tensors.riders import rider
from fedplan.training.fit import Done, Fit, Job, Wrap


def proximal(strength: float) -> Wrap:
    """Pull shared params towards the world: strength/2 times the squared distance (FedProx)."""

    @stated(phrase("proximal", strength))
    def wrap(fit: Fit) -> Fit:
        def proximal_fit(job: Job) -> Done:
            # Hooks run at every step, so that what they need is where the model is.
            shared = [p.key for p, role in job.roles.items() if role is Role.SHARE]
            world = brought({key: job.start[key] for key in shared}, device_of(job.model))

            def pull(param: Param, value: Tensor, gradient: Tensor) -> None:
                if param.key in world:
                    gradient.add_(value - world[param.key], alpha=strength)

            return fit(replace(job, adjust=(*job.adjust, pull)))

        return proximal_fit

    return wrap


def alternate(own_epochs: int = 1) -> Wrap:
    """Train what the client keeps first, then what it shares: FedRep's two phases."""

    @stated(phrase("alternate", own_epochs))
    def wrap(fit: Fit) -> Fit:
        def alternating(job: Job) -> Done:
            resting = {p: _rest(role, Role.SHARE, Role.FREEZE) for p, role in job.roles.items()}
            held = {p: _rest(role, Role.KEEP, Role.HOLD) for p, role in job.roles.items()}
            pace = replace(job.pace, epochs=own_epochs, steps=0)
            fit(replace(job, roles=resting, pace=pace, seed=job.seed + 1))
            return fit(replace(job, roles=held))

        return alternating

    return wrap


def _rest(role: Role, awake: Role, at_rest: Role) -> Role:
    return at_rest if role is awake else role


CONTROL = "control"
"""The rider of SCAFFOLD: an estimate of each shared param's gradient."""


@stated("controlled")
def controlled(fit: Fit) -> Fit:
    """Correct each step by what this client's gradient differs from the federation's: SCAFFOLD.

    The second of the paper's two rules for the client's control; it is meant for plain SGD. Where a
    schedule gives each step a rate of its own, their sum stands for the paper's steps times rate.
    """

    def controlled_fit(job: Job) -> Done:
        shared = [p for p, role in job.roles.items() if role is Role.SHARE]
        world = {p.key: _control(job.riders, p, job.start) for p in shared}
        mine = {p.key: _control(job.memory, p, job.start) for p in shared}
        apart = brought({k: world[k] - mine[k] for k in world}, device_of(job.model))

        def correct(param: Param, value: Tensor, gradient: Tensor) -> None:
            if param.key in apart:
                gradient.add_(apart[param.key])

        done = fit(replace(job, adjust=(*job.adjust, correct)))
        far = done.steps * job.pace.rate if done.distance is None else done.distance
        if not far:  # it took no step, or all at a rate of zero: it has learned nothing of itself
            still = {rider(k, CONTROL): torch.zeros_like(v) for k, v in mine.items()}
            return replace(done, riders=still, memory=job.memory)
        if isnan(far):
            raise FedplanError(
                "SCAFFOLD needs one rate for all params in a step, and this loop's groups have "
                "several: give them one"
            )
        scale = 1 / far
        ends = take(job.model, shared)
        fresh = {k: mine[k] - world[k] + (job.start[k] - ends[k]) * scale for k in ends}
        return replace(
            done,
            riders={rider(k, CONTROL): fresh[k] - mine[k] for k in fresh},
            memory={**job.memory, **{rider(k, CONTROL): fresh[k] for k in fresh}},
        )

    return controlled_fit


def _control(held: Tensors, param: Param, start: Tensors) -> Tensor:
    """A control as it is held; both ends know that it starts at zero."""
    found = held.get(rider(param.key, CONTROL))
    return torch.zeros_like(start[param.key]) if found is None else found


WRAP_NAMES: Registry[Wrap] = Registry("wrap", {"alternate": alternate()})
"""All wraps that a study can name. Those that have settings or riders are a method's to say."""


def wrap_named(name: str) -> Wrap:
    """The wrap of a name, or that which stands at `package.module:attribute`."""
    return WRAP_NAMES.find(name).value
