# SPDX-License-Identifier: Apache-2.0
"""Codecs: one tensor as fewer bytes and back, each with its bytes and its largest error stated."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedplan.errors import TextError
from fedplan.tensors.riders import is_rider, rider

Tensors = Mapping[str, Tensor]

FLOATS = {8: torch.float64, 4: torch.float32, 2: torch.float16}
"""A float of so many bytes. Bfloat16 takes as many as float16, so that sizes need only one."""

CODED = frozenset((*FLOATS.values(), torch.bfloat16))
"""The dtypes that codecs code; every other tensor is sent as it is."""

PIECES = frozenset({"scale", "index", "rows"})
"""What codecs call the pieces of a coded tensor: no rider may be called so."""
SLACK = 1.01
"""Room for the rounding within the arithmetic of a codec, over the one rounding of its result."""


class WireError(TextError):
    """A wire that cannot be read, or tensors that it cannot code or cannot have coded."""


class Form(NamedTuple):
    """The shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: Tensor) -> Form:
        """The form of a tensor."""
        return Form(tuple(tensor.shape), tensor.dtype)

    @property
    def work(self) -> torch.dtype:
        """The dtype to reckon in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class Wire(ABC):
    """A codec for what is sent. Two wires with the same text are the same.

    Sender and receiver have the same base: the tensors of the last round, by the same names. Its
    names, shapes and dtypes say what comes back, so the bytes say nothing but the values.

    The first methods speak of one float tensor and its coded parts: the part "" goes by the
    tensor's own name and is what the next codec of a pipe codes, the others by `name#part`.
    """

    @property
    @abstractmethod
    def text(self) -> str:
        """The wire as `parse_wire` reads it."""

    @abstractmethod
    def form(self, whole: Form) -> dict[str, Form]:
        """The forms of the coded parts of a tensor of form `whole`."""

    @abstractmethod
    def code(self, value: Tensor, base: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        """The coded parts of one tensor."""

    @abstractmethod
    def restore(self, parts: Tensors, whole: Form, base: Tensor) -> Tensor:
        """The tensor that has these parts, whose forms are right."""

    @abstractmethod
    def error(self, value: Tensor, base: Tensor, later: float) -> float:
        """The largest error of one tensor, if its part "" comes back with an error of `later`."""

    def encode(
        self, values: Tensors, base: Tensors, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """The values coded. Ones that need no coding are passed on, not copied."""
        _require_forms(values, _wholes(base))
        coded = dict[str, Tensor]()
        # By name, because the generator gives every tensor the same numbers only in one order.
        for name in sorted(values):
            parts = {"": still(values[name])}
            if parts[""].dtype in CODED:
                with _about(name):
                    parts = self.code(parts[""], base[name].detach(), generator)
            coded |= {_key(name, part): tensor for part, tensor in parts.items()}
        return coded

    def decode(self, coded: Tensors, base: Tensors) -> dict[str, Tensor]:
        """The values, where the base is, as near as the bound says.

        What encode cannot have made from values like the base is a WireError.
        """
        forms = {name: self._forms(whole) for name, whole in _wholes(base).items()}
        wanted = {_key(name, part): forms[name][part] for name in forms for part in forms[name]}
        _require_forms(coded, wanted)
        values = dict[str, Tensor]()
        for name, own in base.items():
            parts = {part: coded[_key(name, part)].to(own.device) for part in forms[name]}
            values[name] = parts[""]
            if own.dtype in CODED:
                with _about(name):
                    values[name] = self.restore(parts, Form.of(own), own.detach())
        return values

    def bound(self, values: Tensors, base: Tensors) -> dict[str, float]:
        """By name, the largest absolute error that decode(encode(values)) can have."""
        _require_forms(values, _wholes(base))
        found = dict.fromkeys(values, 0.0)
        for name, value in values.items():
            if value.dtype in CODED:
                with _about(name):
                    found[name] = self.error(value.detach(), base[name].detach(), 0.0)
        return found

    def nbytes(self, shape: Sequence[int], itemsize: int) -> int:
        """The bytes that a float tensor of this shape takes when coded. Others take their own."""
        if itemsize not in FLOATS:
            raise WireError(f"no float takes {itemsize} bytes: it is one of {sorted(FLOATS)}")
        parts = self.form(Form(tuple(shape), FLOATS[itemsize]))
        return sum(form.nbytes for form in parts.values())

    def _forms(self, whole: Form) -> dict[str, Form]:
        return self.form(whole) if whole.dtype in CODED else {"": whole}

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Delta(Wire):
    """What is added to the base: off by one rounding of the difference and one of the sum."""

    @property
    def text(self) -> str:
        return "delta()"

    def form(self, whole: Form) -> dict[str, Form]:
        return {"": whole}

    def code(self, value: Tensor, base: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        work = Form.of(value).work
        return {"": finite((value.to(work) - base.to(work)).to(value.dtype))}

    def restore(self, parts: Tensors, whole: Form, base: Tensor) -> Tensor:
        return clamped(base.to(whole.work) + finite(parts[""]).to(whole.work), whole.dtype)

    def error(self, value: Tensor, base: Tensor, later: float) -> float:
        difference = self.code(value, base, torch.Generator())[""]
        sent = later + rounding(value.dtype, largest(difference))
        return sent + rounding(value.dtype, largest(value) + sent)


@dataclass(frozen=True)
class Cast(Wire):
    """Values as shorter floats; those beyond their range become the largest."""

    dtype: torch.dtype

    @property
    def text(self) -> str:
        return "half()" if self.dtype == torch.float16 else "bf16()"

    def form(self, whole: Form) -> dict[str, Form]:
        return {"": Form(whole.shape, self.dtype)}

    def code(self, value: Tensor, base: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        return {"": clamped(finite(value), self.dtype)}

    def restore(self, parts: Tensors, whole: Form, base: Tensor) -> Tensor:
        return clamped(finite(parts[""]), whole.dtype)

    def error(self, value: Tensor, base: Tensor, later: float) -> float:
        size, most = largest(value), torch.finfo(self.dtype).max
        sent = later + max(0.0, size - most) + rounding(self.dtype, min(size, most))
        wider = torch.promote_types(self.dtype, value.dtype) == value.dtype
        return sent if wider else sent + rounding(value.dtype, size + sent)


@dataclass(frozen=True)
class Int8(Wire):
    """One byte a number and one scale a tensor, rounded up or down by chance: right on average."""

    @property
    def text(self) -> str:
        return "int8()"

    def form(self, whole: Form) -> dict[str, Form]:
        return {"": Form(whole.shape, torch.int8), "scale": Form((), whole.work)}

    def code(self, value: Tensor, base: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
        scale = self._scale(value)
        exact = value.to(scale.dtype) / scale
        lower = exact.floor()
        chance = torch.rand(
            exact.shape, generator=generator, dtype=scale.dtype, device=generator.device
        )
        steps = lower + (chance.to(value.device) < exact - lower)
        return {"": steps.clamp(-127, 127).to(torch.int8), "scale": scale}

    def restore(self, parts: Tensors, whole: Form, base: Tensor) -> Tensor:
        steps, scale = parts[""], parts["scale"]
        if not torch.finfo(scale.dtype).tiny <= scale.item() < math.inf:
            raise WireError(f"a scale of {scale.item()} is not one that int8() makes")
        if (steps == -128).any():
            raise WireError("it holds a step of -128, and int8() makes steps from -127 to 127")
        return clamped(steps.to(scale.dtype) * scale, whole.dtype)

    def error(self, value: Tensor, base: Tensor, later: float) -> float:
        step = self._scale(value).item() * SLACK
        return later + step + rounding(value.dtype, largest(value) + step)

    def _scale(self, value: Tensor) -> Tensor:
        """A 127th of the largest magnitude, and never so small that dividing by it overflows."""
        work = Form.of(value).work
        size = max(largest(value) / 127, torch.finfo(work).tiny)
        return torch.tensor(size, dtype=work, device=value.device)


def still(value: Tensor) -> Tensor:
    """A value without its gradient; the same tensor if it has none."""
    return value.detach() if value.requires_grad else value


def require_alike(given: Tensors, base: Tensors) -> None:
    """Refuse tensors that have not the names, shapes and dtypes of the base."""
    alike = given.keys() == base.keys() and not any(map(is_rider, base))
    for name in base if alike else ():
        one, other = given[name], base[name]
        alike = alike and one.dtype == other.dtype and one.shape == other.shape
    if not alike:
        _require_forms(given, _wholes(base))


def _key(name: str, part: str) -> str:
    return rider(name, part) if part else name


@contextmanager
def _about(name: str) -> Generator[None]:
    """Say which tensor an error is about."""
    try:
        yield
    except WireError as error:
        raise WireError(f"{name!r}: {error}") from error


def _wholes(base: Tensors) -> dict[str, Form]:
    for name in base:
        if is_rider(name):
            raise WireError(f"{name!r} has a '#', which sets the parts of a name apart: rename it")
    return {name: Form.of(tensor) for name, tensor in base.items()}


def _require_forms(given: Tensors, wanted: Mapping[str, Form]) -> None:
    """Refuse tensors that have not exactly these names, shapes and dtypes."""
    for name in sorted(given.keys() ^ wanted.keys(), key=repr):
        what = "is missing" if name in wanted else "is not of this wire and base"
        raise WireError(f"{name!r} {what}: both ends need the same wire, plan and base")
    for name, form in wanted.items():
        if Form.of(given[name]) != form:
            raise WireError(
                f"{name!r} is {tuple(given[name].shape)} of {given[name].dtype}, and {form.shape} "
                f"of {form.dtype} is needed: both ends need the same wire, plan and base"
            )


def largest(value: Tensor) -> float:
    """The largest magnitude, if all are finite."""
    if value.numel() == 0:
        return 0.0
    least, most = torch.aminmax(value)
    found = max(-least.item(), most.item())
    if not math.isfinite(least.item()) or not math.isfinite(found):
        raise WireError("it holds values that are not finite, and only plain() sends those")
    return found


def finite(value: Tensor) -> Tensor:
    """The value, if it is finite."""
    largest(value)
    return value


def clamped(value: Tensor, dtype: torch.dtype) -> Tensor:
    """The value in a dtype; what lies beyond its range becomes its largest number."""
    most = torch.finfo(dtype).max
    return value.to(torch.promote_types(value.dtype, dtype)).clamp(-most, most).to(dtype)


def rounding(dtype: torch.dtype, magnitude: float) -> float:
    """How far one rounding moves numbers of at most this magnitude."""
    info = torch.finfo(dtype)
    return SLACK * (magnitude * info.eps / 2 + info.smallest_normal * info.eps)
