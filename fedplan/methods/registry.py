# SPDX-License-Identifier: Apache-2.0
"""Methods and server optimizers by name."""

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
from fedplan.methods.server_optimizer import ServerOptimizer, adagrad, adam, mean, momentum, yogi
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
"""The built-in methods by name: functions of their settings."""

METHOD_REGISTRY: Registry[Callable[..., Method]] = Registry("method", METHODS)
"""All methods that a study can name: built-in, registered, and of installed packages."""

SERVER_OPTIMIZER_REGISTRY: Registry[Callable[..., ServerOptimizer]] = Registry(
    "server optimizer",
    {"mean": mean, "momentum": momentum, "adam": adam, "yogi": yogi, "adagrad": adagrad},
)
"""All server optimizers that a study can name: functions of their settings."""


def method_by_name(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Return a new method by name, or by `package.module:function`.

    `settings`: arguments of the method's function; None for defaults. Raises FedplanError if the
    name is unknown, a setting is wrong, or the function returns no Method.
    """
    method = METHOD_REGISTRY.make(name, settings)
    if not isinstance(method, Method):
        raise FedplanError(f"{name} returns {_type_name(method)}, not a Method")
    return method


def register_method(name: str, make: Callable[..., Method]) -> None:
    """Register a method under a name for studies; lasts until this process ends."""
    METHOD_REGISTRY.register(name, make)


def make_server_optimizer(name: str, settings: Mapping[str, Any] | None = None) -> ServerOptimizer:
    """Return a new server optimizer by name, or by `package.module:function`.

    `settings`: arguments of the optimizer's function; None for defaults. Raises FedplanError if the
    name is unknown, a setting is wrong, or the result is not callable.
    """
    optimizer: Any = SERVER_OPTIMIZER_REGISTRY.make(name, settings)
    if not callable(cast("object", optimizer)):
        raise FedplanError(f"{name} returns {_type_name(optimizer)}, not a server optimizer")
    return optimizer


def _type_name(value: object) -> str:
    return f"a value of {type(value).__name__}"


def list_methods() -> list[list[str]]:
    """Return one list of text lines for each registered method: name and origin, summary, plan.

    A method that cannot be made has the error instead of summary and plan.
    """
    methods = list[list[str]]()
    for name, origin in METHOD_REGISTRY.origins().items():
        try:
            doc = getdoc(METHOD_REGISTRY.find(name).value) or ""
            lines = [*doc.splitlines()[:1], method_by_name(name).plan.text]
        except FedplanError as error:
            lines = [str(error)]
        methods.append([f"{name}, of {origin}", *(f"    {line}" for line in lines)])
    return methods
