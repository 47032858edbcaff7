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
from fedplan.methods.lora import parse_product_rule
from fedplan.methods.registry import SERVER_OPTIMIZER_REGISTRY
from fedplan.models.adapters import adapter_family
from fedplan.naming import unknown_name_message
from fedplan.privacy.accounting.accountant import NOISE_MULTIPLIERS
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
    """Return a function that returns a name of `names` unchanged, and raises ValueError for others.

    `kind`: the word for the name in the message, as "rule". The message suggests the closest name.
    """

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(unknown_name_message(kind, name, names))
        return name

    return check


def _range_validator(
    bounds: tuple[float, float], *, zero: bool = False
) -> Callable[[float], float]:
    """Return a function that returns a number within bounds, and else raises ValueError.

    `bounds`: minimum and maximum, both allowed. `zero`: allow 0, too.
    """

    def check(value: float) -> float:
        minimum, maximum = bounds
        if not (minimum <= value <= maximum or (zero and value == 0)):
            or_zero = "0, or " if zero else ""
            raise ValueError(f"{value:g} must be {or_zero}a number from {minimum:g} to {maximum:g}")
        return value

    return check


def _name_validator(find: Callable[[str], object]) -> Callable[[str], str]:
    """Return a function that returns a name if `find(name)` succeeds.

    A FedplanError of `find` is raised as ValueError.
    """

    def check(name: str) -> str:
        with as_value_error():
            _ = find(name)
        return name

    return check


def _optional_name_validator(find: Callable[[str], object]) -> Callable[[str], str]:
    """Return a validator like `_name_validator` that also accepts ""."""
    return _name_validator(lambda name: name and find(name))


Positive = Annotated[int, Field(ge=1, le=MAX_INT)]
Count = Annotated[int, Field(ge=0, le=MAX_INT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Scalar = str | int | float | bool
ClippingNorm = Annotated[float, AfterValidator(_range_validator(CLIPPING_NORMS))]
NoiseMultiplier = Annotated[float, AfterValidator(_range_validator(NOISE_MULTIPLIERS, zero=True))]
TaskKind = Annotated[
    str, AfterValidator(_name_validator(lambda kind: kind == CUSTOM_KIND or task_class(kind)))
]
PartitionKind = Annotated[str, AfterValidator(one_of_validator("partition", PARTITION_KINDS))]
DeviceName = Annotated[str, AfterValidator(_name_validator(check_device_name))]
ProbeName = Annotated[str, AfterValidator(_optional_name_validator(get_probe))]
OptimizerName = Annotated[str, AfterValidator(_name_validator(make_client_optimizer))]
ServerOptimizerName = Annotated[
    str, AfterValidator(_optional_name_validator(SERVER_OPTIMIZER_REGISTRY.find))
]
ProductText = Annotated[str, AfterValidator(_optional_name_validator(parse_product_rule))]
ClientHookName = Annotated[str, AfterValidator(_name_validator(get_client_hook))]
MetricName = Annotated[str, AfterValidator(_name_validator(metric_named))]
LoopName = Annotated[str, AfterValidator(_optional_name_validator(get_training_loop))]
AdapterName = Annotated[str, AfterValidator(_optional_name_validator(adapter_family))]
