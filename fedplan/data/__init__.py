# SPDX-License-Identifier: Apache-2.0
"""Data of a client: tables, partitions, tasks, batches of examples, and metrics."""

from typing import TYPE_CHECKING

from fedplan.lazy import lazy_exports

if TYPE_CHECKING:
    from fedplan.data.examples import Examples, ImageExamples, Loss, RaggedArray, TokenSequences
    from fedplan.data.metrics import Metric, metric_named
    from fedplan.data.partition import Partition, partition_examples
    from fedplan.data.tables import DataError, load_table
    from fedplan.data.tasks import Task, make_task

__all__ = [
    "DataError",
    "Examples",
    "ImageExamples",
    "Loss",
    "Metric",
    "Partition",
    "RaggedArray",
    "Task",
    "TokenSequences",
    "load_table",
    "make_task",
    "metric_named",
    "partition_examples",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "examples": "Examples ImageExamples Loss RaggedArray TokenSequences",
        "metrics": "Metric metric_named",
        "partition": "Partition partition_examples",
        "tables": "DataError load_table",
        "tasks": "Task make_task",
    },
)
