# SPDX-License-Identifier: Apache-2.0
"""The registry: published methods by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from inspect import signature
from typing import Any

from fedplan.errors import FedplanError
from fedplan.methods.adapters import fedex_lora, fedit, fedsa_lora, ffa_lora, flexlora
from fedplan.methods.compositions import fedper_safl, pfeddc_held, safl_frozen, safl_lora
from fedplan.methods.frozen import fedfrozen
from fedplan.methods.full import fedadam, fedavg, fedavgm, fedprox, fedyogi, local_only, scaffold
from fedplan.methods.layers import bitfit, fedpart, head_only, safl
from fedplan.methods.method import Method
from fedplan.methods.personal import fedbabu, fedbn, fedper, fedrep, lg_fedavg
from fedplan.methods.prompts import local_prompts, pfeddc, promptfl

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


def method_named(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """A method by its name, with settings of its own."""
    if name not in METHODS:
        close = get_close_matches(name, METHODS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(METHODS)}"
        raise FedplanError(f"there is no method {name!r}: {hint}")
    takes = signature(METHODS[name]).parameters
    for key, value in (settings or {}).items():
        if key not in takes:
            raise FedplanError(f"{name} takes no {key!r}; it takes {', '.join(takes) or 'nothing'}")
        if type(value) is not type(takes[key].default) and not (
            type(value) is int and type(takes[key].default) is float
        ):
            raise FedplanError(f"{name} takes {key} such as {takes[key].default!r}, not {value!r}")
    return METHODS[name](**(settings or {}))
