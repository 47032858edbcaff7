# SPDX-License-Identifier: Apache-2.0
"""Compression of updates: the codecs by name, pipelines of codecs, and their text form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedplan.reader import Grammar
from fedplan.tensors.codecs import (
    Cast,
    Codec,
    CodecError,
    Delta,
    Parts,
    Quantize,
    Sparse,
    Tensors,
    TensorSpec,
    detached,
    require_same_specs,
)


@dataclass(frozen=True)
class Pipeline(Codec):
    """Codec that applies `codecs` in order; make one with `pipe`, which checks the order.

    Each codec encodes the main part ("") of the codec before; all other parts are sent unchanged.
    An empty pipeline passes values on unchanged, bit for bit.
    """

    codecs: tuple[Codec, ...]

    @property
    def text(self) -> str:
        if not self.codecs:
            return "plain()"
        return f"pipe({', '.join(codec.text for codec in self.codecs)})"

    def encode(self, values: Tensors, base: Tensors, generator: torch.Generator) -> Parts:
        """Return the encoded parts by name, as `Codec.encode`.

        An empty pipeline returns the tensor objects of `values` (detached if they track gradients),
        also if not finite, and ignores `generator`. Raises CodecError as `Codec.encode`.
        """
        if self.codecs:
            return super().encode(values, base, generator)
        # The same objects, so that a DigestCache already has their digests.
        require_same_specs(values, base)
        return {name: detached(values[name]) for name in sorted(values)}

    def decode(self, coded: Tensors, base: Tensors) -> dict[str, Tensor]:
        """Return the decoded values on the devices of `base`, as `Codec.decode`.

        An empty pipeline returns the tensors of `coded`, and checks only names, shapes and dtypes.
        Raises CodecError as `Codec.decode`.
        """
        if self.codecs:
            return super().decode(coded, base)
        require_same_specs(coded, base)
        return {name: coded[name].to(base_value.device) for name, base_value in base.items()}

    def coded_specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        parts = {"": spec}
        for codec in self.codecs:
            parts |= codec.coded_specs(parts[""])
        return parts

    def encode_tensor(self, value: Tensor, base: Tensor, generator: torch.Generator) -> Parts:
        parts = {"": value}
        for codec in self.codecs:
            parts |= codec.encode_tensor(parts[""], base, generator)
        return parts

    def decode_tensor(self, parts: Tensors, spec: TensorSpec, base: Tensor) -> Tensor:
        input_specs = [spec]
        for codec in self.codecs[:-1]:
            input_specs.append(codec.coded_specs(input_specs[-1])[""])
        parts = dict(parts)
        for codec, input_spec in reversed([*zip(self.codecs, input_specs, strict=False)]):
            parts[""] = codec.decode_tensor(parts, input_spec, base)
        return parts[""]

    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        # Only the last codec may round stochastically, so the input of each one is known.
        inputs = [value]
        for codec in self.codecs[:-1]:
            inputs.append(codec.encode_tensor(inputs[-1], base, torch.Generator())[""])
        for codec, tensor in reversed([*zip(self.codecs, inputs, strict=False)]):
            later = codec.max_error(tensor, base, later)
        return later


def plain() -> Codec:
    """Send values unchanged."""
    return Pipeline(())


def delta() -> Codec:
    """Send value minus base."""
    return Delta()


def bf16() -> Codec:
    """Cast to bfloat16: two bytes a number, the range of float32, about three digits."""
    return Cast(torch.bfloat16)


def half() -> Codec:
    """Cast to float16: two bytes a number, values up to 65504, about four digits."""
    return Cast(torch.float16)


def int8() -> Codec:
    """Quantize to int8: one byte a number, one scale a tensor, stochastic rounding."""
    return Quantize(8)


def int4() -> Codec:
    """Quantize to 4 bits a number, with stochastic rounding.

    There is one scale a row, and one in all for a tensor of one dimension, as topk makes.
    """
    return Quantize(4)


def topk(fraction: float) -> Codec:
    """Send the numbers of largest magnitude; the rest become zero, so put delta before it."""
    return Sparse("index", _require_fraction(fraction, "topk"))


def prune(fraction: float) -> Codec:
    """Send the rows of largest norm; the rest become zero, so put delta before it."""
    return Sparse("rows", _require_fraction(fraction, "prune"))


def pipe(*codecs: Codec) -> Codec:
    """Join codecs and pipelines into one codec; `pipe()` is `plain()`.

    Raises CodecError for a repeated codec, or an order in which a codec has no effect.

    >>> pipe(delta(), pipe(plain(), topk(0.1)), int8()).text
    'pipe(delta(), topk(0.1), int8())'
    """
    flat = list[Codec]()
    for codec in codecs:
        flat += codec.codecs if isinstance(codec, Pipeline) else (_require_codec(codec, "pipe"),)
    names = [codec.text.partition("(")[0] for codec in flat]
    for name in names:
        if names.count(name) > 1:
            raise CodecError(f"{name} appears twice in a pipe: leave one of them out")
    if "delta" in names[1:]:
        raise CodecError(f"delta comes after {names[0]}: put it first, next to the base")
    if "topk" in names and "prune" in names[names.index("topk") :]:
        raise CodecError("prune comes after topk, which leaves no rows: put prune first")
    for codec, name in zip(flat[:-1], names, strict=False):
        if not codec.coded_specs(TensorSpec((1,), torch.float32))[""].dtype.is_floating_point:
            raise CodecError(
                f"{name} comes before another codec, and codecs take floats: put it last"
            )
    return flat[0] if len(flat) == 1 else Pipeline(tuple(flat))


CODECS: dict[str, Callable[..., Codec]] = {
    f.__name__: f for f in (plain, delta, bf16, half, int8, int4, topk, prune, pipe)
}
"""Functions that make a codec, by their name in the text form."""


def parse_codec(text: str) -> Codec:
    """Return the codec of a text such as `pipe(delta(), bf16())`, without evaluating code.

    Raises CodecError, with the position of the mistake, for a text that is not a valid codec.
    """
    return CODEC_LANGUAGE.read(text, lambda value: _require_codec(value, "the compression"))


CODEC_LANGUAGE = Grammar(
    name="the codec language",
    calls=CODECS,
    error=CodecError,
    max_length=1000,
    remedy="write a codec such as pipe(delta(), bf16())",
)
"""Grammar of codec texts."""


def _require_fraction(value: Any, name: str) -> float:
    if type(value) not in (int, float) or not 0 < value <= 1:
        raise CodecError(f"{name} takes a fraction over 0 and up to 1, such as 0.1, not {value!s}")
    return float(value)


def _require_codec(value: Any, name: str) -> Codec:
    if not isinstance(value, Codec):
        raise CodecError(f"{name} takes codecs such as delta(), not {value!s}")
    return value
