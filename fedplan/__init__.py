# SPDX-License-Identifier: Apache-2.0
"""fedplan: federated fine-tuning of Transformers by plans of trained, shared and kept parts."""

from typing import TYPE_CHECKING

from fedplan.errors import FedplanError
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
from fedplan.language.resolution import resolve
from fedplan.lazy import lazy_exports
from fedplan.models.architectures import register_layer_map
from fedplan.models.catalog import params_of

if TYPE_CHECKING:
    from fedplan import data, methods, models
    from fedplan.audits.run import verify_run
    from fedplan.data.custom_task import CustomTask
    from fedplan.federation.ledger.callbacks import EarlyStopping
    from fedplan.models.description import describe
    from fedplan.reports.explanation import explain
    from fedplan.reports.pages.run_report import report
    from fedplan.run import Run, RunOptions, open_run, run_study, simulate
    from fedplan.studies.export import export_run
    from fedplan.studies.federation_sections import (
        AggregationConfig,
        ClientsConfig,
        DefenceConfig,
        EvaluateConfig,
        PrivacyConfig,
    )
    from fedplan.studies.schema import Study, read_study
    from fedplan.studies.sections import TrainConfig
    from fedplan.sweeps.comparisons import compare
    from fedplan.sweeps.sweeping import sweep
    from fedplan.training.loops import attach

__version__ = "0.1.0"

__all__ = [
    # Plans
    "Plan",
    "Role",
    "Turn",
    "after",
    "best",
    "by",
    "chain",
    "client_in",
    "cycle",
    "freeze",
    "hold",
    "keep",
    "parse",
    "phase",
    "resolve",
    "share",
    "trait",
    "when",
    # Models, data and methods
    "CustomTask",
    "attach",
    "data",
    "describe",
    "explain",
    "methods",
    "models",
    "params_of",
    "register_layer_map",
    # Runs
    "AggregationConfig",
    "ClientsConfig",
    "DefenceConfig",
    "EarlyStopping",
    "EvaluateConfig",
    "FedplanError",
    "PrivacyConfig",
    "Run",
    "RunOptions",
    "Study",
    "TrainConfig",
    "compare",
    "export_run",
    "open_run",
    "read_study",
    "report",
    "run_study",
    "simulate",
    "sweep",
    "verify_run",
]

# Parsing a plan must not import torch: names that need it are imported on first use.
__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "": "data methods models",
        "audits.run": "verify_run",
        "data.custom_task": "CustomTask",
        "federation.ledger.callbacks": "EarlyStopping",
        "models.description": "describe",
        "reports.explanation": "explain",
        "reports.pages.run_report": "report",
        "run": "Run RunOptions open_run run_study simulate",
        "studies.export": "export_run",
        "studies.schema": "Study read_study",
        "studies.federation_sections": "AggregationConfig ClientsConfig DefenceConfig "
        "EvaluateConfig PrivacyConfig",
        "studies.sections": "TrainConfig",
        "sweeps.comparisons": "compare",
        "sweeps.sweeping": "sweep",
        "training.loops": "attach",
    },
)
