# SPDX-License-Identifier: Apache-2.0
"""Write a commented study file for a dataset and a model, ready to run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedplan.data.infer_schema import ColumnSchema, TableSchema, infer_schema
from fedplan.data.tables import DataError
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.methods.registry import METHOD_REGISTRY
from fedplan.models.catalog import SHORT_NAMES, load_model_config
from fedplan.models.hub import is_hub_id
from fedplan.storage.files import write_atomic
from fedplan.studies.schema import read_study

LENGTHS = (32, 64, 128, 256, 512)
"""Choices of max_length; the first that fits most texts is used."""
MIN_EXAMPLES = 20
"""Minimum number of examples per client, if examples are divided at random."""
MAX_CLIENTS = 100
"""Maximum number of clients, if a column names more."""
NEW_WEIGHTS_LR, PRETRAINED_LR = "1e-3", "5e-5"
"""Learning rates: for new weights, and for pretrained ones."""


@dataclass(frozen=True)
class StudyOptions:
    """Choices of the user for a new study; empty ones are inferred from the dataset.

    `input`, `label`, `client`: column names.
    `clients`: number of clients, if no column names them; 0: chosen by the dataset's size.
    """

    task: str = ""
    input: str = ""
    label: str = ""
    client: str = ""
    clients: int = 0
    method: str = "fedavg"


def new_study(
    data: str, model: str, output: Path, options: StudyOptions | None = None
) -> list[str]:
    """Write a study file for a dataset and a model; return lines on the findings in the dataset.

    Raises FedplanError if the file exists, or if no valid study can be written.
    """
    options = options or StudyOptions()
    if output.exists():
        raise FedplanError(f"{output} exists already: name another file with --output")
    METHOD_REGISTRY.find(options.method)
    draft = _StudyDraft(infer_schema(data), model, output, options)
    text = draft.text()
    write_atomic(output, text)
    try:
        read_study(output)
    except FedplanError:
        output.unlink()  # an invalid file would block the next attempt
        raise
    return draft.findings


class _StudyDraft:
    """A study file in the making: the dataset's schema, the model's configuration, the options."""

    def __init__(
        self, schema: TableSchema, model: str, output: Path, options: StudyOptions
    ) -> None:
        """Infer columns and task; raise DataError or FedplanError if no study is possible."""
        self.schema, self.model, self.output, self.options = schema, model, output, options
        self.config, _ = load_model_config(model)
        self.input = options.input or schema.input_columns()
        if " " in self.input and any(self.input == column.name for column in schema.columns):
            raise DataError(
                f"the column {self.input!r} of {schema.path} has a space in its name, but "
                "task.input separates two columns by a space: rename the column"
            )
        self.inputs = [schema.column(name) for name in self.input.split()]
        self.kind = options.task or self._infer_task()
        self.label = self._find_label()
        other_columns = [*self.input.split(), self.label]
        self.client = options.client or schema.client_column(other_columns)
        if self.client:
            schema.column(self.client)
        self._require_no_gaps()
        self._require_matching_model()

    def _infer_task(self) -> str:
        """Return the task that fits the input and label columns."""
        content, columns = self.inputs[0].kind, self.schema.columns
        if content == "conversation" or len(self.inputs) == 2:
            return "instruction"
        label = self.options.label or self.schema.label_column(
            [*self.input.split(), self.options.client]
        )
        if content == "image":
            return "image-classification"
        if content == "words":
            return "token-classification"
        if not label:
            return "causal-lm"
        is_number = any(c.name == label and c.kind == "number" for c in columns)
        return "regression" if is_number else "text-classification"

    def _find_label(self) -> str:
        """Return the label column, or "" for tasks without; raise DataError if none is found."""
        if task_class(self.kind).answer_kind == "tokens":
            return ""
        other_columns = [*self.input.split(), self.options.client]
        label = self.options.label or self.schema.label_column(other_columns)
        if not label:
            columns = ", ".join(f"{column.name} ({column.kind})" for column in self.schema.columns)
            raise DataError(
                f"{self.schema.path} has no column that looks like labels: it has {columns}; name "
                "the label column with --label"
            )
        self.schema.column(label)
        return label

    def _require_no_gaps(self) -> None:
        """Raise DataError if an input, label or client column has missing values."""
        for name in filter(None, (*self.input.split(), self.label, self.client)):
            if missing := self.schema.column(name).missing:
                raise DataError(
                    f"column {name!r} of {self.schema.path} has no value in {missing} of its first "
                    "rows: drop these rows, or name another column"
                )

    def _require_matching_model(self) -> None:
        """Raise FedplanError if the model takes images and the data are texts, or vice versa."""
        has_images = self.kind.startswith("image")
        takes_images = getattr(self._vision_config(), "image_size", None) is not None
        if has_images != takes_images:
            content, accepted = ("images", "texts") if has_images else ("texts", "images")
            raise FedplanError(
                f"column {self.input!r} of {self.schema.path} holds {content}, but the model "
                f"{self.model!r} takes {accepted}: name another model, or another "
                "column with --input"
            )
        if self.model in SHORT_NAMES and not has_images:
            raise FedplanError(
                f"{self.model!r} has no tokenizer: name a folder with a model and its tokenizer, "
                "or hub:org/name"
            )

    @property
    def findings(self) -> list[str]:
        """Lines on the dataset, its columns, clients and task, for the user."""
        schema, labels = self.schema, self._label_summary()
        lines = [f"{schema.path}: {schema.rows} training examples", f"input   {self.input}"]
        if self.label:
            lines.append(f"label   {self.label}" + (f": {labels}" if labels else ""))
        division = (
            f"by the column {self.client}"
            if self.client
            else f"{self._client_count()}, examples divided at random"
        )
        lines.append(f"clients {division}")
        lines.append(f"task    {self.kind}, scored by {task_class(self.kind).primary}")
        return lines

    def _label_summary(self) -> str:
        """Return the number of labels and the first eight, or "" for tasks without classes."""
        column: ColumnSchema | None = self.schema.column(self.label) if self.label else None
        if column is None or task_class(self.kind).answer_kind not in ("class", "labels"):
            return ""
        shown = ", ".join(column.values[:8])
        return f"{len(column.values)} values, {shown}{', ...' if len(column.values) > 8 else ''}"

    def _client_count(self) -> int:
        return self.options.clients or max(2, min(10, self.schema.rows // MIN_EXAMPLES))

    def text(self) -> str:
        """Return the text of the study file."""
        parts = (self._head(), self._model(), self._task(), self._data(), self._method_and_train())
        return "\n".join(line for part in parts for line in part) + "\n"

    def _head(self) -> list[str]:
        """Return the lines of the file's head: comments, name and seed."""
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(self.schema.path).stem).strip("-") or "study"
        file, dataset = _printable(self.output.name), _printable(Path(self.schema.path).name)
        return [
            f"# A study of {dataset}, written by `fedplan new study`.",
            f"# Inspect it:  fedplan explain {file}; fedplan data {file}",
            f"# Run it:      fedplan run {file} --output run",
            f"name = {_to_toml(name)}",
            _commented("seed = 0", "seed of all random choices"),
            "",
        ]

    def _model(self) -> list[str]:
        """Return the lines of [model]: a path, or a type with a config."""
        if self.model not in SHORT_NAMES:
            path = _commented(
                f"path = {_to_toml(self._relative_path(self.model))}", "a folder, or hub:org/name"
            )
            return ["[model]", path, ""]
        kind, _, settings = SHORT_NAMES[self.model]
        own = {k: v for k, v in settings.items() if k != "num_labels"}
        return [
            "[model]",
            f"# {self.model} with new weights; for pretrained ones, set path instead.",
            f"type = {_to_toml(kind)}",
            *([f"config = {_to_toml(own)}"] if own else []),
            "",
        ]

    def _task(self) -> list[str]:
        """Return the lines of [task]."""
        lines = ["[task]", f"kind = {_to_toml(self.kind)}", f"input = {_to_toml(self.input)}"]
        if self.label:
            lines.append(_commented(f"label = {_to_toml(self.label)}", self._label_summary()))
        if self.kind.startswith("image"):
            lines.append(
                _commented(
                    f"image_size = {self._image_size()}", "input size of the model, in pixels"
                )
            )
        else:
            lines.append(
                _commented(
                    f"max_length = {self._max_length()}",
                    "tokens per example; longer texts are truncated",
                )
            )
        return [*lines, ""]

    def _vision_config(self) -> Any:
        """Return the configuration of the image encoder, or the whole one."""
        return getattr(self.config, "vision_config", self.config)

    def _image_size(self) -> int:
        """Return the model's image size in pixels."""
        size: Any = self._vision_config().image_size
        return int(size[0] if isinstance(size, list | tuple) else size)

    def _max_length(self) -> int:
        """Return the smallest choice for 1.5 times a typical text, within the model's limit."""
        limit = int(getattr(self.config, "max_position_embeddings", None) or LENGTHS[-1])
        text_length = max(column.length for column in self.inputs)
        choices = [length for length in LENGTHS if length >= 1.5 * text_length]
        return min(choices[0] if choices else LENGTHS[-1], limit)

    def _data(self) -> list[str]:
        """Return the lines of [data]."""
        schema = self.schema
        lines = ["[data]", f"path = {_to_toml(self._relative_path(schema.path))}"]
        lines += [f"split = {_to_toml(schema.train)}"] if schema.train else []
        if schema.test:
            comment = "the common test set: never trained on"
            lines.append(_commented(f"test_split = {_to_toml(schema.test)}", comment))
        else:
            lines += [
                "# No common test set: each client is tested on its own examples. To have one,",
                '# name another file: test_path = "test.csv"',
            ]
        comment = "fraction of its examples that a client is tested on"
        return [*lines, *self._partition(), _commented("holdout_fraction = 0.2", comment), ""]

    def _partition(self) -> list[str]:
        """Return the lines of [data] that divide the examples among clients."""
        if self.client:
            too_many = self.schema.column(self.client).distinct > MAX_CLIENTS
            return [
                _commented('partition = "column"', "one client per value of a column"),
                f"partition_column = {_to_toml(self.client)}",
                _commented(
                    f"num_clients = {MAX_CLIENTS if too_many else 0}",
                    "those with the most examples; 0: all",
                ),
            ]
        count = f"num_clients = {self._client_count()}"
        if not self._label_summary() or self.kind == "token-classification":
            return [_commented('partition = "iid"', "at random, in about equal parts"), count]
        return [
            _commented('partition = "dirichlet"', "at random, with skewed labels"),
            _commented("alpha = 0.5", "the smaller, the more clients differ"),
            count,
        ]

    def _method_and_train(self) -> list[str]:
        """Return the lines of [method] and [train]."""
        learning_rate = NEW_WEIGHTS_LR if self.model in SHORT_NAMES else PRETRAINED_LR
        return [
            "[method]",
            _commented(f"name = {_to_toml(self.options.method)}", "list them: fedplan methods"),
            "",
            "[train]",
            "rounds = 10",
            _commented(f"lr = {learning_rate}", "learning rate of AdamW"),
            "batch_size = 16",
            _commented("epochs = 1", "passes over a client's examples in each round"),
        ]

    def _relative_path(self, path: str) -> str:
        """Return a path relative to the study file's folder; Hub ids are kept."""
        if is_hub_id(path) and not Path(path).exists():
            return path
        return Path(os.path.relpath(path, self.output.absolute().parent)).as_posix()


def _commented(assignment: str, comment: str = "") -> str:
    """Return a line of TOML with a comment, if there is one."""
    return f"{assignment:<24} # {_printable(comment)}" if comment else assignment


def _printable(text: str) -> str:
    """Return a text for a comment, with spaces in place of control characters."""
    return "".join(character if character.isprintable() else " " for character in text)


def _to_toml(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return "{ " + ", ".join(f"{k} = {_to_toml(v)}" for k, v in items) + " }"
    return json.dumps(value, ensure_ascii=False)
