# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from . import data, methods, models
from .audits.run import verify_run
from .data.custom_task import CustomTask
from .errors import FedplanError
from .federation.ledger.callbacks import EarlyStopping
from .language.parser import parse
from .language.plan import Plan, Role, best, by, chain, cycle, freeze, hold, keep, share, when
from .language.predicates import Turn, after, client_in, phase, trait
from .language.resolution import resolve
from .models.architectures import register_layer_map
from .models.catalog import params_of
from .models.description import describe
from .reports.explanation import explain
from .reports.pages.run_report import report
from .run import Run, RunOptions, open_run, run_study, simulate
from .studies.export import export_run
from .studies.federation_sections import (
    AggregationConfig,
    ClientsConfig,
    DefenceConfig,
    EvaluateConfig,
    PrivacyConfig,
)
from .studies.schema import Study, read_study
from .studies.sections import TrainConfig
from .sweeps.comparisons import compare
from .sweeps.sweeping import sweep
from .training.loops import attach

__all__ = [
    "AggregationConfig",
    "ClientsConfig",
    "CustomTask",
    "DefenceConfig",
    "EarlyStopping",
    "EvaluateConfig",
    "FedplanError",
    "Plan",
    "PrivacyConfig",
    "Role",
    "Run",
    "RunOptions",
    "Study",
    "TrainConfig",
    "Turn",
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
    "methods",
    "models",
    "open_run",
    "params_of",
    "parse",
    "phase",
    "read_study",
    "register_layer_map",
    "report",
    "resolve",
    "run_study",
    "share",
    "simulate",
    "sweep",
    "trait",
    "verify_run",
    "when",
]

__version__: str
