# SPDX-License-Identifier: Apache-2.0
"""Parts: sets of params, selected by kind, position or name and combined with `& | ~`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from fedplan.errors import PlanError
from fedplan.language.predicates import (
    Predicate,
    format_values,
    quote_string,
    require_int,
    require_string,
)
from fedplan.models.params import Param

Part = Predicate[Param]
"""A predicate on params."""

WORDS: dict[str, str] = {
    "everything": "every parameter",
    "query": "the query projections of attention",
    "key": "the key projections of attention",
    "value": "the value projections of attention",
    "out": "the output projections of attention",
    "position": "relative-position tables inside attention",
    "kernel": "everything that sets attention weights: query, key, position, and their adapters",
    "mlp": "the feed-forward layers",
    "router": "the routers of mixtures of experts",
    "expert": "the routed experts of mixtures of experts",
    "norm": "norms of any kind",
    "scale": "layer scales and logit scales",
    "embed": "token, patch and absolute-position embeddings",
    "head": "everything after the last block: pooler, classifier, projections",
    "prompt": "learned prompts",
    "adapter": "LoRA and other adapters",
    "bias": "bias vectors",
    "lora_a": "the input factor A of LoRA",
    "lora_b": "the output factor B of LoRA",
    "lora_m": "the magnitudes of DoRA",
    "cross": "the cross-attention of a decoder",
    "common": "prompts meant to be shared, and adapters named common",
    "own": "prompts meant to stay with a client, and adapters named own",
    "body": "everything inside a block",
    "encoder": "the encoder stack",
    "decoder": "the decoder stack",
    "text": "the text tower",
    "vision": "the vision tower",
    "fusion": "the modules that fuse common and own prompts",
}
"""The words that name a part, with their meanings."""


class PartAtom(Predicate[Param]):
    """An elementary part: one without `&`, `|` or `~`."""

    @property
    def subject_type(self) -> str:
        return "part"


class PlaceAtom(PartAtom):
    """A part by position; uncertain for params whose block is unknown."""

    def is_uncertain(self, subject: Param) -> bool:
        return "body" in subject.uncertain_words


@dataclass(frozen=True)
class Word(PartAtom):
    """A part named by one of the WORDS: all params with `name` among their words."""

    name: str

    @property
    def text(self) -> str:
        return self.name

    def holds(self, subject: Param) -> bool:
        return self.name in subject.words

    def is_uncertain(self, subject: Param) -> bool:
        return self.name in subject.uncertain_words


@dataclass(frozen=True)
class Blocks(PlaceAtom):
    """Params in the blocks with `indices`, in any stack; negative indices count from the end."""

    indices: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"blocks({format_values(self.indices)})"

    def holds(self, subject: Param) -> bool:
        block = subject.block
        indices = self.indices
        return block is not None and (block in indices or block - subject.depth in indices)


@dataclass(frozen=True)
class EndBlocks(PlaceAtom):
    """Params in the first or last `count` blocks of their stack; `end` is "first" or "last"."""

    end: str
    count: int

    @property
    def text(self) -> str:
        return f"{self.end}({self.count})"

    def holds(self, subject: Param) -> bool:
        if subject.block is None:
            return False
        first = self.end == "first"
        return subject.block < self.count if first else subject.block >= subject.depth - self.count


@dataclass(frozen=True)
class Named(PartAtom):
    """Params with a name in the model that matches `pattern`, with `*` and `?` as in fnmatch."""

    pattern: str

    @property
    def text(self) -> str:
        return f"named({quote_string(self.pattern)})"

    def holds(self, subject: Param) -> bool:
        return fnmatchcase(subject.name, self.pattern)


@dataclass(frozen=True)
class On(PartAtom):
    """Adapters and norms that act on params of the part `host`."""

    host: Predicate[Param]

    @property
    def text(self) -> str:
        return f"on({self.host.text})"

    def holds(self, subject: Param) -> bool:
        hosts = (replace(subject, kind=kind, on=frozenset()) for kind in subject.on)
        return any(self.host.holds(host) for host in hosts)

    def is_uncertain(self, subject: Param) -> bool:
        """Uncertain if it is unknown whether the param acts on the attention kernel."""
        return "kernel" in subject.uncertain_words


def require_part(value: Any, name: str) -> Part:
    """Return `value` if it is a part; otherwise raise PlanError, naming the function `name`."""
    if not isinstance(value, Predicate) or value.subject_type != "part":
        raise PlanError(f"{name} takes a part such as query | key, not {value!r}")
    return value  # pyright: ignore[reportUnknownVariableType]


def blocks(*indices: int) -> Part:
    """Return the part of the blocks with these indices, in every stack: `blocks(0, -1)`.

    Negative indices count from the end. Raises PlanError without indices, or if one is no int.
    """
    if not indices:
        raise PlanError("blocks takes one or more indices, as in blocks(0, 1)")
    return Blocks(tuple(sorted({require_int(i, "blocks", least=-(10**9)) for i in indices})))


def first(count: int) -> Part:
    """The first `count` blocks of each stack."""
    return EndBlocks("first", require_int(count, "first", least=1))


def last(count: int) -> Part:
    """The last `count` blocks of each stack."""
    return EndBlocks("last", require_int(count, "last", least=1))


def named(pattern: str) -> Part:
    """Params whose name in the model matches a pattern with `*` and `?`: `named("*.lm_head.*")`."""
    return Named(require_string(pattern, "named"))


def on(part: Part) -> Part:
    """Adapters and norms that act on a part: `on(query | key)` is LoRA's share in the kernel."""
    return On(require_part(part, "on"))


everything = Word("everything")
query, key, value, out, position = map(Word, ("query", "key", "value", "out", "position"))
mlp, router, expert, norm, scale = map(Word, ("mlp", "router", "expert", "norm", "scale"))
embed, head = map(Word, ("embed", "head"))
prompt, adapter, bias, kernel, cross = map(Word, ("prompt", "adapter", "bias", "kernel", "cross"))
lora_a, lora_b, lora_m = map(Word, ("lora_a", "lora_b", "lora_m"))
common, own, body, fusion = map(Word, ("common", "own", "body", "fusion"))
encoder, decoder, text, vision = map(Word, ("encoder", "decoder", "text", "vision"))
