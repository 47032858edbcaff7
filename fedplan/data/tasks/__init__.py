# SPDX-License-Identifier: Apache-2.0
"""What a model is asked to do: a class for each kind of task, and the word that finds it."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.data.tasks.definition import Task
    from fedplan.data.tasks.kinds import TASK_KINDS, TASK_NAMES, refitted, task, task_class

__all__ = ["TASK_KINDS", "TASK_NAMES", "Task", "refitted", "task", "task_class"]

__getattr__, __dir__ = face(
    __name__, {"definition": "Task", "kinds": "TASK_KINDS TASK_NAMES refitted task task_class"}
)
