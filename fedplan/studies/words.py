# SPDX-License-Identifier: Apache-2.0
"""Words: the numbers and the names that a study may say, each refused where it stands."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from fedplan.data.own import OWN
from fedplan.data.partition import KINDS
from fedplan.data.tasks import TASK_KINDS
from fedplan.errors import FedplanError
from fedplan.privacy.accounting.events import NOISES
from fedplan.privacy.mechanisms.clipping import BOUNDS
from fedplan.tensors.devices import device_word
from fedplan.training.optimisers import optimiser_named
from fedplan.training.probes import PROBES

STRICT = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
"""A part of the file: unknown fields are refused, values are not converted."""
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
            known = ", ".join(filter(None, names))
            raise ValueError(f"there is no {what} {name!r}; there are {known}")
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


def _optimiser(name: str) -> str:
    with as_fault():
        return optimiser_named(name).name


def _a_device(word: str) -> str:
    with as_fault():
        return device_word(word)


Positive = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]
Share = Annotated[float, Field(ge=0, le=1)]
Scalar = str | int | float | bool
Clip = Annotated[float, AfterValidator(_within(BOUNDS))]
Noise = Annotated[float, AfterValidator(_within(NOISES, zero=True))]
TaskKind = Annotated[str, AfterValidator(one_of("task", (*TASK_KINDS, OWN)))]
Division = Annotated[str, AfterValidator(one_of("partition", KINDS))]
DeviceName = Annotated[str, AfterValidator(_a_device)]
ProbeName = Annotated[str, AfterValidator(one_of("probe", ("", *PROBES)))]
OptimiserName = Annotated[str, AfterValidator(_optimiser)]
