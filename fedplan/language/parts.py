# SPDX-License-Identifier: Apache-2.0
"""Parts: sets of params, by what they are and where they stand; joined by `& | ~`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from fedplan.errors import PlanError
from fedplan.language.predicates import Predicate, a_string, a_whole, listed, quoted
from fedplan.models.params import Param

Part = Predicate[Param]

WORDS: dict[str, str] = {
    "everything": "every parameter",
    "query": "what each token asks for in attention",
    "key": "what each token answers to",
    "value": "what each token passes on",
    "out": "attention's output projection",
    "position": "relative-position tables inside attention",
    "kernel": "all that decides who attends to whom: query, key, position, and what acts on them",
    "mlp": "the feed-forward layers",
    "router": "what chooses the experts of each token",
    "expert": "feed-forward layers of which each token uses a few",
    "norm": "layer norms of any kind",
    "scale": "layer scales and logit scales",
    "embed": "token, patch and absolute-position embeddings",
    "head": "what turns the last block's output into an answer: pooler, classifier, projections",
    "prompt": "learned prompts",
    "adapter": "LoRA and its like",
    "bias": "bias vectors",
    "lora_a": "LoRA's input side",
    "lora_b": "LoRA's output side",
    "lora_m": "DoRA's magnitudes",
    "cross": "cross-attention of a decoder",
    "common": "prompts made to be shared",
    "own": "prompts made to stay with a client",
    "body": "whatever stands in a block",
    "encoder": "the encoder's stack",
    "decoder": "the decoder's stack",
    "text": "the text tower",
    "vision": "the vision tower",
    "fusion": "the module that fuses prompts of two levels",
}
"""The words that name a part by themselves."""


class PartAtom(Predicate[Param]):
    """A part that is not joined from others."""

    @property
    def about(self) -> str:
        return "part"


class Placed(PartAtom):
    """A part by place: in doubt where nobody knows the blocks."""

    def doubtful(self, subject: Param) -> bool:
        return "body" in subject.doubts


@dataclass(frozen=True)
class Word(PartAtom):
    """A part with a name of its own."""

    name: str

    @property
    def text(self) -> str:
        return self.name

    def holds(self, subject: Param) -> bool:
        return self.name in subject.words

    def doubtful(self, subject: Param) -> bool:
        return self.name in subject.doubts


@dataclass(frozen=True)
class Blocks(Placed):
    """What stands in blocks of the given indices; a negative one counts from the end."""

    indices: tuple[int, ...]

    @property
    def text(self) -> str:
        return f"blocks({listed(self.indices)})"

    def holds(self, subject: Param) -> bool:
        here = subject.block
        return here is not None and (here in self.indices or here - subject.depth in self.indices)


@dataclass(frozen=True)
class First(Placed):
    """What stands in the first blocks of its stack."""

    count: int

    @property
    def text(self) -> str:
        return f"first({self.count})"

    def holds(self, subject: Param) -> bool:
        return subject.block is not None and subject.block < self.count


@dataclass(frozen=True)
class Last(Placed):
    """What stands in the last blocks of its stack."""

    count: int

    @property
    def text(self) -> str:
        return f"last({self.count})"

    def holds(self, subject: Param) -> bool:
        return subject.block is not None and subject.block >= subject.depth - self.count


@dataclass(frozen=True)
class Named(PartAtom):
    """What the model itself calls by a name of this pattern."""

    pattern: str

    @property
    def text(self) -> str:
        return f"named({quoted(self.pattern)})"

    def holds(self, subject: Param) -> bool:
        return fnmatchcase(subject.name, self.pattern)


@dataclass(frozen=True)
class On(PartAtom):
    """Adapters and norms that act on params of another part."""

    host: Predicate[Param]

    @property
    def text(self) -> str:
        return f"on({self.host.text})"

    def holds(self, subject: Param) -> bool:
        hosts = (replace(subject, kind=kind, on=frozenset()) for kind in subject.on)
        return any(self.host.holds(host) for host in hosts)

    def doubtful(self, subject: Param) -> bool:
        """What acts on something unknown may act on the kernel."""
        return "kernel" in subject.doubts


def a_part(value: Any, name: str) -> Part:
    """The value, if it is a part."""
    if not isinstance(value, Predicate) or value.about != "part":
        raise PlanError(f"{name} takes a part such as query | key, not {value!s}")
    return value  # pyright: ignore[reportUnknownVariableType]


def blocks(*indices: int) -> Part:
    """The blocks of the given indices, in every stack: `blocks(0, 1)`, `blocks(-1)`."""
    if not indices:
        raise PlanError("blocks takes one or more indices, as in blocks(0, 1)")
    return Blocks(tuple(sorted({a_whole(i, "blocks", least=-(10**9)) for i in indices})))


def first(count: int) -> Part:
    """The first blocks of each stack."""
    return First(a_whole(count, "first", least=1))


def last(count: int) -> Part:
    """The last blocks of each stack."""
    return Last(a_whole(count, "last", least=1))


def named(pattern: str) -> Part:
    """Params whose own name matches a pattern with `*` and `?`: `named("*.lm_head.*")`."""
    return Named(a_string(pattern, "named"))


def on(part: Part) -> Part:
    """Adapters and norms that act on a part: `on(query | key)` is LoRA's share in the kernel."""
    return On(a_part(part, "on"))


everything = Word("everything")
query, key, value, out, position = map(Word, ("query", "key", "value", "out", "position"))
mlp, router, expert, norm, scale = map(Word, ("mlp", "router", "expert", "norm", "scale"))
embed, head = map(Word, ("embed", "head"))
prompt, adapter, bias, kernel, cross = map(Word, ("prompt", "adapter", "bias", "kernel", "cross"))
lora_a, lora_b, lora_m = map(Word, ("lora_a", "lora_b", "lora_m"))
common, own, body, fusion = map(Word, ("common", "own", "body", "fusion"))
encoder, decoder, text, vision = map(Word, ("encoder", "decoder", "text", "vision"))
