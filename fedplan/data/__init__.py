# SPDX-License-Identifier: Apache-2.0
"""From a table on a disk to a client's batches, loss and scores."""

from typing import TYPE_CHECKING

from fedplan.faces import face

if TYPE_CHECKING:
    from fedplan.data.examples import Examples, Images, Loss, Ragged, Sequences
    from fedplan.data.metrics import Metric, metric_named
    from fedplan.data.partition import Partition, divide
    from fedplan.data.tables import DataError, load
    from fedplan.data.tasks import Task, task

__all__ = [
    "DataError",
    "Examples",
    "Images",
    "Loss",
    "Metric",
    "Partition",
    "Ragged",
    "Sequences",
    "Task",
    "divide",
    "load",
    "metric_named",
    "task",
]

__getattr__, __dir__ = face(
    __name__,
    {
        "examples": "Examples Images Loss Ragged Sequences",
        "metrics": "Metric metric_named",
        "partition": "Partition divide",
        "tables": "DataError load",
        "tasks": "Task task",
    },
)
