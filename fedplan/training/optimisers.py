# SPDX-License-Identifier: Apache-2.0
"""Client optimisers: what a client's steps are made by, as values that both ends can compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, isclass, signature
from typing import Any

import torch
from torch import nn

from fedplan.errors import FedplanError
from fedplan.language.wording import text_of
from fedplan.models.params import Kind
from fedplan.naming import Registry
from fedplan.training.freezing import Marked

DECAY, MOMENTUM = 0.0, 0.0
"""What every optimiser takes of these unless it is said; torch's own differ between classes."""
Leaves = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""Parameters, or groups of them with settings of their own."""
Make = Callable[[Leaves, float], torch.optim.Optimizer]
"""Makes a torch optimiser of parameters and a rate."""
_OWN_WORD = {"decay": "weight_decay"}
_UNSAID = {"weight_decay": DECAY, "momentum": MOMENTUM}
_UNFIT = {
    "lbfgs": "it asks for the loss several times a step",
    "sparseadam": "it takes sparse gradients alone",
}
"""Optimisers of torch that no fit can take, and why."""


@dataclass(frozen=True)
class ClientOptimiser:
    """A client's optimiser, by its name, its settings as text, and what makes it in each turn.

    Two are equal if their texts are: a name stands for one way of making.
    """

    name: str
    make: Make = field(compare=False, repr=False)
    settings: str = ""

    @property
    def text(self) -> str:
        """It with all its settings, for both ends to compare."""
        return f"{self.name}({self.settings})"

    def start(
        self, marked: Marked, rate: float, *, decay_all: bool = True
    ) -> torch.optim.Optimizer:
        """The optimiser of one turn: it starts without memory."""
        try:
            made = self.make(marked.parameters() if decay_all else _groups(marked), rate)
        except (TypeError, ValueError) as error:
            raise FedplanError(f"the optimiser {self.text} cannot be made: {error}") from error
        _require_steps(self.name, made, marked)
        if not decay_all and "weight_decay" not in made.defaults:
            raise FedplanError(f"the optimiser {self.text} has no decay: leave decay_all out")
        return made


def _groups(marked: Marked) -> list[dict[str, Any]]:
    """The parameters that decay, and norms and biases, which do not."""
    held: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param, leaf in marked.leaves():
        held[param.kind is not Kind.NORM and "bias" not in param.tags].append(leaf)
    groups: list[dict[str, Any]] = [{"params": held[True]}]
    groups.append({"params": held[False], "weight_decay": 0.0})
    return [group for group in groups if group["params"]]


def _require_steps(name: str, made: torch.optim.Optimizer, marked: Marked) -> None:
    """Refuse to divide by a number that float16 cannot tell from zero."""
    least = made.defaults.get("eps")
    if not isinstance(least, float) or torch.tensor(least, dtype=torch.float16):
        return
    for key, tensor in marked.named_parameters():
        if tensor.dtype == torch.float16:
            raise FedplanError(
                f"{name} cannot train {key} in float16: load the model in float32 or bfloat16, or "
                "train with sgd"
            )


def sgd(*, decay: float = DECAY, momentum: float = MOMENTUM) -> ClientOptimiser:
    """Plain steps down the gradient."""
    return optimiser_named("sgd", {"decay": decay, "momentum": momentum})


def adamw(*, decay: float = DECAY) -> ClientOptimiser:
    """AdamW: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019."""
    return optimiser_named("adamw", {"decay": decay})


def register_optimiser(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    """Let a study name an optimiser of your own: every end must register it alike.

    `make` is called as a class of torch.optim is: with parameters, `lr`, and the settings it takes.
    """
    _require_rate(name, make)
    OPTIMISER_NAMES.register(name, make)


def _require_rate(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    if not _takes(make, "lr"):
        raise FedplanError(f"the optimiser {name!r} takes no lr, the rate of its steps")


def _of_torch() -> dict[str, Callable[..., torch.optim.Optimizer]]:
    """The optimisers of torch, each by the name of its class in small letters."""
    found = [made for made in vars(torch.optim).values() if isclass(made)]
    named = {
        made.__name__.lower(): made
        for made in found
        if issubclass(made, torch.optim.Optimizer) and made is not torch.optim.Optimizer
    }
    return {name: made for name, made in named.items() if name not in _UNFIT}


OPTIMISER_NAMES: Registry[Callable[..., torch.optim.Optimizer]] = Registry(
    "optimiser", _of_torch(), owner="torch"
)
"""All optimisers that a study can name: classes of torch, and what is called as they are."""


def _takes(make: Callable[..., torch.optim.Optimizer], word: str) -> bool:
    """Whether a maker takes a setting: by its name, or because it takes any."""
    takes = signature(make).parameters
    return word in takes or any(each.kind is Parameter.VAR_KEYWORD for each in takes.values())


def optimiser_named(name: str, settings: Mapping[str, Any] | None = None) -> ClientOptimiser:
    """An optimiser of torch, by the name of its class in small letters, or one of your own.

    Yours is registered, offered by a package, or named by where it stands: `package.module:Class`.
    Settings are what its class takes, but for the rate; `decay` is its weight_decay.

    >>> optimiser_named("adam", {"betas": [0.9, 0.95]}).text
    'adam(betas=[0.9, 0.95], weight_decay=0.0)'
    """
    make = _made_by(name)
    given = dict[str, Any]()
    for word, value in (settings or {}).items():
        own = _OWN_WORD.get(word, word)
        if own in ("params", "lr", *given) or not _takes(make, own):
            raise FedplanError(f"the optimiser {name} takes no {word!r}")
        given[own] = value
    unsaid = {word: none for word, none in _UNSAID.items() if word in signature(make).parameters}
    said = dict(sorted((unsaid | given).items()))
    try:
        text = ", ".join(f"{word}={_text(word, value)}" for word, value in said.items())
    except (TypeError, ValueError) as error:
        raise FedplanError(f"a setting of {name} is no plain value: {error}") from error
    # A name of torch's says what it is; of a name of your own, what it stands for is said too.
    text += f"; by {text_of(make)}" if name not in OPTIMISER_NAMES.built_in else ""
    return ClientOptimiser(name, lambda leaves, rate: make(leaves, lr=rate, **said), text)


def _made_by(name: str) -> Callable[..., torch.optim.Optimizer]:
    if name in _UNFIT and name not in OPTIMISER_NAMES.registered:
        raise FedplanError(f"{name} cannot train clients: {_UNFIT[name]}")
    make = OPTIMISER_NAMES.find(name).value
    _require_rate(name, make)
    return make


def _text(word: str, value: Any) -> str:
    """A setting as JSON: the same wherever it is written, and no address of an object."""
    number = float(value) if word in _UNSAID else value
    return json.dumps(number, allow_nan=False, sort_keys=True)
