# SPDX-License-Identifier: Apache-2.0
"""Methods and server optimizers by name, and descriptions of methods for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from inspect import getdoc, signature
from typing import Any, cast

from fedplan.errors import FedplanError
from fedplan.methods import adapters, compositions, published
from fedplan.methods.method import Method
from fedplan.methods.server_optimizer import (
    ServerOptimizer,
    adagrad,
    adam,
    mean,
    momentum,
    nesterov,
    yogi,
)
from fedplan.naming import Registry

METHODS: dict[str, Callable[..., Method]] = {
    make.__name__.replace("_", "-"): make
    for make in (*published.METHODS, *adapters.METHODS, *compositions.METHODS)
}
"""The built-in methods by name: functions of their settings."""

METHOD_REGISTRY: Registry[Callable[..., Method]] = Registry("method", METHODS)
"""All methods that a study can name: built-in, registered, and of installed packages."""

SERVER_OPTIMIZER_REGISTRY: Registry[Callable[..., ServerOptimizer]] = Registry(
    "server optimizer",
    {
        **{"mean": mean, "momentum": momentum, "nesterov": nesterov},
        **{"adam": adam, "yogi": yogi, "adagrad": adagrad},
    },
)
"""All server optimizers that a study can name: functions of their settings."""


def method_by_name(name: str, settings: Mapping[str, Any] | None = None) -> Method:
    """Return a new method by name, or by `package.module:function`.

    `settings`: arguments of the method's function; None for defaults. Raises FedplanError if the
    name is unknown, a setting is wrong, or the function returns no Method.
    """
    method = METHOD_REGISTRY.make(name, settings)
    if not isinstance(method, Method):
        raise FedplanError(f"{name} returns {_type_name(method)}, not a Method")
    return method


def register_method(name: str, make: Callable[..., Method]) -> None:
    """Register a method under a name for studies; lasts until this process ends."""
    METHOD_REGISTRY.register(name, make)


def make_server_optimizer(name: str, settings: Mapping[str, Any] | None = None) -> ServerOptimizer:
    """Return a new server optimizer by name, or by `package.module:function`.

    Raises FedplanError if the name is unknown, a setting is wrong, or the result is not callable.
    """
    optimizer: Any = SERVER_OPTIMIZER_REGISTRY.make(name, settings)
    if not callable(cast("object", optimizer)):
        raise FedplanError(f"{name} returns {_type_name(optimizer)}, not a server optimizer")
    return optimizer


def _type_name(value: object) -> str:
    return f"a value of {type(value).__name__}"


def list_methods() -> list[list[str]]:
    """Return lines for each registered method: name and origin, summary and plan, or its error."""
    methods = list[list[str]]()
    for name, origin in METHOD_REGISTRY.origins().items():
        try:
            doc = getdoc(METHOD_REGISTRY.find(name).value) or ""
            lines = [*doc.splitlines()[:1], method_by_name(name).plan.text]
        except FedplanError as error:
            lines = [str(error)]
        methods.append([f"{name}, of {origin}", *(f"    {line}" for line in lines)])
    return methods


SETTING_DESCRIPTIONS = {
    "absent": "Whether clients that did not send a block count as not having changed it.",
    "alpha": "Weight alpha of the proximal term, and the rate at which the linear term changes.",
    "by": "In safl, the query tokens that count: all, first or last; empty for the default of the "
    "model's kind. In fedfrozen, the rule by which a part has settled: bend or chance.",
    "deep": "Whether every block has its own prompts, instead of the first block only.",
    "depth": "Number of blocks that the cycle goes through.",
    "eps": "Added to the root in the denominator: the larger, the less adaptive the server is.",
    "examples": "Number of examples on which a client scores its blocks.",
    "fusion": "How common and own prompts are combined: attention, replace, sum or mlp.",
    "gate": "Initial weight of the fusion's output, which is added to the sum of both prompts.",
    "head_epochs": "Epochs for which a client trains its personal params before the shared ones.",
    "heads": "Number of heads of the fusion attention.",
    "joint_choice": "Whether all clients train the same blocks, chosen by the sum of their scores.",
    "k": "Number of blocks that each client trains and sends in a round.",
    "lam": "Weight lambda of the term that pulls a client's own copy to the global model.",
    "lr": "Learning rate of the server optimizer.",
    "momentum": "Momentum of the server optimizer.",
    "mu": "Weight mu of the proximal term, which pulls a client to the global model.",
    "own_rank": "Rank of each client's own LoRA adapter, which is never sent.",
    "part": "The part that is frozen after the warm-up.",
    "probe": "How blocks are scored: attention, gradient, random, last or middle.",
    "query": "Which prompts are the queries of the fusion attention: own, common or both.",
    "rank": "Rank of LoRA: the smaller, the fewer bytes are sent.",
    "reading": "Trained after the freeze: A is everything but the part, B the values and the head.",
    "rounds": "Number of rounds for which the base is trained under a frozen head.",
    "settle": "Relative movement below which a part counts as settled and is frozen; 0 is off.",
    "start": "Initial values of prompts: words or noise.",
    "steps": "Number of local steps that the change of every client counts.",
    "target": "The part whose layers get LoRA.",
    "text": "Number of text prompts.",
    "to": "The keys that count: first, last, content, labelled or entities; empty as with `by`.",
    "trait": "The trait with which a client declares a lower rank; empty: one rank for all.",
    "vision": "Number of image prompts.",
    "vision_at": "The block before which the image prompts enter.",
    "warmup": "Number of rounds in which everything is trained before the freeze.",
    "whole": "Number of chosen blocks that also train their MLP; 0 is all of them.",
    "width": "Inner width of the fusion attention.",
    "with_head": "Whether the head is trained too; by default a classifier's alone.",
}
"""The meaning of each setting of the built-in methods; a name means the same in all of them."""


@dataclass(frozen=True)
class MethodSetting:
    """One setting of a method: its name, default value and description (empty if unknown)."""

    name: str
    default: Any
    description: str = ""


@dataclass(frozen=True)
class MethodInfo:
    """Description of a method for people; made by `method_info`.

    `origin`: the package that provides it. `source`: the paper and the differences from it. `plan`,
    `details`: plan text and `Method.lines`, with default settings.
    """

    name: str
    origin: str
    summary: str
    source: str
    settings: tuple[MethodSetting, ...]
    plan: str
    details: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """The description as lines of text; the first has the name and the origin."""
        settings = [
            f"    {s.name} = {s.default!r}  {s.description}".rstrip() for s in self.settings
        ]
        paper = ["", *self.source.splitlines()] if self.source else []
        body = [self.summary, *paper, "", "settings", *(settings or ["    none"])]
        usage = f'[method]\nname = "{self.name}"'
        return [f"{self.name}, of {self.origin}", *body, "", *self.details, "", "in a study", usage]

    def json(self) -> dict[str, Any]:
        """The description as JSON-compatible values, by field name."""
        return asdict(self)


def method_info(name: str) -> MethodInfo:
    """Return the description of a method by name, or by `package.module:function`.

    Texts are from the docstring of the method's function, which is called with default settings.
    """
    entry, method = METHOD_REGISTRY.find(name), method_by_name(name)
    first, _, rest = (getdoc(entry.value) or "").partition("\n\n")
    params = signature(entry.value).parameters.values()
    summary = " ".join(first.split())
    # A setting of another package's method may have another meaning under the same name.
    meanings = {} if entry.module else SETTING_DESCRIPTIONS
    settings = tuple(MethodSetting(p.name, p.default, meanings.get(p.name, "")) for p in params)
    return MethodInfo(name, entry.origin, summary, rest, settings, method.plan.text, method.lines)
