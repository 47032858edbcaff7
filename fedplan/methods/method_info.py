# SPDX-License-Identifier: Apache-2.0
"""Method descriptions for people: origin, paper, settings and plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from inspect import getdoc, signature
from typing import Any

from fedplan.methods.registry import METHOD_REGISTRY, method_by_name

SETTING_DESCRIPTIONS = {
    "absent": "Whether clients that did not send a block count as not having changed it.",
    "by": "In safl, the query tokens that count: all, first or last; empty for the default of the "
    "model's kind. In fedfrozen, the rule by which a part has settled: bend or chance.",
    "deep": "Whether every block has its own prompts, instead of the first block only.",
    "depth": "Number of blocks that the cycle goes through.",
    "eps": "Added to the root in the denominator: the larger, the less adaptive the server is.",
    "examples": "Number of examples on which a client scores its blocks.",
    "fusion": "How common and own prompts are combined: attention, replace, sum or mlp.",
    "head_epochs": "Epochs for which a client trains its personal params before the shared ones.",
    "heads": "Number of heads of the fusion attention.",
    "joint_choice": "Whether all clients train the same blocks, chosen by the sum of their scores.",
    "k": "Number of blocks that each client trains and sends in a round.",
    "lr": "Learning rate of the server optimizer.",
    "momentum": "Momentum of the server optimizer.",
    "mu": "Weight mu of the proximal term, which pulls a client to the global model.",
    "part": "The part that is frozen after the warm-up.",
    "probe": "How blocks are scored: attention, gradient, random, last or middle.",
    "query": "Which prompts are the queries of the fusion attention: own, common or both.",
    "rank": "Rank of LoRA: the smaller, the fewer bytes are sent.",
    "reading": "Trained after the freeze: A is everything but the part, B the values and the head.",
    "rounds": "Number of rounds for which the base is trained under a frozen head.",
    "settle": "Relative movement below which a part counts as settled and is frozen; 0 is off.",
    "start": "Initial values of prompts: words or noise.",
    "target": "The part whose layers get LoRA.",
    "text": "Number of text prompts.",
    "to": "The key tokens that count: first, last, content or labelled; empty as with `by`.",
    "trait": "The trait with which a client declares a lower rank; empty: one rank for all.",
    "vision": "Number of image prompts.",
    "vision_at": "The block before which the image prompts enter.",
    "warmup": "Number of rounds in which everything is trained before the freeze.",
    "whole": "Number of chosen blocks that also train their MLP; 0 is all of them.",
    "width": "Inner width of the fusion attention.",
    "with_head": "Whether the head is trained too; use false if it is tied to the embeddings.",
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

    `name`: as in a study. `origin`: package that provides the method. `summary`: one
    sentence. `source`: the paper and the differences from the paper. `settings`: arguments.
    `plan`: plan text with default settings. `details`: `Method.lines` with default settings.
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
    Raises FedplanError as `method_by_name`.
    """
    entry, method = METHOD_REGISTRY.find(name), method_by_name(name)
    first, _, rest = (getdoc(entry.value) or "").partition("\n\n")
    params = signature(entry.value).parameters.values()
    summary = " ".join(first.split())
    # A setting of another package's method may have another meaning under the same name.
    meanings = {} if entry.module else SETTING_DESCRIPTIONS
    settings = tuple(MethodSetting(p.name, p.default, meanings.get(p.name, "")) for p in params)
    return MethodInfo(name, entry.origin, summary, rest, settings, method.plan.text, method.lines)
