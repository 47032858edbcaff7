# SPDX-License-Identifier: Apache-2.0
"""Warn of what the server can read from shared parts, by the plan alone: nothing is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedplan.language.plan import Plan, Role
from fedplan.language.resolution import params_with_roles
from fedplan.models.params import Kind, Params

if TYPE_CHECKING:
    from fedplan.federation.agreement import Agreement

NO_NOISE = "Without differential privacy"
"""Start of the warning, unless the server adds the noise."""


def plan_exposure(
    plan: Plan, params: Params, *, why: str = NO_NOISE, seen: str = "each update"
) -> str:
    """Return a sentence on what a server learns from the shared parts; "" if nothing is shared."""
    shared = params_with_roles(plan, params, Role.SHARE)
    if not shared:
        return ""
    parts = ", ".join(kind for kind in Kind if any(p.kind is kind for p in shared))
    has_tokens = any(p.kind is Kind.EMBED and len(p.shape) == 2 for p in shared)
    tokens = ", and from embed every token" * has_tokens
    return (
        f"{why}, {seen} ({parts}) lets the server infer how many examples of each label a site "
        f"has, and whether an example that it knows is among them{tokens}. Freezing or keeping "
        "other parts does not hide this."
    )


def study_exposure(agreement: Agreement) -> str:
    """Return `plan_exposure` of a study; "" if all that the server sees has noise."""
    guarantee, secagg = agreement.guarantee, agreement.secagg
    if guarantee is not None and (guarantee.unit == "example" or agreement.distributed_dp):
        return ""
    why = "Before the server adds its noise" if guarantee else NO_NOISE
    seen = f"each sum of {secagg.min_contributors} or more sites"
    sums = {"seen": seen} if secagg.active else {}
    return plan_exposure(agreement.method.plan, agreement.params, why=why, **sums)
