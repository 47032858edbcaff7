# SPDX-License-Identifier: Apache-2.0
"""Many runs of one study: sweeps over settings and seeds, and comparisons."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.sweeps.comparisons import Comparison, compare
    from fedplan.sweeps.sweeping import Sweep, sweep

__all__ = ["Comparison", "Sweep", "compare", "sweep"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"comparisons": "Comparison compare", "sweeping": "Sweep sweep"}
)
