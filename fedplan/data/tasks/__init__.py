# SPDX-License-Identifier: Apache-2.0
"""Tasks: a class for each kind of task, and functions to make a task from its kind."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.data.tasks.definition import Task
    from fedplan.data.tasks.kinds import TASK_KINDS, TASK_NAMES, adapt_task, make_task, task_class

__all__ = ["TASK_KINDS", "TASK_NAMES", "Task", "adapt_task", "make_task", "task_class"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"definition": "Task", "kinds": "TASK_KINDS TASK_NAMES adapt_task make_task task_class"},
)
