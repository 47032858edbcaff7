# SPDX-License-Identifier: Apache-2.0
"""Sheets: a method as a person reads it: whose it is, its paper, its settings and its plan."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from inspect import Parameter, getdoc, signature
from typing import Any

from fedplan.methods.registry import METHOD_NAMES, method_named

SENTENCES = {
    "absent": "Whether a client that did not send a block counts as not having changed it.",
    "by": "Of safl, which tokens look: all, first, last, empty as the model's kind has it; of "
    "fedfrozen, the rule that a part settles by: bend or chance.",
    "deep": "Whether every layer has prompts of its own, and not the first alone.",
    "depth": "How many blocks the cycle goes through.",
    "floor": "What is added below the fraction: the larger, the less the server adapts.",
    "fusion": "How own and common prompts become one: attention, replace, sum or mlp.",
    "heads": "The heads of the attention that fuses.",
    "k": "How many blocks each client trains and sends in a round.",
    "momentum": "How much of its last step the server takes again.",
    "on": "The part on whose layers LoRA is put.",
    "own_epochs": "How many passes over its rows a client trains what it keeps, before the rest.",
    "part": "What stands still after the warm-up.",
    "probe": "What scores the blocks: attention, gradient, random, last or middle.",
    "query": "Which prompts ask in the attention that fuses: own, common or both.",
    "rank": "The rank of LoRA: the smaller, the fewer bytes.",
    "rate": "How far the server goes along the clients' mean step.",
    "reading": "What goes on after the freeze: A is all but the part, B values and head alone.",
    "rounds": "How many rounds the base is trained under a head that nobody trains.",
    "rows": "On how many rows a client looks before it chooses.",
    "settle": "How little a part still moves beyond its drift when it is frozen; 0 never looks.",
    "start": "What prompts begin as: words or noise.",
    "strength": "How strongly a client is pulled towards the world.",
    "text": "How many prompts the text has.",
    "to": "Which tokens are looked at: first, last, content or labelled; empty as with `by`.",
    "together": "Whether all choose the same blocks, by the sum of their scores.",
    "trait": "The trait by which a client says a lower rank; empty is the same for all.",
    "vision": "How many prompts the picture has.",
    "vision_at": "The block in front of which the picture's prompts enter.",
    "warmup": "How many rounds everything is trained before the freeze.",
    "whole": "How many of the chosen blocks keep their MLP; 0 is all of them.",
    "width": "The inner width of the attention that fuses.",
    "with_head": "Whether the head is trained too; say false where it is tied to the embeddings.",
}
"""What each setting of our methods is, in one sentence: one name means the same in all of them."""


@dataclass(frozen=True)
class SheetRow:
    """One setting of a method: its default, and what it is."""

    name: str
    default: Any
    about: str = ""


@dataclass(frozen=True)
class Sheet:
    """A method in full. `about` says it in a sentence, `source` is the paper and where we differ.

    `says` are its lines as both ends compare them, the plan first.
    """

    name: str
    origin: str
    about: str
    source: str
    settings: tuple[SheetRow, ...]
    plan: str
    says: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """It for a person; the first line is its name."""
        settings = [f"    {s.name} = {s.default!r}  {s.about}".rstrip() for s in self.settings]
        paper = ["", *self.source.splitlines()] if self.source else []
        told = [self.about, *paper, "", "settings", *(settings or ["    none"])]
        used = f'[method]\nname = "{self.name}"'
        return [f"{self.name}, of {self.origin}", *told, "", *self.says, "", "in a study", used]

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        return asdict(self)


def sheet_of(name: str) -> Sheet:
    """The sheet of a method by its name, or where it stands."""
    found, made = METHOD_NAMES.find(name), method_named(name)
    first, _, rest = (getdoc(found.value) or "").partition("\n\n")
    takes = signature(found.value).parameters.values()
    about = " ".join(first.split())
    settings = tuple(_setting(each, ours=not found.module) for each in takes)
    return Sheet(name, found.origin, about, rest, settings, made.plan.text, made.lines)


def _setting(said: Parameter, *, ours: bool) -> SheetRow:
    # What others call by a name of ours may be another thing.
    return SheetRow(said.name, said.default, SENTENCES.get(said.name, "") if ours else "")
