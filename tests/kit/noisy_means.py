# SPDX-License-Identifier: Apache-2.0
"""The noisy mean of some changes by a mechanism, as a server makes it, without a charge."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from fedplan.privacy.mechanisms.gaussian import Change, GaussianMechanism
from fedplan.tensors.sums import ExactSum


def aggregate(
    mechanism: GaussianMechanism, changes: Iterable[Change], secret: bytes, name: str
) -> dict[str, Tensor]:
    """Clip and sum all changes by a mechanism, and return the noisy mean by tensor name."""
    total = ExactSum()
    for change in changes:
        mechanism.add(total, change)
    return mechanism.release(total, secret, name)
