# SPDX-License-Identifier: Apache-2.0
"""Words: the numbers and the names that a study may say, each refused where it stands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from fedplan.data.metrics import metric_named
from fedplan.data.own import OWN
from fedplan.data.partition import KINDS
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.methods.products import product_told
from fedplan.methods.registry import SERVER_OPTIMISER_NAMES
from fedplan.naming import unknown
from fedplan.privacy.accounting.events import NOISES
from fedplan.privacy.mechanisms.clipping import BOUNDS
from fedplan.tensors.devices import device_word
from fedplan.training.loops import loop_named
from fedplan.training.optimisers import optimiser_named
from fedplan.training.probes import probe_named
from fedplan.training.wraps import wrap_named

STRICT = ConfigDict(
    extra="forbid",
    strict=True,
    frozen=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)
"""A part of the file: unknown fields are refused, values are not converted, each field has its
sentence below it."""
MOST = 10**9
"""The largest whole number."""


@contextmanager
def as_fault() -> Generator[None]:
    """Tell an error of ours as the fault of a field."""
    try:
        yield
    except FedplanError as error:
        raise ValueError(str(error)) from error


def one_of(what: str, names: Collection[str]) -> Callable[[str], str]:
    """A check that a name is one of some."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(unknown(what, name, names))
        return name

    return check


def _within(bounds: tuple[float, float], *, zero: bool = False) -> Callable[[float], float]:
    def check(said: float) -> float:
        least, most = bounds
        if not (least <= said <= most or (zero and said == 0)):
            also = "0, or " if zero else ""
            raise ValueError(f"{said:g} is not {also}a number from {least:g} to {most:g}")
        return said

    return check


def _named(find: Callable[[str], object]) -> Callable[[str], str]:
    """A name that stands for something."""

    def check(name: str) -> str:
        with as_fault():
            _ = find(name)
        return name

    return check


def _perhaps(find: Callable[[str], object]) -> Callable[[str], str]:
    """A name that stands for something, or none: the usual."""
    return _named(lambda name: name and find(name))


def _task(kind: str) -> object:
    """The class of a task; what came from Python is a task of no name."""
    return kind == OWN or task_class(kind)


def _a_device(word: str) -> str:
    with as_fault():
        return device_word(word)


Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Scalar = str | int | float | bool
Clip = Annotated[float, AfterValidator(_within(BOUNDS))]
Noise = Annotated[float, AfterValidator(_within(NOISES, zero=True))]
TaskKind = Annotated[str, AfterValidator(_named(_task))]
Division = Annotated[str, AfterValidator(one_of("partition", KINDS))]
DeviceName = Annotated[str, AfterValidator(_a_device)]
ProbeName = Annotated[str, AfterValidator(_perhaps(probe_named))]
OptimiserName = Annotated[str, AfterValidator(_named(optimiser_named))]
ServerOptimiserName = Annotated[str, AfterValidator(_perhaps(SERVER_OPTIMISER_NAMES.find))]
ProductText = Annotated[str, AfterValidator(_perhaps(product_told))]
WrapName = Annotated[str, AfterValidator(_named(wrap_named))]
MetricName = Annotated[str, AfterValidator(_named(metric_named))]
LoopName = Annotated[str, AfterValidator(_perhaps(loop_named))]
