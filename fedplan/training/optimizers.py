# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning rate schedules of clients, as values that server and clients compare."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, isclass, signature
from math import ceil
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.language.canonical import canonical_text, format_dataclass
from fedplan.language.parts import Part
from fedplan.language.resolution import require_known_part
from fedplan.models.params import Kind, Params
from fedplan.naming import Registry, unknown_name_message
from fedplan.tensors.devices import CPU
from fedplan.tensors.named import Tensors, aux_name
from fedplan.training.freezing import TrainableParams

STATE = "optimizer_"
"""Begin of the kinds of a client's memory that hold its optimizer's state, as optimizer_step."""
DECAY, MOMENTUM = 0.0, 0.0
"""Default weight decay and momentum of every optimizer; torch's own differ between classes."""
ParamGroups = Iterable[nn.Parameter] | Iterable[dict[str, Any]]
"""Parameters, or param groups as torch.optim takes them."""
LRByPart = tuple[tuple[Part, float], ...]
"""Parts with a learning rate of their own; no param is in two of them."""
OptimizerFactory = Callable[[ParamGroups, float], torch.optim.Optimizer]
"""Creates a torch optimizer from parameters and a learning rate."""
_DEFAULTS = {"weight_decay": DECAY, "momentum": MOMENTUM}
_UNSUPPORTED = {
    "lbfgs": "it evaluates the loss several times in a step",
    "sparseadam": "it only takes sparse gradients",
}
"""Optimizers of torch that cannot train clients, with the reason."""


@dataclass(frozen=True)
class ClientOptimizer:
    """A client's optimizer as a value; `make_optimizer` creates the torch optimizer of a turn.

    `settings`: all settings but the learning rate, as text. Two values with the same name and
    settings are equal. Made by `make_client_optimizer`.
    """

    name: str
    make: OptimizerFactory = field(compare=False, repr=False)
    settings: str = ""

    @property
    def text(self) -> str:
        """Name and settings in one line; part of the text that server and clients compare."""
        return f"{self.name}({self.settings})"

    def make_optimizer(
        self,
        trainable_params: TrainableParams,
        lr: float,
        lr_by_part: LRByPart = (),
        *,
        decay_all: bool = True,
    ) -> torch.optim.Optimizer:
        """Create the torch optimizer of one turn at learning rate `lr`, without earlier state.

        Parts in `lr_by_part` have their own rate. With `decay_all` False, norms and biases have no
        weight decay. Raises FedplanError if torch rejects the settings, or the optimizer cannot do
        what is asked with these params.
        """
        params: ParamGroups = trainable_params.parameters()
        if not decay_all or lr_by_part:
            groups = dict[tuple[float, bool], list[nn.Parameter]]()
            for param, leaf in trainable_params.leaves():
                rate = next((rate for part, rate in lr_by_part if part.holds(param)), lr)
                decays = decay_all or (param.kind is not Kind.NORM and "bias" not in param.tags)
                groups.setdefault((rate, decays), []).append(leaf)
            params = [
                {"params": leaves, "lr": rate} | ({} if decays else {"weight_decay": 0.0})
                for (rate, decays), leaves in groups.items()
            ]
        try:
            optimizer = self.make(params, lr)
        except (TypeError, ValueError) as error:
            raise FedplanError(f"the optimizer {self.text} cannot be created: {error}") from error
        eps = optimizer.defaults.get("eps")
        if isinstance(eps, float) and not torch.tensor(eps, dtype=torch.float16):
            for key, tensor in trainable_params.named_parameters():
                if tensor.dtype == torch.float16:
                    raise FedplanError(
                        f"{self.name} cannot train {key} in float16: load the model in float32 or "
                        "bfloat16, or train with sgd"
                    )
        if not decay_all and "weight_decay" not in optimizer.defaults:
            raise FedplanError(
                f"the optimizer {self.text} has no weight decay: leave decay_norm_and_bias out"
            )
        return optimizer


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, trainable_params: TrainableParams, memory: Tensors
) -> None:
    """Set the state of a new optimizer to that in a client's memory; what is missing stays new."""
    content, states = optimizer.state_dict(), dict[str, dict[str, Tensor]]()
    for name, value in memory.items():
        key, _, kind = name.rpartition(aux_name("", STATE))
        if key:
            states.setdefault(key, {})[kind] = value.clone()
    numbers = {
        id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])
    }
    named = trainable_params.named_parameters()
    content["state"] |= {numbers[id(p)]: states[key] for key, p in named if key in states}
    optimizer.load_state_dict(content)


def read_optimizer_state(
    optimizer: torch.optim.Optimizer, trainable_params: TrainableParams
) -> dict[str, Tensor]:
    """Return copies of an optimizer's state on the CPU, as auxiliary tensors of the parameters.

    Raises FedplanError if a state is neither a tensor nor None.
    """
    memory = dict[str, Tensor]()
    for key, parameter in trainable_params.named_parameters():
        state: dict[str, Any] = optimizer.state.get(parameter, {})
        for kind, value in state.items():
            if isinstance(value, Tensor):
                memory[aux_name(key, STATE + kind)] = value.detach().to(CPU, copy=True)
            elif value is not None:
                raise FedplanError(
                    f"{type(optimizer).__name__} keeps {kind!r} as a {type(value).__name__}, and "
                    "keep_optimizer stores tensors alone: use another optimizer, such as adamw"
                )
    return memory


def check_lr_by_part(lr_by_part: LRByPart, params: Params) -> None:
    """Raise FedplanError unless each part has params of its own, and no tensor has two rates."""
    parts_by_name = dict[str, set[str]]()
    for param in params:
        matching = [part.text for part, _ in lr_by_part if part.holds(param)]
        if len(matching) > 1:
            raise FedplanError(
                f"lr_by_part: {param.key} is in {' and in '.join(matching)}: give it one rate"
            )
        parts_by_name.setdefault(param.name, set()).add("".join(matching))
    for part, _ in lr_by_part:
        require_known_part(part, params)
        if not any(part.text in texts for texts in parts_by_name.values()):
            raise FedplanError(f"lr_by_part: the model has no params in {part.text}")
    for name, texts in parts_by_name.items():
        if len(texts) > 1:
            raise FedplanError(
                f"lr_by_part: {name} is one tensor with rows inside and outside of "
                f"{max(texts)}: give all its rows one rate"
            )


def sgd(*, weight_decay: float = DECAY, momentum: float = MOMENTUM) -> ClientOptimizer:
    """Return stochastic gradient descent."""
    return make_client_optimizer("sgd", {"weight_decay": weight_decay, "momentum": momentum})


def adamw(*, weight_decay: float = DECAY) -> ClientOptimizer:
    """Return AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019)."""
    return make_client_optimizer("adamw", {"weight_decay": weight_decay})


def register_optimizer(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    """Register an optimizer under a name for study files; server and all sites must do the same.

    `make` is called as a class of torch.optim is: with parameters, `lr`, and the settings of the
    study. Raises FedplanError if `make` takes no `lr`, or if another optimizer has the name.
    """
    _require_lr(name, make)
    OPTIMIZER_NAMES.register(name, make)


def _require_lr(name: str, make: Callable[..., torch.optim.Optimizer]) -> None:
    if not _takes(make, "lr"):
        raise FedplanError(f"the optimizer {name!r} takes no lr: give its factory that argument")


_TORCH_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    each.__name__.lower(): each
    for each in vars(torch.optim).values()
    if isclass(each) and issubclass(each, torch.optim.Optimizer)
    if each is not torch.optim.Optimizer and each.__name__.lower() not in _UNSUPPORTED
}
OPTIMIZER_NAMES: Registry[Callable[..., torch.optim.Optimizer]] = Registry(
    "optimizer", _TORCH_OPTIMIZERS, owner="torch"
)
"""All optimizers that a study can name: classes of torch.optim, and factories like them."""


def _takes(make: Callable[..., torch.optim.Optimizer], name: str) -> bool:
    """Whether a factory takes a keyword argument, by its name or by **kwargs."""
    params = signature(make).parameters
    return name in params or any(p.kind is Parameter.VAR_KEYWORD for p in params.values())


def make_client_optimizer(name: str, settings: Mapping[str, Any] | None = None) -> ClientOptimizer:
    """Return the client optimizer of a name, with settings.

    The name is a class of torch.optim in lower case, an optimizer of `register_optimizer` or of an
    installed package, or `package.module:Class`. `settings` are keyword arguments of the class
    without `lr`. Raises FedplanError for an unknown or unsuitable name, a setting that the class
    does not take, or a setting that is no JSON value.

    >>> make_client_optimizer("adam", {"betas": [0.9, 0.95]}).text
    'adam(betas=[0.9, 0.95], weight_decay=0.0)'
    """
    if name in _UNSUPPORTED and name not in OPTIMIZER_NAMES.registered:
        raise FedplanError(f"{name} cannot train clients: {_UNSUPPORTED[name]}")
    make = OPTIMIZER_NAMES.find(name).value
    _require_lr(name, make)
    kwargs = dict(settings or {})
    for key in kwargs:
        if key in ("params", "lr") or not _takes(make, key):
            raise FedplanError(f"the optimizer {name} takes no {key!r}")
    defaults = {key: value for key, value in _DEFAULTS.items() if key in signature(make).parameters}
    arguments = dict(sorted((defaults | kwargs).items()))
    texts = list[str]()
    try:
        for key, value in arguments.items():
            number = float(value) if key in _DEFAULTS else value
            texts.append(f"{key}={json.dumps(number, allow_nan=False, sort_keys=True)}")
    except (TypeError, ValueError) as error:
        raise FedplanError(f"a setting of {name} is no JSON value: {error}") from error
    # Two sites may use one name for different code, so the text of other code has its digest.
    text = ", ".join(texts)
    text += f"; by {canonical_text(make)}" if name not in OPTIMIZER_NAMES.built_in else ""
    return ClientOptimizer(name, lambda params, lr: make(params, lr=lr, **arguments), text)


CONSTANT = "constant"
SCHEDULES = (
    *(CONSTANT, "constant_with_warmup", "linear", "cosine", "cosine_with_restarts"),
    *("polynomial", "inverse_sqrt", "cosine_with_min_lr", "cosine_warmup_with_min_lr"),
)
"""Names of transformers.get_scheduler that are supported."""
UNSUPPORTED = {
    "reduce_lr_on_plateau": "its rates depend on the losses, not on the step alone",
    "greedy": "its rates depend on the losses, not on the step alone",
    "warmup_stable_decay": "it counts its decay in steps, and clients differ in their steps",
}
"""Names that are not supported, with the reason."""


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate schedule, as a value without state; `factor` gives the rates of a turn.

    `name`: one of SCHEDULES, names of transformers.get_scheduler; `constant` keeps the rate.
    `rounds`: the schedule covers a run of so many rounds; 0 restarts the schedule in each turn.
    `warmup`: below 1, a fraction of the schedule; else rounds of the run, or steps of the turn.
    `settings`: further arguments of the scheduler, as sorted pairs of name and value.
    Raises FedplanError for an unsupported name, for a warmup that is negative, longer than `rounds`
    or above 1 and not whole, and for `constant` with any warmup, rounds or settings.
    """

    name: str = CONSTANT
    warmup: float = 0.0
    rounds: int = 0
    settings: tuple[tuple[str, str | float], ...] = ()

    def __post_init__(self) -> None:
        if self.name in UNSUPPORTED:
            reason = UNSUPPORTED[self.name]
            raise FedplanError(f"{self.name} cannot be a client's schedule: {reason}")
        if self.name not in SCHEDULES:
            raise FedplanError(unknown_name_message("schedule", self.name, SCHEDULES))
        if self.name == CONSTANT and (self.warmup or self.rounds or self.settings):
            raise FedplanError(
                "the schedule constant has no warmup, rounds or settings: use constant_with_warmup"
            )
        if not self.warmup >= 0 or (self.warmup > 1 and self.warmup % 1):
            raise FedplanError(
                f"warmup is {self.warmup!r}: give a fraction below 1, or a whole number of "
                f"{'rounds' if self.rounds else 'steps'}"
            )
        if self.rounds and self.warmup > self.rounds:
            raise FedplanError(f"warmup is {self.warmup:g} rounds of {self.rounds}: give fewer")

    @property
    def text(self) -> str:
        """All settings in one line; part of the text that server and clients compare."""
        return format_dataclass("schedule", self)

    def factor(self, lr: float, round: int, steps: int) -> Callable[[int], float]:
        """Return a function from the number of a step in a turn, from 0, to a factor of `lr`.

        `steps`: steps of the turn. Raises FedplanError if the round is beyond the schedule, or if
        transformers rejects the settings.
        """
        # A pure function: there is no scheduler state to store between turns.
        if self.name == CONSTANT:
            return lambda _: 1.0
        if self.rounds and round > self.rounds:
            raise FedplanError(
                f"round {round} is beyond the {self.rounds} rounds of the schedule {self.name}: "
                "start another run with more rounds, or let the schedule cover each turn"
            )
        from transformers import optimization

        first = (round - 1) * steps if self.rounds else 0
        total_steps = steps * (self.rounds or 1)
        if self.warmup < 1:
            warmup_steps = ceil(self.warmup * total_steps)
        else:
            warmup_steps = int(self.warmup) * (steps if self.rounds else 1)
        # Some schedules end at a fraction of the optimizer's initial rate, so they need one.
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)
        get_scheduler: Any = cast("Any", optimization).get_scheduler
        settings = dict(self.settings)
        try:
            scheduler = get_scheduler(self.name, optimizer, warmup_steps, total_steps, settings)
        except (TypeError, ValueError) as error:
            raise FedplanError(f"the schedule {self.text} cannot be created: {error}") from error
        lr_lambda = scheduler.lr_lambdas[0]
        return lambda step: lr_lambda(first + step)


def make_lr_schedule(
    name: str,
    settings: Mapping[str, str | float] | None = None,
    *,
    warmup: float = LRSchedule.warmup,
    rounds: int = LRSchedule.rounds,
) -> LRSchedule:
    """Return the LRSchedule of a name; `settings` are arguments of the schedule, as `min_lr_rate`.

    Raises FedplanError as LRSchedule does.

    >>> make_lr_schedule("cosine_with_min_lr", {"min_lr_rate": 0.1}, warmup=2, rounds=20).text
    'schedule(name="cosine_with_min_lr", warmup=2, rounds=20, settings=[["min_lr_rate", 0.1]])'
    """
    return LRSchedule(name, warmup, rounds, tuple(sorted((settings or {}).items())))
