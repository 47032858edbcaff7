# SPDX-License-Identifier: Apache-2.0
"""Differential privacy: guarantees, mechanisms and accounting."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.privacy.accounting.accountant import DPSGDSteps, Release, calibrate, epsilon
    from fedplan.privacy.accounting.budget import Budget
    from fedplan.privacy.dpsgd.fit import DPSGDConfig, dp_sgd
    from fedplan.privacy.guarantee import Guarantee
    from fedplan.privacy.guard import ClientGuard, ServerGuard
    from fedplan.privacy.statement import Statement

__all__ = [
    "Budget",
    "ClientGuard",
    "DPSGDConfig",
    "Guarantee",
    "Release",
    "ServerGuard",
    "Statement",
    "DPSGDSteps",
    "calibrate",
    "dp_sgd",
    "epsilon",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "accounting.accountant": "DPSGDSteps Release calibrate epsilon",
        "accounting.budget": "Budget",
        "dpsgd.fit": "DPSGDConfig dp_sgd",
        "guarantee": "Guarantee",
        "guard": "ClientGuard ServerGuard",
        "statement": "Statement",
    },
)
