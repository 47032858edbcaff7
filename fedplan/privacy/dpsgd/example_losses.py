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
    """Loss of each of the `count` examples of a batch, by one run of the objective's model.

    Calls the loss on the batch and then on each example, under the objective's autocast. Returns a
    tensor [count] that is attached to the autograd graph. Raises a GhostClippingError if a tensor
    of the batch has no row per example, if the loss of the batch calls the model not exactly once,
    if the loss of an example calls the model with other tensors than the example's rows, or if the
    model returns neither tensor, mapping nor tuple.
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
    """A recorded call of a model's forward on a batch of `count` examples.

    args, kwargs: the arguments; output: the result. `replay(i)` makes a forward function that
    returns example i's rows of the output without running the model.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    count: int

    def replay(self, i: int) -> Callable[..., Any]:
        """Make a forward function that returns the rows of example `i` of the recorded output.

        That function raises a GhostClippingError if it is called with another number or other names
        of arguments, or with another tensor than the row of example `i` of the recorded tensor (nan
        equals nan). Arguments that are no tensors are not compared.
        """

        def forward(*args: Any, **kwargs: Any) -> Any:
            if len(args) != len(self.args) or kwargs.keys() != self.kwargs.keys():
                raise GhostClippingError(
                    "the loss calls the model with other arguments for one example"
                )
            pairs = [*zip(self.args, args, strict=True)]
            pairs += [(self.kwargs[name], value) for name, value in kwargs.items()]
            for batched, now in pairs:
                if isinstance(batched, Tensor):
                    row = example_row(batched, i, self.count)
                    is_same = isinstance(now, Tensor) and row.shape == now.shape
                    if not is_same or not ((row == now) | (row != row) & (now != now)).all():
                        raise GhostClippingError(
                            "the loss gives the model other inputs for one example"
                        )
            return self._example_output(i)

        return forward

    def _example_output(self, i: int) -> Any:
        """Rows of example `i` of the output.

        Values without a row per example are left out of a mapping, and become None in a tuple.
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


@contextmanager
def _forward_replaced(model: nn.Module, forward: Callable[..., Any]) -> Generator[None]:
    """Replace `model.forward` while the context is open, and restore it at the end."""
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
