# SPDX-License-Identifier: Apache-2.0
"""Score sums: the counts that a client sends where no metrics of one client may leave.

The server knows their sum over clients only, under masks, or each client's counts with noise. It
computes metrics from the sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any, cast

import numpy as np

from fedplan.data.score_counts import Counts, ScoreCounts
from fedplan.federation.agreement import Agreement
from fedplan.tensors.serialization import SerializationError

GLOBAL, PERSONAL = "global", "personal"
"""Names of the global and of the personal model in metrics."""
VALIDATION = "validation"
"""Prefix of metrics on validation examples, the only ones by which something is chosen."""
SENDERS = "senders"
"""Key of the names of the clients in a sum of score counts."""
MAX_COUNT = 2**40
"""Largest magnitude of a count that the server accepts."""


@dataclass(frozen=True)
class ScoreVector:
    """A client's score counts as one vector: of the global model, then of the personal one.

    `counts`: what is counted of a model. `models`: names of the evaluated models; with the prefix
    `validation.` those on validation examples.
    `noise_multiplier`: standard deviation of each client's noise, divided by `sensitivity`.
    """

    counts: ScoreCounts
    models: tuple[str, ...] = (GLOBAL,)
    noise_multiplier: float = 0.0

    @staticmethod
    def of(
        agreement: Agreement, counts: ScoreCounts, *, personal: bool, validation: bool = False
    ) -> ScoreVector:
        """Return the vector of an agreement; `personal`: personal models are evaluated too.

        A plan without personal params has one model. `validation`: on validation examples, too.
        """
        models = (GLOBAL, PERSONAL) if personal and agreement.has_personal else (GLOBAL,)
        models += tuple(f"{VALIDATION}.{model}" for model in models) if validation else ()
        guarantee = agreement.guarantee
        noise = guarantee.evaluation_noise_multiplier if guarantee is not None else 0.0
        return ScoreVector(counts, models, noise)

    @property
    def size(self) -> int:
        """Length of the vector."""
        return len(self.models) * self.counts.size

    @property
    def sensitivity(self) -> float:
        """L2 norm of the vector of one example."""
        return sqrt(len(self.models)) * self.counts.sensitivity

    def from_json(self, counts: Any) -> Counts:
        """Return a client's counts from untrusted JSON; raise SerializationError if invalid."""
        numbers = cast("list[Any]", counts if isinstance(counts, list) else [])
        valid = all(type(each) is int and abs(each) <= MAX_COUNT for each in numbers)
        if len(numbers) != self.size or not valid:
            raise SerializationError(f"these are not {self.size} score counts: {str(counts)[:60]}")
        return np.array(numbers, np.int64)

    def combine(
        self, total: Counts | None, clients: Collection[str], silent: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the metrics of a sum of counts, as JSON-compatible values.

        `total`: sum over `clients`; None if there is none. `silent`: reason of each client that is
        not in the sum. Keys: `global` and `personal` (metrics by name, with intervals),
        `validation` (the same on validation examples), `clients` (number of clients in the sum),
        `senders` (their names), `silent`. Of single clients there is no number.
        """
        by_model, validation = dict[str, Any](), dict[str, Any]()
        if total is not None and clients:
            stddev = self.noise_multiplier * self.sensitivity * sqrt(len(clients))
            parts = np.split(total, len(self.models))
            for model, part in zip(self.models, parts, strict=True):
                prefix, _, name = model.rpartition(".")
                (validation if prefix else by_model)[name] = self.counts.metrics(part, stddev)
            by_model |= {VALIDATION: validation} if validation else {}
            by_model |= {"clients": len(clients), SENDERS: sorted(clients)}
        return {**by_model, "silent": dict(sorted(silent.items()))}
