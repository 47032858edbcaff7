# SPDX-License-Identifier: Apache-2.0
"""Wires: what is done to tensors on their way, as codecs one after another, and as a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedplan.reader import Table
from fedplan.tensors.codecs import (
    Cast,
    Delta,
    Form,
    Int8,
    Tensors,
    Wire,
    WireError,
    require_alike,
    still,
)
from fedplan.tensors.sparse import Sparse


@dataclass(frozen=True)
class Pipe(Wire):
    """Several codecs: each codes the part "" of the one before it, and no other part.

    With no codec in it, it passes values on as they are, bit for bit.
    """

    wires: tuple[Wire, ...]

    @property
    def text(self) -> str:
        if not self.wires:
            return "plain()"
        return f"pipe({', '.join(wire.text for wire in self.wires)})"

    def encode(
        self, values: Tensors, base: Tensors, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The values coded; with no codec, the same tensors, so that their digests are known."""
        if self.wires:
            return super().encode(values, base, generator)
        require_alike(values, base)
        return {name: still(values[name]) for name in sorted(values)}

    def decode(self, coded: Tensors, base: Tensors) -> dict[str, Tensor]:
        """The values; with no codec, what came."""
        if self.wires:
            return super().decode(coded, base)
        require_alike(coded, base)
        return {name: coded[name].to(own.device) for name, own in base.items()}

    def form(self, whole: Form) -> dict[str, Form]:
        parts = {"": whole}
        for wire in self.wires:
            parts |= wire.form(parts[""])
        return parts

    def code(self, value: Tensor, base: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        parts = {"": value}
        for wire in self.wires:
            parts |= wire.code(parts[""], base, generator)
        return parts

    def restore(self, parts: Tensors, whole: Form, base: Tensor) -> Tensor:
        wholes = [whole]
        for wire in self.wires[:-1]:
            wholes.append(wire.form(wholes[-1])[""])
        found = dict(parts)
        for wire, each in reversed([*zip(self.wires, wholes, strict=False)]):
            found[""] = wire.restore(found, each, base)
        return found[""]

    def error(self, value: Tensor, base: Tensor, later: float) -> float:
        # No codec but the last rounds by chance, so what each codes is known beforehand.
        taken = [value]
        for wire in self.wires[:-1]:
            taken.append(wire.code(taken[-1], base, torch.Generator())[""])
        for wire, each in reversed([*zip(self.wires, taken, strict=False)]):
            later = wire.error(each, base, later)
        return later


def plain() -> Wire:
    """Values as they are."""
    return Pipe(())


def delta() -> Wire:
    """What is added to the base."""
    return Delta()


def bf16() -> Wire:
    """Two bytes a number: the range of float32, and three digits."""
    return Cast(torch.bfloat16)


def half() -> Wire:
    """Two bytes a number: up to 65504, and four digits."""
    return Cast(torch.float16)


def int8() -> Wire:
    """One byte a number and one scale a tensor, rounded by chance."""
    return Int8()


def topk(fraction: float) -> Wire:
    """The numbers of the largest magnitude. Put delta before it: the rest become zero."""
    return Sparse("index", _a_fraction(fraction, "topk"))


def prune(fraction: float) -> Wire:
    """The rows of the largest norm. Put delta before it: the rest become zero."""
    return Sparse("rows", _a_fraction(fraction, "prune"))


def pipe(*wires: Wire) -> Wire:
    """One codec after another; `pipe()` is `plain()`.

    >>> pipe(delta(), pipe(plain(), topk(0.1)), int8()).text
    'pipe(delta(), topk(0.1), int8())'
    """
    flat = list[Wire]()
    for wire in wires:
        flat += wire.wires if isinstance(wire, Pipe) else (_a_wire(wire, "pipe"),)
    _require_order([wire.text.partition("(")[0] for wire in flat])
    return flat[0] if len(flat) == 1 else Pipe(tuple(flat))


CODECS: dict[str, Callable[..., Wire]] = {
    f.__name__: f for f in (plain, delta, bf16, half, int8, topk, prune, pipe)
}
"""The codecs by name."""


def parse_wire(text: str) -> Wire:
    """Read a wire, such as `pipe(delta(), bf16())`. Nothing is evaluated; errors point."""
    return TABLE.read(text, lambda value: _a_wire(value, "a wire"))


TABLE = Table(
    name="the language of wires",
    calls=CODECS,
    error=WireError,
    longest=1000,
    remedy="write such as pipe(delta(), bf16())",
)


def _a_fraction(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise WireError(f"{name} takes a fraction over 0 and up to 1, such as 0.1, not {value!s}")
    return float(value)


def _a_wire(value: Any, name: str) -> Wire:
    if not isinstance(value, Wire):
        raise WireError(f"{name} takes codecs such as delta(), not {value!s}")
    return value


def _require_order(names: list[str]) -> None:
    """Refuse pipes in which a codec would do nothing, or not what it says."""
    for name in names:
        if names.count(name) > 1:
            raise WireError(f"{name} stands twice in a pipe: leave one of them out")
    if "delta" in names[1:]:
        raise WireError(f"delta stands after {names[0]}: put it first, next to the base")
    if "topk" in names and "prune" in names[names.index("topk") :]:
        raise WireError("prune stands after topk, which leaves no rows: put it before")
    if "int8" in names[:-1]:
        raise WireError("int8 stands before another codec, and they code floats: put it last")
