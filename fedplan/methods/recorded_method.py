# SPDX-License-Identifier: Apache-2.0
"""Methods read back from the lines of a run: they can be checked, not run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedplan.errors import FedplanError
from fedplan.language.parser import parse
from fedplan.methods.lora_products import average_separately, parse_product_rule
from fedplan.methods.method import Method
from fedplan.tensors.compression import parse_codec
from fedplan.training.fit import Fit


@final
@dataclass(frozen=True)
class RecordedMethod(Method):
    """A method read back from the lines of a run: enough to check the run, not to continue.

    Made by `parse_recorded_method`. `recorded_lines`: `Method.lines` of the original method. Plan,
    joint_choice, absent, aux, compression and lora_aggregation are as in the original; other fields
    have default values. `fit` raises FedplanError.
    """

    recorded_lines: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines as they were recorded."""
        return self.recorded_lines

    @property
    def fit(self) -> Fit:
        """Raises FedplanError: the code of the method is not known."""
        raise FedplanError("this method was given from Python: pass it again to continue its run")


def parse_recorded_method(lines: Sequence[str]) -> RecordedMethod:
    """Return a method read back from the `lines` of a Method.

    Raises FedplanError if lines are missing or cannot be parsed.
    """
    texts = {key: text for key, _, text in (line.partition(" ") for line in lines)}
    try:
        return RecordedMethod(
            plan=parse(texts["plan"].partition(" ")[2]),
            joint_choice=json.loads(texts["joint_choice"]),
            absent=json.loads(texts["absent"]),
            aux=tuple(json.loads(texts["aux"])),
            compression=parse_codec(texts["compression"]),
            lora_aggregation=parse_product_rule(
                texts.get("lora_aggregation", average_separately().text)
            ),
            recorded_lines=tuple(lines),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise FedplanError(f"these lines do not describe a method: {error}") from error
