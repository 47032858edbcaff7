# SPDX-License-Identifier: Apache-2.0
"""Predictions: what a model says about examples, beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model for examples, with one row for each prediction.

    `truth` and `predicted`: classes or tokens as indices, numbers, or rows of 0 and 1 for any of
    some labels. `probabilities`: a column for each class or label; None for numbers and tokens.
    `losses`: the loss of each prediction. `sizes`: the number of predictions of each example, which
    is 1 unless an example has a label for each word or token. `texts`: of each example the true
    text and the generated one, if a metric asked for them.
    """

    truth: Array
    predicted: Array
    probabilities: Array | None
    losses: Array
    sizes: Array
    texts: Array | None = None

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.sizes)

    @staticmethod
    def join(parts: Sequence[Predictions]) -> Predictions:
        """Return the predictions of all parts, in order; there must be one part or more."""
        probabilities = [p.probabilities for p in parts if p.probabilities is not None]
        texts = [p.texts for p in parts if p.texts is not None]
        return Predictions(
            np.concatenate([part.truth for part in parts]),
            np.concatenate([part.predicted for part in parts]),
            np.concatenate(probabilities) if probabilities else None,
            np.concatenate([part.losses for part in parts]),
            np.concatenate([part.sizes for part in parts]),
            np.concatenate(texts) if texts else None,
        )

    def select(self, examples: Array) -> Predictions:
        """Return the predictions of the examples at these indices, which may repeat."""
        rows = examples
        if not (self.sizes == 1).all():
            spans: list[Array] = np.split(np.arange(len(self.truth)), self.sizes.cumsum()[:-1])
            rows = np.concatenate([spans[int(i)] for i in examples])
        return Predictions(
            self.truth[rows],
            self.predicted[rows],
            None if self.probabilities is None else self.probabilities[rows],
            self.losses[rows],
            self.sizes[examples],
            None if self.texts is None else self.texts[examples],
        )
