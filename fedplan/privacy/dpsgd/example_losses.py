# SPDX-License-Identifier: Apache-2.0
"""Per-example losses with one forward pass of the model.

The loss function is called on the whole batch, and then on each example; there the model's forward
returns the example's rows of the first output. Works for any loss that calls the model once.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.privacy.dpsgd.factors import GhostClippingError
from fedplan.privacy.dpsgd.hooks import example_row
from fedplan.privacy.dpsgd.per_example import Objective


def per_example_losses(objective: Objective, batch: Mapping[str, Tensor], count: int) -> Tensor:
    """The loss of each of the `count` examples of a batch, as one tensor with gradients.

    Raises a GhostClippingError if the loss calls the model more than once, or otherwise for one
    example than for the batch.
    """
    if not all(_has_rows(tensor, count) for tensor in batch.values()):
        raise GhostClippingError("a batch holds tensors without a row for each example")
    calls = list[_ForwardCall]()
    forward = objective.model.forward

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(_ForwardCall(args, kwargs, forward(*args, **kwargs), count))
        return calls[-1].output

    with _forward_replaced(objective.model, record), objective.autocast():
        objective.loss(objective.model, batch)
    if len(calls) != 1:
        raise GhostClippingError(f"the loss calls the model {len(calls)} times")
    losses = list[Tensor]()
    for i in range(count):
        with _forward_replaced(objective.model, calls[0].replay(i)), objective.autocast():
            example = {name: tensor[i : i + 1] for name, tensor in batch.items()}
            losses.append(objective.loss(objective.model, example).reshape(()))
    return torch.stack(losses)


@dataclass(frozen=True)
class _ForwardCall:
    """Arguments and output of a forward call on `count` examples."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    count: int

    def replay(self, i: int) -> Callable[..., Any]:
        """A forward function that returns example `i` of the output.

        It raises a GhostClippingError if its arguments are not those of that example.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
                raise GhostClippingError(
                    "the loss calls the model with other arguments for one example"
                )
            pairs = [*zip(self.args, args, strict=True)]
            pairs += [(self.kwargs[name], value) for name, value in kwargs.items()]
            for before, now in pairs:
                if isinstance(before, Tensor) and not _equal(
                    example_row(before, i, self.count), now
                ):
                    raise GhostClippingError(
                        "the loss gives the model other inputs for one example"
                    )
            return self._example_output(i)

        return forward

    def _example_output(self, i: int) -> Any:
        """Example `i` of the output: of a mapping or tuple, without values that have no rows.

        Raises a GhostClippingError for an output of another type.
        """
        if isinstance(self.output, Tensor):
            return example_row(self.output, i, self.count)
        if isinstance(self.output, Mapping):
            fields = cast("Mapping[str, Any]", self.output)
            rows = {k: v[i : i + 1] for k, v in fields.items() if _has_rows(v, self.count)}
            return cast("Any", type(self.output))(**rows)
        if type(self.output) is tuple:
            values = cast("tuple[Any, ...]", self.output)
            return tuple(v[i : i + 1] if _has_rows(v, self.count) else None for v in values)
        raise GhostClippingError(f"the model returns a {type(self.output).__name__}")


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and len(value) == count


def _equal(one: Tensor, other: Any) -> bool:
    """Whether two tensors are equal; nan equals nan."""
    if not isinstance(other, Tensor) or one.shape != other.shape:
        return False
    return bool(((one == other) | (one != one) & (other != other)).all())


@contextmanager
def _forward_replaced(model: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Replace a model's forward while the context is open."""
    attributes = vars(model)
    own = attributes.get("forward")
    attributes["forward"] = forward
    try:
        yield
    finally:
        if own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = own
