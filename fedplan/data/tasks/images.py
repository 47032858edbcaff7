# SPDX-License-Identifier: Apache-2.0
"""Image tasks: one label per image, by a classification head or by texts of the labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from fedplan.data.examples import ImageExamples, read_images
from fedplan.data.tables import DataError, label_values
from fedplan.data.tasks.definition import Task
from fedplan.models.images import image_mean_std, image_tensor

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class _ImageTask(Task):
    """A task with one label per image; `cubic` selects bicubic resizing."""

    cubic: ClassVar[bool] = False

    def prepare(self, table: Dataset) -> ImageExamples:
        """Decode the images of a table, resize to `image_size`, and return examples with classes.

        Gray images get three equal channels. Raises DataError if a cell is no image, or a label is
        unknown.
        """
        labels = self._class_indices(label_values(table, self.label))
        size = self.image_size
        pixels = torch.empty((len(table), 3, size, size), dtype=torch.uint8)
        for row, value in enumerate(read_images(table, self.columns[0])):
            try:
                pixels[row] = image_tensor(value, size, cubic=self.cubic)
            except (OSError, ValueError, TypeError) as error:
                place = f"row {row} of column {self.columns[0]!r}"
                raise DataError(f"{place} is not an image: {error}") from error
        mean, std = image_mean_std(self.source)
        return ImageExamples(pixels, torch.tensor(labels, dtype=torch.long), mean, std)


@final
class ImageClassification(_ImageTask):
    """One label per image, by a classification head."""


@final
class ImageText(_ImageTask):
    """One label per image, by the similarity to a text made from each label."""

    cubic = True
