# SPDX-License-Identifier: Apache-2.0
"""fedplan: federated fine-tuning of Transformers by plans of trained, shared and kept parts."""

from typing import TYPE_CHECKING

from fedplan.errors import FedplanError, PlanError, UnknownArchitecture, UnknownModel
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
from fedplan.language.predicates import Turn, after, client_in, phase, trait
from fedplan.language.resolution import Resolver, permitted_roles, resolve
from fedplan.lazy import lazy_exports
from fedplan.models.architectures import register_layer_map
from fedplan.models.catalog import params_of

if TYPE_CHECKING:
    from fedplan import data, methods, models
    from fedplan.audits.run import verify_run
    from fedplan.federation.ledger.callbacks import EarlyStopping
    from fedplan.models.description import describe
    from fedplan.reports.explanation import explain
    from fedplan.reports.pages.run_report import report
    from fedplan.runners.api import run_study, simulate
    from fedplan.studies.export import export_run
    from fedplan.studies.run import open_run
    from fedplan.studies.schema import Study, read_study
    from fedplan.sweeps.comparisons import compare
    from fedplan.sweeps.sweeping import sweep
    from fedplan.training.freezing import trainable
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
    "trainable",
    "methods",
    "models",
    "open_run",
    "params_of",
    "parse",
    "permitted_roles",
    "phase",
    "read_study",
    "report",
    "resolve",
    "run_study",
    "share",
    "simulate",
    "sweep",
    "register_layer_map",
    "trait",
    "verify_run",
    "when",
]

# Parsing a plan must not import torch: names that need it are imported on first use.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "": "data methods models",
        "audits.run": "verify_run",
        "federation.ledger.callbacks": "EarlyStopping",
        "models.description": "describe",
        "reports.explanation": "explain",
        "reports.pages.run_report": "report",
        "runners.api": "run_study simulate",
        "studies.export": "export_run",
        "studies.run": "open_run",
        "studies.schema": "Study read_study",
        "sweeps.comparisons": "compare",
        "sweeps.sweeping": "sweep",
        "training.freezing": "trainable",
        "training.loops": "attach",
    },
)
