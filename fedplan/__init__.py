# SPDX-License-Identifier: Apache-2.0
"""fedplan: which part of a Transformer each client trains, shares and keeps, round by round."""

from typing import TYPE_CHECKING

from fedplan.errors import FedplanError, PlanError, UnknownArchitecture, UnknownModel
from fedplan.faces import face
from fedplan.language.parser import parse
from fedplan.language.plan import (
    Plan,
    Role,
    best,
    by,
    chain,
    cycle,
    freeze,
    hold,
    keep,
    share,
    when,
)
from fedplan.language.resolution import Resolver, permitted, resolve
from fedplan.language.turn import Turn, after, client_in, phase, trait
from fedplan.models.architectures import teach
from fedplan.models.catalog import params_of

if TYPE_CHECKING:
    from fedplan import data, methods, models
    from fedplan.audits.run import verify_run
    from fedplan.federation.callbacks import EarlyStopping
    from fedplan.models.description import describe
    from fedplan.reports.explanation import explain
    from fedplan.reports.pages.reporting import report
    from fedplan.runners.door import run_study, simulate
    from fedplan.studies.export import export_run
    from fedplan.studies.run import open_run
    from fedplan.studies.schema import Study, read_study
    from fedplan.sweeps.comparisons import compare
    from fedplan.sweeps.rehearsals import rehearse
    from fedplan.sweeps.sweeping import sweep
    from fedplan.training.freezing import mark
    from fedplan.training.loops import attach

__version__ = "0.1.0"

__all__ = [
    "EarlyStopping",
    "FedplanError",
    "Plan",
    "PlanError",
    "Resolver",
    "Role",
    "Study",
    "Turn",
    "UnknownArchitecture",
    "UnknownModel",
    "after",
    "attach",
    "best",
    "by",
    "chain",
    "client_in",
    "compare",
    "cycle",
    "data",
    "describe",
    "explain",
    "export_run",
    "freeze",
    "hold",
    "keep",
    "mark",
    "methods",
    "models",
    "open_run",
    "params_of",
    "parse",
    "permitted",
    "phase",
    "read_study",
    "rehearse",
    "report",
    "resolve",
    "run_study",
    "share",
    "simulate",
    "sweep",
    "teach",
    "trait",
    "verify_run",
    "when",
]

# To read a plan takes no torch: what needs it is imported when it is first asked for.
__getattr__, __dir__ = face(
    __name__,
    {
        "": "data methods models",
        "audits.run": "verify_run",
        "federation.callbacks": "EarlyStopping",
        "models.description": "describe",
        "reports.explanation": "explain",
        "reports.pages.reporting": "report",
        "runners.door": "run_study simulate",
        "studies.export": "export_run",
        "studies.run": "open_run",
        "studies.schema": "Study read_study",
        "sweeps.comparisons": "compare",
        "sweeps.rehearsals": "rehearse",
        "sweeps.sweeping": "sweep",
        "training.freezing": "mark",
        "training.loops": "attach",
    },
)
