# SPDX-License-Identifier: Apache-2.0
"""From a table on a disk to a client's batches, loss and scores."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.data.examples import Examples, Images, Loss, Ragged, Sequences
    from fedplan.data.partition import Partition, divide
    from fedplan.data.tables import DataError, load
    from fedplan.data.tasks import Task, task

__all__ = [
    "DataError",
    "Examples",
    "Images",
    "Loss",
    "Partition",
    "Ragged",
    "Sequences",
    "Task",
    "divide",
    "load",
    "task",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "examples": "Examples Images Loss Ragged Sequences",
        "partition": "Partition divide",
        "tables": "DataError load",
        "tasks": "Task task",
    },
)
