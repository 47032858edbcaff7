# SPDX-License-Identifier: Apache-2.0
"""Privacy accounting: events, epsilon of their composition, and the budget of charges."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.privacy.accounting.accountant import DPSGDSteps, Release, calibrate, epsilon
    from fedplan.privacy.accounting.budget import Budget

__all__ = ["Budget", "DPSGDSteps", "Release", "calibrate", "epsilon"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"accountant": "calibrate epsilon", "budget": "Budget", "events": "DPSGDSteps Release"},
)
