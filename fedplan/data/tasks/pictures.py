# SPDX-License-Identifier: Apache-2.0
"""Pictures: one label for each, by a head of classes or by the texts of the labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from fedplan.data.examples import Images, pictures
from fedplan.data.tables import DataError, labels_of
from fedplan.data.tasks.definition import Task
from fedplan.models.images import centre_of, drawn

if TYPE_CHECKING:
    from datasets import Dataset


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
