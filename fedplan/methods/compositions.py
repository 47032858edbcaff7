# SPDX-License-Identifier: Apache-2.0
"""Compositions that no paper has: a method and one more sentence."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from fedplan.language.parser import parse_part
from fedplan.language.parts import adapter, fusion, head, key, query
from fedplan.language.plan import Plan, best, chain, freeze, hold, keep, share, when
from fedplan.language.turn import phase
from fedplan.methods.adapters import add_lora
from fedplan.methods.layers import safl
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned
from fedplan.methods.prompts import pfeddc


def safl_frozen(k: int = 4, warmup: int = 10, probe: str = "attention") -> Method:
    """SAFL with FedFrozen's freeze: after the warm-up the chosen blocks go on without their kernel.

    A composition of ours; see safl and fedfrozen.
    """
    return _then(safl(k, probe=probe), freeze(query | key), warmup)


def pfeddc_held(text: int = 4, vision: int = 4, warmup: int = 10) -> Method:
    """pFedDC whose fusion keeps choosing as it does: its own query and key rest after a warm-up.

    A composition of ours; see pfeddc and fedfrozen.
    """
    return _then(pfeddc(text, vision), hold(fusion & (query | key)), warmup)


def fedper_safl(k: int = 4, probe: str = "attention") -> Method:
    """FedPer with SAFL: each client keeps its head, and shares the blocks that it chooses.

    A composition of ours; see fedper and safl.
    """
    return replace(safl(k, probe=probe), plan=chain(freeze(), keep(head), best(k)))


def safl_lora(
    k: int = 4, rank: int = 8, on: str = "query | value", probe: str = "attention"
) -> Method:
    """LoRA on the chosen blocks only: SAFL's choice at the price of adapters.

    A composition of ours; see fedit and safl.
    """
    plan = chain(freeze(), share(head), best(k, adapter))
    adapt = partial(add_lora, rank=rank, on=parse_part(on))
    return replace(safl(k, probe=probe), plan=plan, adapt=adapt)


def _then(made: Method, plan: Plan, warmup: int) -> Method:
    """A method that says one thing more once it is warm."""
    plan = chain(made.plan, when(phase("frozen"), plan))
    return replace(made, plan=plan, announce=Planned({"frozen": warmup}))
