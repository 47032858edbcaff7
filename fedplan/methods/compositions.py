# SPDX-License-Identifier: Apache-2.0
"""Combinations of published methods that are in no paper."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedplan.language.parser import parse_part
from fedplan.language.parts import adapter, fusion, head, key, query
from fedplan.language.plan import Plan, best, chain, freeze, hold, keep, share, when
from fedplan.language.predicates import phase
from fedplan.methods.adapters import add_lora, pfeddc
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.published import safl


def safl_frozen(k: int = 4, warmup: int = 10, probe: str = "attention") -> Method:
    """SAFL with FedFrozen's freeze: after the warm-up, chosen blocks train all but query and key.

    Not published; see safl and fedfrozen.
    """
    return _after_warmup(safl(k, probe=probe), freeze(query | key), warmup)


def pfeddc_held(text: int = 4, vision: int = 4, warmup: int = 10) -> Method:
    """pFedDC whose fusion attention is fixed after a warm-up: query and key are held.

    Not published; see pfeddc and fedfrozen.
    """
    return _after_warmup(pfeddc(text, vision), hold(fusion & (query | key)), warmup)


def fedper_safl(k: int = 4, probe: str = "attention") -> Method:
    """FedPer with SAFL: each client keeps its head and shares its chosen blocks.

    Not published; see fedper and safl.
    """
    return replace(safl(k, probe=probe), plan=chain(freeze(), keep(head), best(k)))


def safl_lora(
    k: int = 4, rank: int = 8, target: str = "query | value", probe: str = "attention"
) -> Method:
    """SAFL with LoRA: only the adapters of the chosen blocks are trained.

    Not published; see fedit (`rank`, `target`) and safl (`k`, `probe`). The head is shared too.
    """
    plan = chain(freeze(), share(head), best(k, adapter))
    adapt = partial(add_lora, rank=rank, on=parse_part(target))
    return replace(safl(k, probe=probe), plan=plan, adapt=adapt)


def _after_warmup(method: Method, plan: Plan, warmup: int) -> Method:
    plan = chain(method.plan, when(phase("frozen"), plan))
    return replace(method, plan=plan, phase_rule=PlannedPhases({"frozen": warmup}))


METHODS = (safl_frozen, pfeddc_held, fedper_safl, safl_lora)
"""The methods of this module, as lists of methods order them."""
