# SPDX-License-Identifier: Apache-2.0
"""What is hidden, by what noise, and at what cost."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.privacy.accounting.accountant import calibrate, epsilon
    from fedplan.privacy.accounting.budget import Budget
    from fedplan.privacy.accounting.events import Release, Steps
    from fedplan.privacy.dpsgd.fit import DPSGD, dp_sgd
    from fedplan.privacy.errors import PrivacyError
    from fedplan.privacy.guarantee import Guarantee
    from fedplan.privacy.guard import ClientGuard, ServerGuard
    from fedplan.privacy.statement import Statement

__all__ = [
    "Budget",
    "ClientGuard",
    "DPSGD",
    "Guarantee",
    "PrivacyError",
    "Release",
    "ServerGuard",
    "Statement",
    "Steps",
    "calibrate",
    "dp_sgd",
    "epsilon",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "accounting.accountant": "calibrate epsilon",
        "accounting.budget": "Budget",
        "accounting.events": "Release Steps",
        "dpsgd.fit": "DPSGD dp_sgd",
        "errors": "PrivacyError",
        "guarantee": "Guarantee",
        "guard": "ClientGuard ServerGuard",
        "statement": "Statement",
    },
)
