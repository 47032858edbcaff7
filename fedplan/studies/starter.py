# SPDX-License-Identifier: Apache-2.0
"""Starters: a commented study file that is written from a look at a table, ready to run."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from fedplan.data.looks import Column, TableLook, look_at
from fedplan.data.tables import DataError
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.methods.registry import METHOD_NAMES
from fedplan.models.catalog import SHORT, configuration
from fedplan.models.hub import is_hub_id
from fedplan.storage.files import put_file
from fedplan.studies.schema import read_study

LENGTHS = (32, 64, 128, 256, 512)
"""How many tokens a row may have: the first that most texts fit into is taken."""
EACH = 20
"""Rows that a client should have at least, where rows are divided by chance."""
MANY = 100
"""Clients to begin with, at most, where a column names more."""
RATE, TUNED = "1e-3", "5e-5"
"""Rates to begin with: of fresh weights, and of trained ones."""


@dataclass(frozen=True)
class Wanted:
    """What a person says of the study beside the table and the model; what is empty is looked up.

    `clients` is how many, where no column names them.
    """

    task: str = ""
    input: str = ""
    label: str = ""
    client: str = ""
    clients: int = 0
    method: str = "fedavg"


def new_study(data: str, model: str, output: Path, wanted: Wanted | None = None) -> list[str]:
    """Write a study of a table and a model, and say in lines what was found in the table."""
    wanted = wanted or Wanted()
    if output.exists():
        raise FedplanError(f"{output} is there already: name another file by --output")
    METHOD_NAMES.find(wanted.method)
    draft = _Draft(look_at(data), model, output, wanted)
    text = draft.text()
    put_file(output, text)
    try:
        read_study(output)
    except FedplanError:
        output.unlink()  # what cannot be read would only be in the way of the next try
        raise
    return draft.found


class _Draft:
    """A study as it is written."""

    def __init__(self, look: TableLook, model: str, output: Path, wanted: Wanted) -> None:
        self.look, self.model, self.output, self.wanted = look, model, output, wanted
        self.config, _ = configuration(model)
        self.input = wanted.input or look.input()
        if " " in self.input and any(self.input == each.name for each in look.columns):
            raise DataError(
                f"the column {self.input!r} of {look.path} has a space in its name, and in a study "
                "two words are two columns: rename it in the table"
            )
        self.inputs = [look.column(name) for name in self.input.split()]
        self.kind = wanted.task or self._kind()
        self.label = self._label()
        beside = [*self.input.split(), self.label]
        self.client = wanted.client or look.client(beside)
        if self.client:
            look.column(self.client)
        self._require_whole()
        self._require_sight()

    def _kind(self) -> str:
        held, columns = self.inputs[0].held, self.look.columns
        if held == "talk" or len(self.inputs) == 2:
            return "instruction"
        label = self.wanted.label or self.look.label([*self.input.split(), self.wanted.client])
        if held == "picture":
            return "image-classification"
        if held == "words":
            return "token-classification"
        if not label:
            return "causal-lm"
        number = any(c.name == label and c.held == "number" for c in columns)
        return "regression" if number else "text-classification"

    def _label(self) -> str:
        if task_class(self.kind).answers == "tokens":
            return ""
        beside = [*self.input.split(), self.wanted.client]
        found = self.wanted.label or self.look.label(beside)
        if not found:
            seen = ", ".join(f"{each.name} ({each.held})" for each in self.look.columns)
            raise DataError(
                f"{self.look.path} has no column that looks like labels: it has {seen}; name the "
                "one that is meant by --label"
            )
        self.look.column(found)
        return found

    def _require_whole(self) -> None:
        """Refuse columns with gaps: a run would refuse them too."""
        for name in filter(None, (*self.input.split(), self.label, self.client)):
            if missing := self.look.column(name).missing:
                raise DataError(
                    f"column {name!r} of {self.look.path} has no value in {missing} of its first "
                    "rows: drop these rows, or name another column"
                )

    def _require_sight(self) -> None:
        """Refuse a model of pictures for texts, and the other way round."""
        pictures = self.kind.startswith("image")
        sees = getattr(self._eye(), "image_size", None) is not None
        if pictures != sees:
            has, takes = ("pictures", "texts") if pictures else ("texts", "pictures")
            raise FedplanError(
                f"column {self.input!r} of {self.look.path} holds {has}, and the model "
                f"{self.model!r} takes {takes}: name another model, or another column by --input"
            )
        if self.model in SHORT and not pictures:
            raise FedplanError(
                f"{self.model!r} is a shape without a tokenizer: name a folder with a model and "
                "its tokenizer, or hub:org/name"
            )

    @property
    def found(self) -> list[str]:
        """What was found in the table, for a person."""
        look, labels = self.look, self._labels()
        lines = [f"{look.path}: {look.rows} rows to train on", f"input   {self.input}"]
        if self.label:
            lines.append(f"label   {self.label}" + (f": {labels}" if labels else ""))
        who = f"by the column {self.client}" if self.client else f"{self._count()} by chance"
        lines.append(f"clients {who}")
        lines.append(f"task    {self.kind}, scored by {task_class(self.kind).primary}")
        return lines

    def _labels(self) -> str:
        column: Column | None = self.look.column(self.label) if self.label else None
        if column is None or task_class(self.kind).answers not in ("class", "labels"):
            return ""
        some = ", ".join(column.values[:8])
        return f"{len(column.values)} values, {some}{', ...' if len(column.values) > 8 else ''}"

    def _count(self) -> int:
        return self.wanted.clients or max(2, min(10, self.look.rows // EACH))

    def text(self) -> str:
        """The study file."""
        parts = (self._head(), self._model(), self._task(), self._data(), self._rest())
        return "\n".join(line for part in parts for line in part) + "\n"

    def _head(self) -> list[str]:
        name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(self.look.path).stem).strip("-") or "study"
        file = _shown(self.output.name)
        return [
            f"# A study of {_shown(Path(self.look.path).name)}, written by `fedplan new study`.",
            f"# Look at it:  fedplan explain {file}; fedplan data {file}",
            f"# Run it:      fedplan run {file} --output run",
            f"name = {_said(name)}",
            _line("seed = 0", "another seed is another draw of all that is random"),
            "",
        ]

    def _model(self) -> list[str]:
        if self.model not in SHORT:
            path = _line(f"path = {_said(self._place(self.model))}", "a folder, or hub:org/name")
            return ["[model]", path, ""]
        kind, _, settings = SHORT[self.model]
        own = {k: v for k, v in settings.items() if k != "num_labels"}
        return [
            "[model]",
            f"# The shape of {self.model} with fresh weights; for trained ones say path instead.",
            f"type = {_said(kind)}",
            *([f"settings = {_said(own)}"] if own else []),
            "",
        ]

    def _task(self) -> list[str]:
        lines = ["[task]", f"kind = {_said(self.kind)}", f"input = {_said(self.input)}"]
        if self.label:
            lines.append(_line(f"label = {_said(self.label)}", self._labels()))
        if self.kind.startswith("image"):
            lines.append(_line(f"image_size = {self._side()}", "the side that the model takes"))
        else:
            lines.append(
                _line(f"max_length = {self._length()}", "tokens a row; the rest is cut off")
            )
        return [*lines, ""]

    def _eye(self) -> Any:
        """What the configuration says of pictures; that of two towers says it of one of them."""
        return getattr(self.config, "vision_config", self.config)

    def _side(self) -> int:
        said: Any = self._eye().image_size
        return int(said[0] if isinstance(said, list | tuple) else said)

    def _length(self) -> int:
        most = int(getattr(self.config, "max_position_embeddings", None) or LENGTHS[-1])
        words = max(column.length for column in self.inputs)
        fits = [length for length in LENGTHS if length >= 1.5 * words]
        return min(fits[0] if fits else LENGTHS[-1], most)

    def _data(self) -> list[str]:
        look = self.look
        lines = ["[data]", f"path = {_said(self._place(look.path))}"]
        lines += [f"split = {_said(look.train)}"] if look.train else []
        if look.test:
            why = "the common test: nobody trains on it"
            lines.append(_line(f"test_split = {_said(look.test)}", why))
        else:
            lines += [
                "# There is no common test: each client is tested on rows of its own. To have one,",
                '# name another table: test_path = "test.csv"',
            ]
        why = "the share of its rows that a client is tested on"
        return [*lines, *self._division(), _line("own_test = 0.2", why), ""]

    def _division(self) -> list[str]:
        if self.client:
            many = self.look.column(self.client).different > MANY
            return [
                _line('by = "column"', "a client for each value of a column"),
                f"column = {_said(self.client)}",
                _line(f"clients = {MANY if many else 0}", "those with most rows; 0 is all of them"),
            ]
        count = f"clients = {self._count()}"
        if not self._labels() or self.kind == "token-classification":
            return [_line('by = "iid"', "by chance, in about equal shares"), count]
        return [
            _line('by = "dirichlet"', "by chance, with labels skewed"),
            _line("alpha = 0.5", "the smaller, the more skewed"),
            count,
        ]

    def _rest(self) -> list[str]:
        rate = RATE if self.model in SHORT else TUNED
        return [
            "[method]",
            _line(f"name = {_said(self.wanted.method)}", "see them all: fedplan methods"),
            "",
            "[train]",
            "rounds = 10",
            _line(f"rate = {rate}", "of the clients' optimiser, which is adamw"),
            "batch = 16",
            _line("epochs = 1", "passes over a client's rows in each round"),
        ]

    def _place(self, path: str) -> str:
        """A path as the study says it: from its own folder."""
        if is_hub_id(path) and not Path(path).exists():
            return path
        return Path(os.path.relpath(path, self.output.absolute().parent)).as_posix()


def _line(said: str, why: str = "") -> str:
    """A field, and why it says what it says."""
    return f"{said:<24} # {_shown(why)}" if why else said


def _shown(text: str) -> str:
    """A text as a comment may have it: a table's values may hold anything."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def _said(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        held = cast("dict[str, Any]", value).items()
        return "{ " + ", ".join(f"{k} = {_said(v)}" for k, v in held) + " }"
    return json.dumps(value, ensure_ascii=False)
