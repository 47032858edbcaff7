# SPDX-License-Identifier: Apache-2.0
"""Mechanisms of differential privacy: clipping, sampling, Gaussian noise and noisy votes."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.privacy.mechanisms.gaussian import GaussianMechanism, aggregate
    from fedplan.privacy.mechanisms.noise import NoiseStream
    from fedplan.privacy.mechanisms.vote import NoisyVote

__all__ = ["GaussianMechanism", "NoiseStream", "NoisyVote", "aggregate"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"gaussian": "GaussianMechanism aggregate", "noise": "NoiseStream", "vote": "NoisyVote"},
)
