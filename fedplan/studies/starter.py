# SPDX-License-Identifier: Apache-2.0
"""Write a commented study file for a dataset and a model, ready to run."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedplan.data.schema_inference import SAMPLED_ROWS, TableSchema, infer_schema
from fedplan.data.tables import DataError
from fedplan.data.tasks.kinds import task_class
from fedplan.errors import FedplanError
from fedplan.methods.registry import METHOD_REGISTRY
from fedplan.models.catalog import SHORT_NAMES, is_hub_id, load_model_config
from fedplan.storage.files import SHARED, write_atomic
from fedplan.studies.federated_data import compute_split
from fedplan.studies.schema import Study, read_study
from fedplan.studies.section import SCHEMA_LINE

LENGTHS = (32, 64, 128, 256, 512)
"""Choices of max_length; the first that fits most texts is used."""
MIN_EXAMPLES = 20
"""Minimum number of examples per client, if examples are divided at random."""
UNKNOWN = frozenset(
    ("na", "n/a", "n.a.", "nan", "none", "null", "unknown", "missing", "not known", "?", "-", "")
)
"""Labels, in lower case, that look like a missing value."""
UNEQUAL = 0.8
"""Share of rows with one label, from which accuracy says little."""
MAX_CLIENTS = 100
"""Maximum number of clients, if a column names more."""
NEW_WEIGHTS_LR, PRETRAINED_LR = "1e-3", "5e-5"
"""Learning rates: for new weights, and for pretrained ones."""


@dataclass(frozen=True)
class StudyOptions:
    """Choices of the user for a new study file; empty ones are inferred from the dataset.

    `task`: task kind, such as "text-classification".
    `input`, `label`, `client`: names of the columns with inputs, labels and client names.
    `clients`: number of clients, if no column names the clients; 0: by the dataset's size.
    `method`: name of the method.
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
    """Write a commented study file for a dataset and a model, and return lines for the user.

    `data`: a file, folder or hub:org/name. `model`: a folder, hub:org/name, or a short name such as
    "bert-base". Raises FedplanError if the file exists, or if no valid study can be written.
    """
    options = options or StudyOptions()
    if output.exists():
        raise FedplanError(f"{output} exists already: name another file with --output")
    if output.suffix != ".toml" or not output.absolute().parent.is_dir():
        raise FedplanError(f"--output is {output}: name a .toml file in a folder that exists")
    if options.client and options.clients:
        raise FedplanError(
            f"--client names the clients by the column {options.client!r}, and --clients "
            f"{options.clients} divides rows at random: give one of them"
        )
    METHOD_REGISTRY.find(options.method)
    draft = _StudyDraft(infer_schema(data), model, output, options)
    write_atomic(output, draft.text(), mode=SHARED)
    try:
        study = read_study(output)
        return [*draft.findings, _row_counts(study, draft.schema.rows)]
    except FedplanError:
        output.unlink()  # an invalid file would block the next attempt
        raise


def _row_counts(study: Study, total: int) -> str:
    """Return a line on how many of all rows a run uses; DataError if it cannot divide them."""
    split = compute_split(study)
    held_out = sum(len(rows.test) + len(rows.validation) for rows in split.clients.values())
    train = sum(len(rows.train) for rows in split.clients.values())
    left_out = total - train - held_out
    return (
        f"rows    {train} to train and {held_out} to test at {len(split.clients)} clients"
        f"{f'; {left_out} of {total} are left out' if left_out > 0 else ''}"
    )


class _StudyDraft:
    """A study file in the making; relative paths start from `output`, and nothing is written."""

    def __init__(
        self, schema: TableSchema, model: str, output: Path, options: StudyOptions
    ) -> None:
        self.schema, self.model, self.output, self.options = schema, model, output, options
        self.config, _ = load_model_config(model)
        for name in filter(None, (options.client, options.label)):
            schema.column(name)
        chosen = options.input or schema.input_columns()
        # A space separates two columns, unless it is in the name of one.
        is_one = any(chosen == column.name for column in schema.columns)
        names = [chosen] if is_one else chosen.split()
        self.input: str | list[str] = names if is_one and " " in chosen else chosen
        self.inputs = [schema.column(name) for name in names]
        # Conversations need no label column.
        is_chat = self.inputs[0].kind == "conversation" or len(self.inputs) == 2
        self.kind, label = options.task or "instruction" * is_chat, ""
        if not self.kind or task_class(self.kind).answer_kind != "tokens":
            lists = self.inputs[0].kind == "words"
            label = options.label or schema.label_column([*names, options.client], lists=lists)
        self.kind = self.kind or self._infer_task(label)
        self.label = "" if task_class(self.kind).answer_kind == "tokens" else label
        if not label and task_class(self.kind).answer_kind != "tokens":
            columns = ", ".join(column.summary for column in schema.columns)
            raise DataError(
                f"{schema.path} has no column that looks like labels: it has {columns}; name "
                "the label column with --label"
            )
        self.client = options.client or schema.client_column([*names, self.label])
        self.group = schema.group_column([*names, self.label, self.client])
        used = (*names, *filter(None, (self.label, self.client)))
        self.missing = {name: schema.column(name).missing for name in used}
        for name, count in self.missing.items():
            if count == min(schema.rows, SAMPLED_ROWS):
                raise DataError(
                    f"column {name!r} of {schema.path} has no value in any of its first {count} "
                    "rows: name another column"
                )
        if self.label and schema.column(self.label).separator:
            self.missing[self.label] = 0  # an empty cell has no label
        vision: Any = getattr(self.config, "vision_config", self.config)
        self.image_size: Any = getattr(vision, "image_size", None)
        self._require_matching_model()
        self.label_values: tuple[str, ...] = ()
        self.label_summary, self.common_label = "", ""
        if self.label and task_class(self.kind).answer_kind in ("class", "labels"):
            values, share = schema.column(self.label).values, schema.column(self.label).common
            shown = f"{', '.join(values[:8])}{', ...' if len(values) > 8 else ''}"
            self.label_values, self.label_summary = values, f"{len(values)} values, {shown}"
            if task_class(self.kind).answer_kind == "class" and share >= UNEQUAL:
                self.common_label = f"{share:.0%} of rows have one label"
        # Labels that look like a missing value, such as NA.
        self.unknown = [v for v in self.label_values if v.strip().casefold() in UNKNOWN]
        self.client_count = options.clients or max(2, min(10, schema.rows // MIN_EXAMPLES))

    def _infer_task(self, label: str) -> str:
        """Return the task kind that fits the input columns and the label column ("": no labels)."""
        content = self.inputs[0].kind
        column = self.schema.column(label) if label else None
        several = column is not None and bool(column.lists or column.separator)
        if content == "image":
            return "image-multi-label" if several else "image-classification"
        if content == "words":
            return "token-classification"
        if column is None:
            return "causal-lm"
        if several:
            return "multi-label"
        return "regression" if column.kind == "number" else "text-classification"

    def _require_matching_model(self) -> None:
        """Raise FedplanError if the model takes images and the data are texts, or vice versa."""
        has_images = self.kind.startswith("image")
        if has_images != (self.image_size is not None):
            content, accepted = ("images", "texts") if has_images else ("texts", "images")
            raise FedplanError(
                f"column {self.inputs[0].name!r} of {self.schema.path} holds {content}, but the "
                f"model {self.model!r} takes {accepted}: name another model, or another "
                "column with --input"
            )
        if self.model in SHORT_NAMES and not has_images:
            raise FedplanError(
                f"{self.model!r} has no tokenizer: name a folder with a model and its tokenizer, "
                "or hub:org/name"
            )

    @property
    def findings(self) -> list[str]:
        """Lines for the user on the dataset, the columns, the clients and the task."""
        schema, labels = self.schema, self.label_summary
        names = " ".join(column.name for column in self.inputs)
        lines = [f"{schema.path}: {schema.rows} training examples", f"input   {names}"]
        if self.label:
            lines.append(f"label   {self.label}" + (f": {labels}" if labels else ""))
        at_random = f"{self.client_count}, examples divided at random"
        division = f"by the column {self.client}" if self.client else at_random
        task = f"{self.kind}, scored by {task_class(self.kind).primary}"
        lines += [f"clients {division}", f"task    {task}"]
        if self.group:
            lines.append(f"group   {self.group}: its rows stay together in every split")
        if missing := [f"{count} in {name!r}" for name, count in self.missing.items() if count]:
            lines.append(f"missing {', '.join(missing)}: these rows are left out")
        if self.unknown:
            lines.append(
                f"caution {', '.join(map(repr, self.unknown))}: a class of its own here; if it "
                f"means that {self.label!r} is not known, leave these rows out: see filter in "
                f"{self.output}"
            )
        if common := self.common_label:
            lines.append(f"caution {common}: accuracy says little, so other scores stand beside it")
        return lines

    def text(self) -> str:
        """Return the text of the study file."""
        return "".join(f"{line}\n" for line in (*self._model(), *self._task(), *self._data()))

    def _model(self) -> Iterator[str]:
        """Yield the lines of the file's head, and of [model]: a path, or a type with a config."""
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(self.schema.path).stem).strip("-") or "study"
        file, dataset = _printable(self.output.name), _printable(Path(self.schema.path).name)
        yield SCHEMA_LINE.format("study")
        yield f"# A study of {dataset}, written by `fedplan new study`."
        yield f"# Inspect it:  fedplan explain {file}; fedplan data {file}"
        yield f"# Run it:      fedplan run {file} --output run"
        yield f"name = {_to_toml(name)}"
        yield _commented("seed = 0", "seed of all random choices")
        yield "\n[model]"
        if self.model not in SHORT_NAMES:
            path = f"path = {_to_toml(self._relative_path(self.model))}"
            yield _commented(path, "a folder, or hub:org/name")
            return
        kind, _, settings = SHORT_NAMES[self.model]
        yield f"# {self.model} with new weights; for pretrained ones, set path instead."
        yield f"type = {_to_toml(kind)}"
        if own := {k: v for k, v in settings.items() if k != "num_labels"}:
            yield f"config = {_to_toml(own)}"

    def _task(self) -> Iterator[str]:
        """Yield the lines of [task].

        max_length is the smallest of LENGTHS that is at least 1.5 times the words of a long text
        (95th percentile), and at most the model's limit.
        """
        yield f"\n[task]\nkind = {_to_toml(self.kind)}\ninput = {_to_toml(self.input)}"
        if self.label:
            yield _commented(f"label = {_to_toml(self.label)}", self.label_summary)
            if self.common_label:
                comment = "rare labels count more in the loss"
                yield _commented('# class_weights = "balanced"', comment)
            if separator := self.schema.column(self.label).separator:
                comment = "between the labels of a cell; an empty cell has none"
                yield _commented(f"label_separator = {_to_toml(separator)}", comment)
        if self.kind.startswith("image"):
            size = self.image_size
            pixels = int(size[0] if isinstance(size, list | tuple) else size)
            yield _commented(f"image_size = {pixels}", "input size of the model, in pixels")
        else:
            limit = int(getattr(self.config, "max_position_embeddings", None) or LENGTHS[-1])
            text_length = max(column.length for column in self.inputs)
            choices = [length for length in LENGTHS if length >= 1.5 * text_length]
            length = min(choices[0] if choices else LENGTHS[-1], limit)
            yield _commented(
                f"max_length = {length}", "tokens per example; longer texts are truncated"
            )

    def _data(self) -> Iterator[str]:
        """Yield the lines of [data], with the partition among clients, and of all that follows."""
        schema = self.schema
        yield f"\n[data]\npath = {_to_toml(self._relative_path(schema.path))}"
        if schema.train:
            yield f"split = {_to_toml(schema.train)}"
        if self.unknown:
            labels = [value for value in self.label_values if value not in self.unknown]
            kept = f"# filter = {_to_toml({self.label: labels})}"
            yield _commented(kept, f"without {', '.join(self.unknown)}")
        if schema.test:
            test = f"test_split = {_to_toml(schema.test)}"
            yield _commented(test, "the common test set: never trained on")
        else:
            yield "# No common test set: each client is tested on its own examples. To have one,"
            yield '# name another file: test_path = "test.csv"'
        if self.client:
            count = MAX_CLIENTS if schema.column(self.client).distinct > MAX_CLIENTS else 0
            yield _commented('partition = "column"', "one client per value of a column")
            yield f"partition_column = {_to_toml(self.client)}"
            yield _commented(f"num_clients = {count}", "those with the most examples; 0: all")
        else:
            one_label = task_class(self.kind).answer_kind == "class"
            if not one_label or self.kind == "token-classification":
                yield _commented('partition = "iid"', "at random, in about equal parts")
            else:
                yield _commented('partition = "dirichlet"', "at random, with skewed labels")
                yield _commented("alpha = 0.5", "the smaller, the more clients differ")
            yield f"num_clients = {self.client_count}"
        if self.group:
            comment = "rows with the same value are on one side of every split"
            yield _commented(f"group = {_to_toml(self.group)}", comment)
        comment = "fraction of its examples that a client is tested on"
        yield _commented("holdout_fraction = 0.2", comment)
        yield "\n[method]"
        yield _commented(f"name = {_to_toml(self.options.method)}", "list them: fedplan methods")
        learning_rate = NEW_WEIGHTS_LR if self.model in SHORT_NAMES else PRETRAINED_LR
        yield "\n[train]\nrounds = 10"
        yield _commented(f"lr = {learning_rate}", "learning rate of AdamW")
        yield "batch_size = 16"
        yield _commented("epochs = 1", "passes over a client's examples in each round")
        if self.common_label:
            comment = "beside accuracy, which a common label makes high"
            yield "\n[evaluate]"
            yield _commented('metrics = ["recall_macro", "auprc"]', comment)

    def _relative_path(self, path: str) -> str:
        if is_hub_id(path) and not Path(path).exists():
            return path
        return Path(os.path.relpath(path, self.output.absolute().parent)).as_posix()


def _commented(assignment: str, comment: str) -> str:
    return f"{assignment:<24} # {_printable(comment)}" if comment else assignment


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else " " for character in text)


def _to_toml(value: Any) -> str:
    """Return a string, number, boolean or list as TOML, or a dict of these as inline table."""
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return "{ " + ", ".join(f"{_key(k)} = {_to_toml(v)}" for k, v in items) + " }"
    return json.dumps(value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else json.dumps(name, ensure_ascii=False)
