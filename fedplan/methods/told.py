# SPDX-License-Identifier: Apache-2.0
"""Told methods: one whose words are known and whose code is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedplan.errors import FedplanError
from fedplan.language.parser import parse
from fedplan.methods.method import Method
from fedplan.methods.products import apart, product_told
from fedplan.tensors.wire import parse_wire
from fedplan.training.fit import Fit


@final
@dataclass(frozen=True)
class Told(Method):
    """A method by its lines: what it did can be checked by them, and it cannot be run."""

    said: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines that it was told by."""
        return self.said

    @property
    def fit(self) -> Fit:
        """There is none."""
        raise FedplanError("this method was given from Python: give it again to go on with its run")


def told_method(lines: Sequence[str]) -> Told:
    """The method that some lines of a `Method` tell of."""
    said = {word: text for word, _, text in (line.partition(" ") for line in lines)}
    try:
        return Told(
            plan=parse(said["plan"].partition(" ")[2]),
            together=json.loads(said["together"]),
            absent=json.loads(said["absent"]),
            riders=tuple(json.loads(said["riders"])),
            wire=parse_wire(said["wire"]),
            product=product_told(said.get("product", apart().text)),
            said=tuple(lines),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise FedplanError(f"these are not the lines of a method: {error}") from error
