# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnusedImport=false
from .column_statistics import (
    MISSING,
    OTHER,
    CellGroup,
    Column,
    ColumnType,
    CountRule,
    TableStatistics,
    mismatches,
    pool_statistics,
    statistics_from_json,
    table_statistics,
)
from .custom_task import CUSTOM_KIND, CustomTask, model_loss
from .evaluation import MIN_EXAMPLES, evaluate_predictions, youden_threshold
from .examples import (
    NO_LABEL,
    Examples,
    ImageExamples,
    Loss,
    RaggedArray,
    RowExamples,
    SeededExamples,
    SparseExamples,
    TokenSequences,
    count_labels,
    epoch_steps,
    first_examples,
    prefetch,
    split_step,
    token_lengths,
)
from .metrics import (
    METRIC_NAMES,
    METRICS,
    Metric,
    Predictions,
    metric_bounds,
    metric_direction,
    metric_named,
    metric_spread,
)
from .partition import (
    PARTITION_KINDS,
    Partition,
    partition_examples,
    partition_table,
    sample_rows,
    training_mask,
)
from .row_digests import example_digests, group_digests
from .schema_inference import SAMPLED_ROWS, TableSchema, infer_schema
from .score_counts import BINS, MAX_CLASSES, NOISY_BINS, Counts, ScoreCounts
from .tables import (
    ROW,
    DataError,
    add_empty_columns,
    class_names,
    column_values,
    filter_rows,
    has_json_columns,
    label_names,
    label_sort_key,
    label_text,
    load_table,
    matches_any,
    missing_cells,
    open_images,
    plain_cells,
    require_column,
    row_labels,
    select_rows,
    split_labels,
)
from .tasks import CHUNK_LOGITS
from .tasks.definition import Task
from .tasks.kinds import TASK_KINDS, TASK_NAMES, adapt_task, has_score_counts, make_task, task_class
from .tasks.language import require_attention_mask, require_packing_support

__all__ = [
    "DataError",
    "Examples",
    "ImageExamples",
    "Loss",
    "Metric",
    "Partition",
    "Predictions",
    "RaggedArray",
    "Task",
    "TokenSequences",
    "load_table",
    "make_task",
    "metric_direction",
    "metric_named",
    "partition_examples",
]
