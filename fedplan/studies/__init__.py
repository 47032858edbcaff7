# SPDX-License-Identifier: Apache-2.0
"""A study file, what each end builds from it, and the folder of a run."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.studies.export import export_run
    from fedplan.studies.run import Run, open_run
    from fedplan.studies.schema import ConfigError, Study, read_study
    from fedplan.studies.stage import Stage, stage_of

__all__ = [
    "ConfigError",
    "Run",
    "Stage",
    "Study",
    "export_run",
    "open_run",
    "read_study",
    "stage_of",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "export": "export_run",
        "run": "Run open_run",
        "schema": "ConfigError Study read_study",
        "stage": "Stage stage_of",
    },
)
