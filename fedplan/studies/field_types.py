# SPDX-License-Identifier: Apache-2.0
"""Types of study fields: numbers with bounds, and names that are checked when a study is read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from typing import Annotated

from pydantic import AfterValidator, ConfigDict, Field

from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.metrics import metric_named
from fedplan.data.partition import PARTITION_KINDS
from fedplan.data.tasks import task_class
from fedplan.errors import FedplanError
from fedplan.methods.lora_products import parse_product_rule
from fedplan.methods.registry import SERVER_OPTIMIZER_REGISTRY
from fedplan.naming import unknown_name_message
from fedplan.privacy.accounting.events import NOISE_MULTIPLIERS
from fedplan.privacy.mechanisms.clipping import CLIPPING_NORMS
from fedplan.tensors.devices import check_device_name
from fedplan.training.client_hooks import get_client_hook
from fedplan.training.loops import get_training_loop
from fedplan.training.optimizers import make_client_optimizer
from fedplan.training.probes import get_probe

STRICT = ConfigDict(
    extra="forbid",
    strict=True,
    frozen=True,
    allow_inf_nan=False,
    use_attribute_docstrings=True,
)
"""Configuration of all sections: no unknown fields, no type conversion, no NaN or infinity."""
MAX_INT = 10**9
"""Largest integer of any field."""


@contextmanager
def as_value_error() -> Generator[None]:
    """Re-raise a FedplanError of the body as ValueError, which pydantic reports with the field."""
    try:
        yield
    except FedplanError as error:
        raise ValueError(str(error)) from error


def one_of_validator(kind: str, names: Collection[str]) -> Callable[[str], str]:
    """Return a validator that accepts only some names; its message suggests the closest one."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(unknown_name_message(kind, name, names))
        return name

    return check


def _range_validator(
    bounds: tuple[float, float], *, zero: bool = False
) -> Callable[[float], float]:
    """Return a validator of numbers within (minimum, maximum), and of 0 if `zero` is true."""

    def check(value: float) -> float:
        minimum, maximum = bounds
        if not (minimum <= value <= maximum or (zero and value == 0)):
            or_zero = "0, or " if zero else ""
            raise ValueError(f"{value:g} must be {or_zero}a number from {minimum:g} to {maximum:g}")
        return value

    return check


def _name_validator(find: Callable[[str], object]) -> Callable[[str], str]:
    """Return a validator that calls `find(name)` and reports its FedplanError."""

    def check(name: str) -> str:
        with as_value_error():
            _ = find(name)
        return name

    return check


def _optional_name_validator(find: Callable[[str], object]) -> Callable[[str], str]:
    """Return a validator like `_name_validator` that also accepts ""."""
    return _name_validator(lambda name: name and find(name))


def _find_task(kind: str) -> object:
    """Return the task class of a kind; the kind of in-memory tasks has none and is accepted."""
    return kind == CUSTOM_KIND or task_class(kind)


def _validate_device(name: str) -> str:
    """Return a device name; raise ValueError for an unknown one."""
    with as_value_error():
        return check_device_name(name)


Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Scalar = str | int | float | bool
ClippingNorm = Annotated[float, AfterValidator(_range_validator(CLIPPING_NORMS))]
NoiseMultiplier = Annotated[float, AfterValidator(_range_validator(NOISE_MULTIPLIERS, zero=True))]
TaskKind = Annotated[str, AfterValidator(_name_validator(_find_task))]
PartitionKind = Annotated[str, AfterValidator(one_of_validator("partition", PARTITION_KINDS))]
DeviceName = Annotated[str, AfterValidator(_validate_device)]
ProbeName = Annotated[str, AfterValidator(_optional_name_validator(get_probe))]
OptimizerName = Annotated[str, AfterValidator(_name_validator(make_client_optimizer))]
ServerOptimizerName = Annotated[
    str, AfterValidator(_optional_name_validator(SERVER_OPTIMIZER_REGISTRY.find))
]
ProductText = Annotated[str, AfterValidator(_optional_name_validator(parse_product_rule))]
ClientHookName = Annotated[str, AfterValidator(_name_validator(get_client_hook))]
MetricName = Annotated[str, AfterValidator(_name_validator(metric_named))]
LoopName = Annotated[str, AfterValidator(_optional_name_validator(get_training_loop))]
