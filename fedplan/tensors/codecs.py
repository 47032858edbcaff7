# SPDX-License-Identifier: Apache-2.0
"""Codecs: encode a tensor in fewer bytes and decode it, with known size and error bound."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedplan.errors import TextError
from fedplan.tensors.named import Tensors, aux_name, is_aux
from fedplan.tensors.positions import pack_positions, packed_size, unpack_positions

Parts = dict[str, Tensor]
"""Encoded parts: of one tensor by part name ("" is the main part), or of all by full name."""

FLOAT_BY_SIZE = {8: torch.float64, 4: torch.float32, 2: torch.float16}
"""Float dtype by bytes per element. float16 also stands for bfloat16, which has the same size."""

COMPRESSIBLE = frozenset((*FLOAT_BY_SIZE.values(), torch.bfloat16))
"""Dtypes that codecs encode; tensors of other dtypes are sent unchanged."""

CODED_PART_NAMES = frozenset({"scale", "index", "rows"})
"""Names of the extra parts of an encoded tensor; an auxiliary tensor may not use them."""
ROUNDING_SLACK = 1.01
"""Factor on error bounds for the rounding inside a codec's arithmetic."""


class CodecError(TextError):
    """Invalid codec text, or tensors that the codec cannot encode or decode."""


class TensorSpec(NamedTuple):
    """Shape and dtype of a tensor, with its size in bytes; `TensorSpec.of(tensor)` reads them."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype for arithmetic: float64 for float64 tensors, else float32."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Codec(ABC):
    """Base class of encodings of named tensors for sending; codecs with equal `text` are equal.

    Sender (`encode`) and receiver (`decode`) have the same base: the global values that the client
    started from, under the same names. The base gives names, shapes and dtypes, so the encoded
    bytes contain values only.

    A subclass defines `coded_specs`, `encode_tensor`, `decode_tensor` and `max_error`, which treat
    one float tensor as a dict of parts. The main part has the key "" and is sent under the tensor's
    own name; the next codec of a pipeline encodes the main part. Other parts are sent as
    `name#part`. Methods change no argument, except that encoding draws from the generator.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """The codec as text that `parse_codec` reads."""

    @abstractmethod
    def coded_specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        """Return the spec of each part that encoding a tensor of `spec` gives."""

    @abstractmethod
    def encode_tensor(self, value: Tensor, base: Tensor, generator: torch.Generator) -> Parts:
        """Return the encoded parts of one tensor; `generator` draws stochastic rounding."""

    @abstractmethod
    def decode_tensor(self, parts: Tensors, spec: TensorSpec, base: Tensor) -> Tensor:
        """Return the tensor of `spec` from its parts, whose specs were checked before."""

    @abstractmethod
    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        """Return the largest absolute error of one tensor after encoding and decoding.

        `later` is the error that later codecs of the pipeline add to the main part.
        """

    def encode(self, values: Tensors, base: Tensors, generator: torch.Generator) -> Parts:
        """Return all encoded parts by name; `generator` draws stochastic rounding.

        Tensors of dtypes outside COMPRESSIBLE are passed on uncopied. Raises CodecError if names,
        shapes or dtypes differ from `base`, or if a value is not finite.
        """
        _require_specs(values, _base_specs(base))
        coded = dict[str, Tensor]()
        # Sorted by name: the order decides which random numbers each tensor gets.
        for name in sorted(values):
            parts = {"": detached(values[name])}
            if parts[""].dtype in COMPRESSIBLE:
                with _name_errors(name):
                    parts = self.encode_tensor(parts[""], base[name].detach(), generator)
            coded |= {_part_key(name, part): tensor for part, tensor in parts.items()}
        return coded

    def decode(self, coded: Tensors, base: Tensors) -> dict[str, Tensor]:
        """Return the decoded values by name, on the devices of `base`, within `error_bounds`.

        Raises CodecError if names, shapes or dtypes of `coded` are not those that `encode` gives
        for this base, or for an invalid value, as a non-finite number, a scale or an index out of
        range.
        """
        specs = {
            name: self.coded_specs(spec) if spec.dtype in COMPRESSIBLE else {"": spec}
            for name, spec in _base_specs(base).items()
        }
        _require_specs(
            coded,
            {_part_key(name, part): specs[name][part] for name in specs for part in specs[name]},
        )
        values = dict[str, Tensor]()
        for name, base_value in base.items():
            parts = {
                part: coded[_part_key(name, part)].to(base_value.device) for part in specs[name]
            }
            values[name] = parts[""]
            if base_value.dtype in COMPRESSIBLE:
                with _name_errors(name):
                    spec = TensorSpec.of(base_value)
                    values[name] = self.decode_tensor(parts, spec, base_value.detach())
        return values

    def error_bounds(self, values: Tensors, base: Tensors) -> dict[str, float]:
        """Return by name the largest absolute error of encoding and decoding `values` with `base`.

        The bound is 0 for dtypes outside COMPRESSIBLE. Raises CodecError as `encode` does.
        """
        _require_specs(values, _base_specs(base))
        bounds = dict.fromkeys(values, 0.0)
        for name, value in values.items():
            if value.dtype in COMPRESSIBLE:
                with _name_errors(name):
                    bounds[name] = self.max_error(value.detach(), base[name].detach(), 0.0)
        return bounds

    def nbytes(self, shape: Sequence[int], itemsize: int) -> int:
        """Return the encoded bytes of a float tensor of `shape` with `itemsize` bytes per number.

        Raises CodecError if no float dtype has that size.
        """
        if itemsize not in FLOAT_BY_SIZE:
            raise CodecError(
                f"itemsize is {itemsize}: a float has one of {sorted(FLOAT_BY_SIZE)} bytes"
            )
        parts = self.coded_specs(TensorSpec(tuple(shape), FLOAT_BY_SIZE[itemsize]))
        return sum(spec.nbytes for spec in parts.values())

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Delta(Codec):
    """Codec that sends value minus base; the receiver adds the base again.

    The error is one rounding of the difference and one of the sum.
    """

    @property
    def text(self) -> str:
        return "delta()"

    def coded_specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        return {"": spec}

    def encode_tensor(self, value: Tensor, base: Tensor, generator: torch.Generator) -> Parts:
        dtype = TensorSpec.of(value).compute_dtype
        return {"": require_finite((value.to(dtype) - base.to(dtype)).to(value.dtype))}

    def decode_tensor(self, parts: Tensors, spec: TensorSpec, base: Tensor) -> Tensor:
        difference = require_finite(parts[""]).to(spec.compute_dtype)
        return clamp_to_dtype(base.to(spec.compute_dtype) + difference, spec.dtype)

    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        difference = self.encode_tensor(value, base, torch.Generator())[""]
        error = later + rounding_error(value.dtype, max_magnitude(difference))
        return error + rounding_error(value.dtype, max_magnitude(value) + error)


@dataclass(frozen=True)
class Cast(Codec):
    """Codec that casts values to `dtype`, torch.float16 or torch.bfloat16.

    Values beyond the range of `dtype` become the largest number of `dtype`, with the same sign.
    """

    dtype: torch.dtype

    @property
    def text(self) -> str:
        return "half()" if self.dtype == torch.float16 else "bf16()"

    def coded_specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        return {"": TensorSpec(spec.shape, self.dtype)}

    def encode_tensor(self, value: Tensor, base: Tensor, generator: torch.Generator) -> Parts:
        return {"": clamp_to_dtype(require_finite(value), self.dtype)}

    def decode_tensor(self, parts: Tensors, spec: TensorSpec, base: Tensor) -> Tensor:
        return clamp_to_dtype(require_finite(parts[""]), spec.dtype)

    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        size, limit = max_magnitude(value), torch.finfo(self.dtype).max
        error = later + max(0.0, size - limit) + rounding_error(self.dtype, min(size, limit))
        exact_back = torch.promote_types(self.dtype, value.dtype) == value.dtype
        return error if exact_back else error + rounding_error(value.dtype, size + error)


@dataclass(frozen=True)
class Quantize(Codec):
    """Codec that sends whole steps of a scale, of `bits` 8 or 4, with unbiased stochastic rounding.

    A step is the largest magnitude / 127 or / 7, so that the error is at most one step. With 8 bits
    a tensor has one scale. With 4 bits each row of a matrix has its own, and two numbers share a
    byte.
    """

    bits: int

    @property
    def text(self) -> str:
        return f"int{self.bits}()"

    @property
    def _most(self) -> int:
        """Most steps."""
        return 2 ** (self.bits - 1) - 1

    def coded_specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        rows = spec.shape[:1] if self.bits == 4 and len(spec.shape) > 1 else ()
        steps = TensorSpec(spec.shape, torch.int8)
        if self.bits == 4:
            steps = TensorSpec(((math.prod(spec.shape) + 1) // 2,), torch.uint8)
        return {"": steps, "scale": TensorSpec(rows, spec.compute_dtype)}

    def encode_tensor(self, value: Tensor, base: Tensor, generator: torch.Generator) -> Parts:
        scale = self._scale(value)
        exact = value.to(scale.dtype) / _beside(scale, value)
        lower = exact.floor()
        draws = torch.rand(
            exact.shape, generator=generator, dtype=scale.dtype, device=generator.device
        )
        rounded = lower + (draws.to(value.device) < exact - lower)
        steps = rounded.clamp(-self._most, self._most).to(torch.int8)
        return {"": steps if self.bits == 8 else _pack_nibbles(steps), "scale": scale}

    def decode_tensor(self, parts: Tensors, spec: TensorSpec, base: Tensor) -> Tensor:
        steps, scale = parts[""], parts["scale"]
        if self.bits == 4:
            steps = _unpack_nibbles(steps, math.prod(spec.shape)).reshape(spec.shape)
        valid = (scale >= torch.finfo(scale.dtype).tiny) & (scale < math.inf)
        if not valid.all():
            raise CodecError(f"the scale is {scale[~valid][0].item()}, which {self} never sends")
        if (steps < -self._most).any():
            raise CodecError(
                f"a step is {-self._most - 1}, and {self} sends steps from {-self._most} to "
                f"{self._most}"
            )
        return clamp_to_dtype(steps.to(scale.dtype) * _beside(scale, steps), spec.dtype)

    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        step = max_magnitude(self._scale(value)) * ROUNDING_SLACK
        return later + step + rounding_error(value.dtype, max_magnitude(value) + step)

    def _scale(self, value: Tensor) -> Tensor:
        """Return the scales: largest magnitude / most steps, at least the smallest normal number.

        Raises CodecError if a value is not finite.
        """
        dtype, largest = TensorSpec.of(value).compute_dtype, max_magnitude(value)
        if self.bits == 4 and value.dim() > 1:
            rows = value.reshape(len(value), math.prod(value.shape[1:])).to(dtype).abs()
            magnitudes = rows.amax(dim=1) if rows.numel() else rows.new_zeros(len(rows))
            return (magnitudes / self._most).clamp(min=torch.finfo(dtype).tiny)
        scale = max(largest / self._most, torch.finfo(dtype).tiny)
        return torch.tensor(scale, dtype=dtype, device=value.device)


def _beside(scale: Tensor, value: Tensor) -> Tensor:
    """Return the scales of rows in a shape that multiplies `value`; a single scale as it is."""
    return scale.reshape(-1, *[1] * (value.dim() - 1)) if scale.dim() else scale


def _pack_nibbles(steps: Tensor) -> Tensor:
    """Return steps from -8 to 7 as bytes, two in each; an odd last one has the lower half."""
    flat = steps.reshape(-1).to(torch.int16) + 8
    flat = torch.nn.functional.pad(flat, (0, len(flat) % 2))
    return (flat[::2] + 16 * flat[1::2]).to(torch.uint8)


def _unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """Return the first `count` steps of bytes that `_pack_nibbles` made.

    Raises CodecError if half a byte behind the last step is not 0.
    """
    halves = torch.stack([packed % 16, packed // 16], dim=1).reshape(-1)
    if halves[count:].any():
        raise CodecError("half a byte behind the last step is set")
    return halves[:count].to(torch.int8) - 8


def detached(value: Tensor) -> Tensor:
    """Return the value without gradient tracking; the same object if it tracks none."""
    return value.detach() if value.requires_grad else value


def require_same_specs(tensors: Tensors, base: Tensors) -> None:
    """Raise CodecError if names, shapes or dtypes of `tensors` and `base` differ.

    Raises CodecError also for a name in `base` that contains '#'.
    """
    same = tensors.keys() == base.keys() and not any(map(is_aux, base))
    for name in base if same else ():
        one, other = tensors[name], base[name]
        same = same and one.dtype == other.dtype and one.shape == other.shape
    if not same:
        _require_specs(tensors, _base_specs(base))


def _part_key(name: str, part: str) -> str:
    return aux_name(name, part) if part else name


@contextmanager
def _name_errors(name: str) -> Generator[None]:
    """Prefix the message of a CodecError raised in the body with the tensor's name."""
    try:
        yield
    except CodecError as error:
        raise CodecError(f"{name!r}: {error}") from error


def _base_specs(base: Tensors) -> dict[str, TensorSpec]:
    """Return the spec of each base tensor; raise CodecError for a name with '#'."""
    for name in base:
        if is_aux(name):
            raise CodecError(f"{name!r} contains '#', which separates parts of a name: rename it")
    return {name: TensorSpec.of(tensor) for name, tensor in base.items()}


def _require_specs(tensors: Tensors, specs: Mapping[str, TensorSpec]) -> None:
    """Raise CodecError if the tensors' names, shapes or dtypes differ from `specs`."""
    for name in sorted(tensors.keys() ^ specs.keys(), key=repr):
        fault = "is missing" if name in specs else "is not expected"
        raise CodecError(f"{name!r} {fault}: both ends need the same codec, plan and base")
    for name, spec in specs.items():
        if TensorSpec.of(tensors[name]) != spec:
            raise CodecError(
                f"{name!r} has shape {tuple(tensors[name].shape)} and dtype {tensors[name].dtype}, "
                f"expected {spec.shape} and {spec.dtype}: both ends need the same codec, plan and "
                "base"
            )


def max_magnitude(value: Tensor) -> float:
    """Return the largest absolute value, 0 if empty; raise CodecError if any is not finite."""
    if value.numel() == 0:
        return 0.0
    low, high = torch.aminmax(value)
    magnitude = max(-low.item(), high.item())
    if not math.isfinite(low.item()) or not math.isfinite(magnitude):
        raise CodecError("some values are not finite, and only plain() sends those")
    return magnitude


def require_finite(value: Tensor) -> Tensor:
    """Return the value itself; raise CodecError if any element is not finite."""
    max_magnitude(value)
    return value


def clamp_to_dtype(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to a float dtype; values beyond its range become its largest number."""
    limit = torch.finfo(dtype).max
    return value.to(torch.promote_types(value.dtype, dtype)).clamp(-limit, limit).to(dtype)


def rounding_error(dtype: torch.dtype, magnitude: float) -> float:
    """Return the largest error of rounding a number up to `magnitude` to the dtype."""
    info = torch.finfo(dtype)
    return ROUNDING_SLACK * (magnitude * info.eps / 2 + info.smallest_normal * info.eps)


@dataclass(frozen=True)
class Sparse(Codec):
    """Codec that sends the `fraction` of numbers or rows with the largest norm, rounded up.

    All others decode to zero. `part_name`: "index" selects single numbers (`topk`), "rows" selects
    rows (`prune`); it also names the part with their packed positions. With "rows", a tensor of
    fewer than two dimensions is sent whole. Encoding raises CodecError for non-finite values;
    decoding also for invalid positions.
    """

    part_name: str
    fraction: float

    @property
    def text(self) -> str:
        return f"{'prune' if self.part_name == 'rows' else 'topk'}({self.fraction!r})"

    def coded_specs(self, spec: TensorSpec) -> dict[str, TensorSpec]:
        item_shape = self._item_shape(spec.shape)
        if item_shape is None:
            return {"": spec}
        count = _sent_count(self.fraction, item_shape[0])
        return {
            "": TensorSpec((count, *item_shape[1:]), spec.dtype),
            self.part_name: TensorSpec((packed_size(count, item_shape[0]),), torch.uint8),
        }

    def encode_tensor(self, value: Tensor, base: Tensor, generator: torch.Generator) -> Parts:
        item_shape = self._item_shape(require_finite(value).shape)
        if item_shape is None:
            return {"": value}
        items = value.reshape(item_shape)
        indices = _largest_items(items, self.fraction)
        return {"": items[indices], self.part_name: pack_positions(indices, len(items))}

    def decode_tensor(self, parts: Tensors, spec: TensorSpec, base: Tensor) -> Tensor:
        item_shape = self._item_shape(spec.shape)
        if item_shape is None:
            return require_finite(parts[""])
        items = torch.zeros(item_shape, dtype=spec.dtype, device=base.device)
        values, count = require_finite(parts[""]), len(items)
        try:
            items[unpack_positions(parts[self.part_name], len(values), count)] = values
        except ValueError as error:
            raise CodecError(f"its {self.part_name}: {error}") from error
        return items.reshape(spec.shape)

    def max_error(self, value: Tensor, base: Tensor, later: float) -> float:
        item_shape = self._item_shape(require_finite(value).shape)
        if item_shape is None:
            return later
        dropped = value.reshape(item_shape).clone()
        dropped[_largest_items(dropped, self.fraction)] = 0
        return max(later, max_magnitude(dropped))

    def _item_shape(self, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the items, counted by its first dimension; None to send all."""
        if self.part_name == "index":
            return (math.prod(shape),)
        return tuple(shape) if len(shape) >= 2 else None


def _sent_count(fraction: float, count: int) -> int:
    """Return ceil(fraction * count) in exact arithmetic, so that both ends agree."""
    return math.ceil(Fraction(repr(fraction)) * count)


def _largest_items(items: Tensor, fraction: float) -> Tensor:
    """Return the indices (int64, ascending) of the `fraction` of items with the largest L2 norms.

    An item is a number or a row: an element of the first dimension. Of items with equal norms, the
    first are taken. Raises CodecError for 2**31 items or more.
    """
    if len(items) >= 2**31:
        raise CodecError(f"{len(items)} items are too many to choose from")
    count = _sent_count(fraction, len(items))
    if count == len(items):
        return torch.arange(count, device=items.device)
    if items.dim() == 1:
        norms = items.abs().to(TensorSpec.of(items).compute_dtype)
    else:
        rows = items.reshape(len(items), math.prod(items.shape[1:]))
        if rows.dtype == torch.float64:  # squares of float64 could overflow
            rows = rows / (max_magnitude(rows) or 1.0)
        norms = cast("Tensor", torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64))
    threshold = norms.kthvalue(len(items) - count + 1).values
    above = (norms > threshold).nonzero().flatten()
    tied = (norms == threshold).nonzero().flatten()
    return torch.cat([above, tied[: count - len(above)]]).sort().values
