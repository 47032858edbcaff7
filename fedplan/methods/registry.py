# SPDX-License-Identifier: Apache-2.0
"""The registry: published methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import getdoc
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.methods.adapters import fedex_lora, fedit, fedsa_lora, ffa_lora, flexlora
from fedplan.methods.compositions import fedper_safl, pfeddc_held, safl_frozen, safl_lora
from fedplan.methods.frozen import fedfrozen
from fedplan.methods.full import fedadam, fedavg, fedavgm, fedprox, fedyogi, local_only, scaffold
from fedplan.methods.layers import bitfit, fedpart, head_only, safl
from fedplan.methods.method import Method
from fedplan.methods.personal import fedbabu, fedbn, fedper, fedrep, lg_fedavg
from fedplan.methods.prompts import local_prompts, pfeddc, promptfl
from fedplan.methods.server_optimiser import (
    ServerOptimiser,
    adagrad,
    adam,
    mean,
    momentum,
    yogi,
)
from fedplan.naming import Registry

METHODS: dict[str, Callable[..., Method]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        *(fedavg, fedprox, scaffold, fedavgm, fedadam, fedyogi, local_only),
        *(fedper, fedrep, lg_fedavg, fedbabu, fedbn),
        fedfrozen,
        *(safl, bitfit, fedpart, head_only),
        *(fedit, ffa_lora, fedsa_lora, flexlora, fedex_lora),
        *(pfeddc, promptfl, local_prompts),
        *(safl_frozen, pfeddc_held, fedper_safl, safl_lora),
    )
}

"""The methods that everybody has."""
METHOD_NAMES: Registry[Callable[..., Method]] = Registry("method", METHODS)
"""All methods that a study can name: each is a function of its settings."""
SERVER_OPTIMISER_NAMES: Registry[Callable[..., ServerOptimiser]] = Registry(
    "server optimiser",
    {"mean": mean, "momentum": momentum, "adam": adam, "yogi": yogi, "adagrad": adagrad},
)
"""All server optimisers that a study can name: each is made by a function of its settings."""


def method_named(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method by its name, or where it stands (`package.module:function`), with its settings."""
    made = METHOD_NAMES.make(name, settings)
    if not isinstance(made, Method):
        raise FedplanError(f"{name} makes {_kind_of(made)}, and no Method: it is no method")
    return made


def register_method(name: str, make: Callable[..., Method]) -> None:
    """Let a study name a method of your own, in this process alone."""
    METHOD_NAMES.register(name, make)


def server_optimiser_named(name: str, settings: Mapping[str, Any] | None = None) -> ServerOptimiser:
    """A server optimiser by the name of what makes it, with its settings."""
    made: Any = SERVER_OPTIMISER_NAMES.make(name, settings)
    if not callable(cast("object", made)):
        raise FedplanError(f"{name} makes {_kind_of(made)}, and no server optimiser")
    return made


def _kind_of(value: object) -> str:
    return f"a value of {type(value).__name__}"


def list_methods() -> list[list[str]]:
    """Every method in lines: its name and whose it is, what it is, and its plan."""
    return [[f"{name}, of {of}", *_told(name)] for name, of in METHOD_NAMES.names().items()]


def _told(name: str) -> list[str]:
    """What a method says first of itself, and its plan; one that cannot be had says why."""
    try:
        doc = getdoc(METHOD_NAMES.find(name).value) or ""
        return [f"    {line}" for line in (*doc.splitlines()[:1], method_named(name).plan.text)]
    except FedplanError as error:
        return [f"    {error}"]
