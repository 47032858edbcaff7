# SPDX-License-Identifier: Apache-2.0
"""Tasks: what a model is asked to do, from rows of a table to batches, a loss and a score."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import exp
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedplan.data.examples import (
    NO_LABEL,
    Examples,
    Images,
    Masked,
    Ragged,
    Sequences,
    keys_of,
    pictures,
    pieces,
)
from fedplan.data.metrics import macro_f1
from fedplan.data.tables import DataError, label_order, labels_of, values
from fedplan.data.tokens import at_first_tokens, blocks, cut, opening, pad_of, require_tokens
from fedplan.models.catalog import TASKS
from fedplan.models.dual import TEMPLATE
from fedplan.models.hub import bare, is_hub_id
from fedplan.models.images import centre_of, drawn
from fedplan.naming import Registry
from fedplan.tensors.devices import at_rest

if TYPE_CHECKING:
    from datasets import Dataset

_ENTITY_TAG = re.compile(r"O|[BIESLU]-.+")


@dataclass(frozen=True)
class Task(ABC):
    """What a model is asked to do with the rows of a table: build one with `task`.

    `labels` are the answers in the order of the model's classes. `source` is the folder or hub id
    of the tokenizer, or of the image processor. `template` makes texts of labels, for image-text.
    `max_length` is in tokens. `image_size` is the side of the pictures that the model takes: of
    pictures it must be said. With `single` each row is one example: of a language model, the first
    block of its text.
    """

    kind: str
    source: str
    columns: tuple[str, ...]
    label: str
    labels: tuple[str, ...]
    max_length: int = 128
    image_size: int = 0
    template: str = TEMPLATE
    single: bool = False

    @property
    def model_class(self) -> str:
        """The class of transformers that loads a model for this task."""
        return TASKS[self.kind]

    @abstractmethod
    def prepare(self, table: Dataset) -> Examples:
        """The rows as tensors, tokenised or decoded once."""

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """The mean cross entropy of a batch."""
        logits, labels, _ = self._answers(model, batch)
        return cross_entropy(logits, labels) if len(labels) else logits.sum() * 0.0

    def score(self, model: nn.Module, rows: Examples, *, batch_size: int) -> dict[str, float]:
        """Loss, accuracy and what else the task measures; of no rows only that they are none."""
        if not len(rows):
            return {"examples": 0.0}
        parts: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        with at_rest(model), torch.no_grad():
            for indices in cast("tuple[Tensor, ...]", torch.arange(len(rows)).split(batch_size)):
                logits, labels, sizes = self._answers(model, rows.batch(indices))
                losses = cross_entropy(logits, labels, reduction="none").double()
                parts.append((losses.cpu(), labels.cpu(), logits.argmax(-1).cpu(), sizes.cpu()))
        losses, truth, guess, sizes = (torch.cat(p) for p in zip(*parts, strict=True))
        if not len(truth):
            return {"examples": float(len(rows))}
        loss, accuracy = losses.mean().item(), (truth == guess).double().mean().item()
        more = self._measures(loss, truth.tolist(), guess.tolist(), sizes.tolist())
        return {"loss": loss, "accuracy": accuracy, **more, "examples": float(len(rows))}

    def _answers(
        self, model: nn.Module, batch: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and labels wherever there is a label, and how many each row has."""
        device = next((tensor.device for tensor in model.parameters()), torch.device("cpu"))
        inputs = {name: tensor.to(device) for name, tensor in batch.items()}
        labels = self._targets(inputs.pop("labels"))
        output: Any = model(**inputs)
        logits = cast("Tensor", output if isinstance(output, Tensor) else output.logits).float()
        if self.labels and logits.shape[-1] != len(self.labels):
            raise DataError(
                f"the model knows {logits.shape[-1]} classes and the task {len(self.labels)} "
                f"labels: build the model with num_labels = {len(self.labels)}"
            )
        asked = labels != NO_LABEL
        return logits[asked], labels[asked], asked.reshape(len(asked), -1).sum(1)

    def _targets(self, labels: Tensor) -> Tensor:
        return labels

    def _measures(
        self, loss: float, truth: list[int], guess: list[int], sizes: list[int]
    ) -> dict[str, float]:
        return {"f1": macro_f1(truth, guess)}

    def _numbers(self, words: Sequence[str]) -> list[int]:
        """The class of each label."""
        places = {label: place for place, label in enumerate(self.labels)}
        unknown = sorted(set(words) - places.keys())
        if unknown:
            raise DataError(
                f"label {unknown[0]!r} in column {self.label!r} is none of the task's labels: "
                f"{', '.join(self.labels)}"
            )
        return [places[word] for word in words]

    def _texts(self, table: Dataset, column: str) -> list[str]:
        found = values(table, column)
        if not all(isinstance(text, str) for text in found):
            raise DataError(f"column {column!r} holds {type(found[0]).__name__}, and not texts")
        return found

    @cached_property
    def _tokenizer(self) -> Any:
        import transformers

        try:
            return cast("Any", transformers.AutoTokenizer).from_pretrained(
                bare(self.source),
                local_files_only=not is_hub_id(self.source),
                trust_remote_code=False,
                **({"add_prefix_space": True} if self.kind == "token-classification" else {}),
            )
        except (OSError, ValueError) as error:
            raise DataError(
                f"there is no tokenizer in {self.source!r}: give a folder that holds one, or a "
                "name of the hub as hub:org/name"
            ) from error

    def _limit(self, tokenizer: Any) -> int:
        return min(self.max_length, int(tokenizer.model_max_length))


@final
class TextClassification(Task):
    """One label for a text, or for a pair of texts."""

    def prepare(self, table: Dataset) -> Sequences:
        """The texts as tokens, cut at the longest length."""
        labels = self._numbers(labels_of(table, self.label))
        tokenizer, texts = self._tokenizer, [self._texts(table, c) for c in self.columns]
        limit, ids, segments = self._limit(tokenizer), list[list[int]](), list[list[int]]()
        if len(texts) == 1:
            texts = [[opening(text, 2 * limit) for text in texts[0]]]
        for piece in pieces(len(table)):
            found = tokenizer(
                *(column[piece] for column in texts),
                truncation=True,
                max_length=limit,
                return_attention_mask=False,
                verbose=False,
            )
            ids += found["input_ids"]
            segments += found.get("token_type_ids", []) if len(texts) == 2 else []
        require_tokens(ids, tokenizer, " ".join(self.columns))
        pairs = Ragged.of(segments) if segments else None
        classes = torch.tensor(labels, dtype=torch.long)
        return Sequences(Ragged.of(ids), pad_of(tokenizer), classes, pairs)


@final
class TokenClassification(Task):
    """One label for each word; it stands at the word's first token."""

    def prepare(self, table: Dataset) -> Sequences:
        """The words as tokens, cut at the longest length."""
        tokenizer = self._tokenizer
        words, tags = values(table, self.columns[0]), labels_of(table, self.label)
        ids, labels = list[list[int]](), list[list[int]]()
        for piece in pieces(len(table)):
            found = tokenizer(
                words[piece],
                is_split_into_words=True,
                truncation=True,
                max_length=self._limit(tokenizer),
                verbose=False,
            )
            ids += found["input_ids"]
            flat = self._numbers([tag for row in tags[piece] for tag in row])
            for number, classes in enumerate(cut(flat, [len(row) for row in tags[piece]])):
                self._require_pairs(words[piece][number], classes, piece.start + number)
                labels.append(at_first_tokens(found.word_ids(number), classes))
        require_tokens(ids, tokenizer, self.columns[0])
        return Sequences(Ragged.of(ids), pad_of(tokenizer), Ragged.of(labels))

    def _require_pairs(self, words: Sequence[Any], classes: Sequence[int], row: int) -> None:
        if len(words) != len(classes):
            raise DataError(
                f"row {row} has {len(words)} in column {self.columns[0]!r} and {len(classes)} in "
                f"column {self.label!r}: every word needs one label"
            )

    def _measures(
        self, loss: float, truth: list[int], guess: list[int], sizes: list[int]
    ) -> dict[str, float]:
        """F1 of whole entities, where the labels are entity tags."""
        if not all(_ENTITY_TAG.fullmatch(label) for label in self.labels):
            return {"f1": macro_f1(truth, guess)}
        from seqeval.metrics import f1_score

        sides = [cut([self.labels[number] for number in s], sizes) for s in (truth, guess)]
        # Where there is no entity, to find none is right.
        return {"f1": float(cast("Any", f1_score)(*sides, zero_division=1))}


@dataclass(frozen=True)
class _Pictures(Task):
    """One label for a picture; `cubic` says how it is resized."""

    cubic: ClassVar[bool] = False

    def prepare(self, table: Dataset) -> Images:
        """The pictures, drawn to the size asked for; gray ones in three equal channels."""
        labels = self._numbers(labels_of(table, self.label))
        size = self.image_size
        pixels = torch.empty((len(table), 3, size, size), dtype=torch.uint8)
        for row, value in enumerate(pictures(table, self.columns[0])):
            try:
                pixels[row] = drawn(value, size, cubic=self.cubic)
            except (OSError, ValueError, TypeError) as error:
                place = f"row {row} of column {self.columns[0]!r}"
                raise DataError(f"{place} is no picture: {error}") from error
        mean, std = centre_of(self.source)
        return Images(pixels, torch.tensor(labels, dtype=torch.long), mean, std)


@final
class ImageClassification(_Pictures):
    """One label for a picture."""


@final
class ImageText(_Pictures):
    """One label for a picture, by the text that the template makes of each label."""

    cubic = True


@dataclass(frozen=True)
class _Language(Task):
    """Texts as tokens, each cut into blocks of its own."""

    def _blocks(self, table: Dataset, tokenizer: Any, *, framed: bool, end: int | None) -> Ragged:
        texts, rows = self._texts(table, self.columns[0]), list[list[int]]()
        for piece in pieces(len(table)):
            rows += tokenizer(texts[piece], add_special_tokens=framed, verbose=False)["input_ids"]
        require_tokens(rows, tokenizer, self.columns[0])
        closed = rows if end is None else [[*row, end] for row in rows]
        return Ragged.of(blocks(closed, self._limit(tokenizer), single=self.single))

    def _measures(
        self, loss: float, truth: list[int], guess: list[int], sizes: list[int]
    ) -> dict[str, float]:
        return {"perplexity": exp(min(loss, 700.0))}


@final
class CausalLanguage(_Language):
    """The next token, at each token."""

    def prepare(self, table: Dataset) -> Sequences:
        """The texts in blocks, each text closed by the end token."""
        tokenizer = self._tokenizer
        end = tokenizer.eos_token_id
        end = tokenizer.sep_token_id if end is None else end
        found = self._blocks(table, tokenizer, framed=False, end=end)
        return Sequences(found, pad_of(tokenizer), found)

    def _targets(self, labels: Tensor) -> Tensor:
        last = torch.full_like(labels[:, :1], NO_LABEL)
        return torch.cat([labels[:, 1:], last], 1)


@final
class MaskedLanguage(_Language):
    """The hidden tokens of a text."""

    def prepare(self, table: Dataset) -> Masked:
        """The texts in blocks, of which each batch hides some tokens."""
        tokenizer = self._tokenizer
        if tokenizer.mask_token_id is None:
            raise DataError(f"the tokenizer of {self.source!r} has no mask token: take causal-lm")
        found = self._blocks(table, tokenizer, framed=True, end=None)
        special = torch.tensor(tokenizer.all_special_ids)
        rows = Sequences(found, pad_of(tokenizer), found)
        return Masked(rows, keys_of(found), tokenizer.mask_token_id, special, len(tokenizer))


TASK_KINDS: dict[str, type[Task]] = {
    "text-classification": TextClassification,
    "token-classification": TokenClassification,
    "image-classification": ImageClassification,
    "image-text": ImageText,
    "causal-lm": CausalLanguage,
    "masked-lm": MaskedLanguage,
}
"""What a model can be asked to do; `catalog.TASKS` says for each how a model of it is loaded."""
TASK_NAMES: Registry[type[Task]] = Registry("task", TASK_KINDS)
"""All tasks that a study can name: those, and classes of `Task` with a `model_class` of theirs."""


def task_class(kind: str) -> type[Task]:
    """The class of a task, by its kind or where it stands: `package.module:Class`."""
    found = TASK_NAMES.find(kind).value
    if not isinstance(found, type) or not issubclass(found, Task):
        raise DataError(f"the task {kind!r} is no class of fedplan.data.Task: make it one")
    return found


def task(
    kind: str,
    *,
    columns: str | Sequence[str],
    label: str = "",
    labels: Iterable[str | int] = (),
    model: str = "",
    tokenizer: str = "",
    max_length: int = Task.max_length,
    image_size: int = Task.image_size,
    template: str = Task.template,
    single: bool = Task.single,
) -> Task:
    """A task by its kind.

    `columns` is where a row's input stands: one column, or two for pairs of texts. `labels` are all
    labels of all clients; their order does not matter. The tokenizer or the image processor is
    that of `model`, a folder or hub id, unless `tokenizer` names another. With `single` each row is
    one example, whatever is cut off.
    """
    made = task_class(kind)
    columns = (columns,) if isinstance(columns, str) else tuple(columns)
    most = 2 if kind == "text-classification" else 1
    if not 1 <= len(columns) <= most:
        raise DataError(f"{kind} has columns {list(columns)}: it takes {most} at most, and one")
    known = tuple(sorted({str(each) for each in labels}, key=label_order))
    if not kind.endswith("-lm") and not (label and known):
        raise DataError(f"{kind} needs the column of labels, and all labels: see labels_in")
    if kind.startswith("image") and image_size < 1:
        raise DataError(
            f"{kind} has image_size = {image_size}: say the side of the pictures that the model "
            "takes, such as 224"
        )
    if kind.endswith("-lm"):
        label, known = "", ()
    source = tokenizer or model
    sizes = max_length, image_size
    return made(kind, source, columns, label, known, *sizes, template, single)
