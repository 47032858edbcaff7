# SPDX-License-Identifier: Apache-2.0
"""A study: its file, the experiment built from it, and the folder of a run."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.studies.experiment import Experiment, build_experiment
    from fedplan.studies.export import export_run
    from fedplan.studies.run import RunReader, read_run
    from fedplan.studies.schema import ConfigError, Study, read_study

__all__ = [
    "ConfigError",
    "RunReader",
    "Experiment",
    "Study",
    "export_run",
    "read_run",
    "read_study",
    "build_experiment",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "export": "export_run",
        "run": "RunReader read_run",
        "schema": "ConfigError Study read_study",
        "experiment": "Experiment build_experiment",
    },
)
