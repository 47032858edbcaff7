# SPDX-License-Identifier: Apache-2.0
"""Clipping, noise, votes and sums: what hides, without a budget."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.privacy.mechanisms.gaussian import Mechanism, aggregate
    from fedplan.privacy.mechanisms.noise import Noise
    from fedplan.privacy.mechanisms.vote import Vote

__all__ = ["Mechanism", "Noise", "Vote", "aggregate"]

__getattr__, __dir__ = face(
    __name__, {"gaussian": "Mechanism aggregate", "noise": "Noise", "vote": "Vote"}
)
