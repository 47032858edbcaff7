# SPDX-License-Identifier: Apache-2.0
"""One client's turn on its own rows: fit, wraps, freezing, probes."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.training.features import Features
    from fedplan.training.fit import Done, Fit, Job, Pace, Wrap, plain
    from fedplan.training.freezing import Marked, mark
    from fedplan.training.loops import RowsOf, attach
    from fedplan.training.optimisers import (
        ClientOptimiser,
        adamw,
        optimiser_named,
        register_optimiser,
        sgd,
    )
    from fedplan.training.probes import (
        Look,
        Probe,
        at_random,
        attention,
        fixed,
        from_the_middle,
        from_the_top,
        gradient,
        probe_named,
        public,
    )
    from fedplan.training.ranks import narrowed
    from fedplan.training.schedules import Schedule, schedule_named
    from fedplan.training.wraps import alternate, controlled, proximal

__all__ = [
    "ClientOptimiser",
    "Done",
    "Features",
    "Fit",
    "Job",
    "Look",
    "Marked",
    "Pace",
    "Probe",
    "RowsOf",
    "Schedule",
    "Wrap",
    "adamw",
    "alternate",
    "at_random",
    "attach",
    "attention",
    "controlled",
    "fixed",
    "from_the_middle",
    "from_the_top",
    "gradient",
    "mark",
    "narrowed",
    "optimiser_named",
    "plain",
    "probe_named",
    "proximal",
    "public",
    "register_optimiser",
    "schedule_named",
    "sgd",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "features": "Features",
        "fit": "Done Fit Job Pace Wrap plain",
        "freezing": "Marked mark",
        "loops": "RowsOf attach",
        "optimisers": "ClientOptimiser adamw optimiser_named register_optimiser sgd",
        "probes": "Look Probe at_random attention fixed from_the_middle from_the_top gradient "
        "probe_named public",
        "ranks": "narrowed",
        "schedules": "Schedule schedule_named",
        "wraps": "alternate controlled proximal",
    },
)
