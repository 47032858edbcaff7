# SPDX-License-Identifier: Apache-2.0
"""Many runs of one study: swept, compared, rehearsed."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.sweeps.comparisons import Comparison, compare
    from fedplan.sweeps.rehearsals import Rehearsal, rehearse
    from fedplan.sweeps.sweeping import Sweep, sweep

__all__ = ["Comparison", "Rehearsal", "Sweep", "compare", "rehearse", "sweep"]

__getattr__, __dir__ = face(
    __name__,
    {
        "comparisons": "Comparison compare",
        "rehearsals": "Rehearsal rehearse",
        "sweeping": "Sweep sweep",
    },
)
