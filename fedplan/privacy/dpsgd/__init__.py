# SPDX-License-Identifier: Apache-2.0
"""DP-SGD: training with example-level differential privacy."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.privacy.dpsgd.fit import DPSGDConfig, dp_sgd

__all__ = ["DPSGDConfig", "dp_sgd"]

__getattr__, __dir__ = lazy_exports(__name__, {"fit": "DPSGDConfig dp_sgd"})
