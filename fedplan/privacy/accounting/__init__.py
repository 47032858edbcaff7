# SPDX-License-Identifier: Apache-2.0
"""What costs privacy, how much of it, and the file of charges."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.privacy.accounting.accountant import calibrate, epsilon
    from fedplan.privacy.accounting.budget import Budget
    from fedplan.privacy.accounting.events import Release, Steps

__all__ = ["Budget", "Release", "Steps", "calibrate", "epsilon"]

__getattr__, __dir__ = face(
    __name__, {"accountant": "calibrate epsilon", "budget": "Budget", "events": "Release Steps"}
)
