# SPDX-License-Identifier: Apache-2.0
"""A study file, what each end builds from it, and the folder of a run."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.studies.export import export_run
    from fedplan.studies.run import Archive, read_archive
    from fedplan.studies.schema import ConfigError, Study, read_study
    from fedplan.studies.stage import Stage, stage_of

__all__ = [
    "Archive",
    "ConfigError",
    "Stage",
    "Study",
    "export_run",
    "read_archive",
    "read_study",
    "stage_of",
]

__getattr__ = face(
    __name__,
    {
        "export": "export_run",
        "run": "Archive read_archive",
        "schema": "ConfigError Study read_study",
        "stage": "Stage stage_of",
    },
)
