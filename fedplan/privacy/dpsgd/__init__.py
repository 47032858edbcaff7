# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: every step hides each single example of a client."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.privacy.dpsgd.fit import DPSGD, dp_sgd

__all__ = ["DPSGD", "dp_sgd"]

__getattr__, __dir__ = face(__name__, {"fit": "DPSGD dp_sgd"})
