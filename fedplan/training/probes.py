# SPDX-License-Identifier: Apache-2.0
"""Probes: a look at a client's own rows that gives each block a score, for `best` to choose by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.examples import Examples, Loss
from fedplan.errors import FedplanError
from fedplan.language.wording import phrase, stated
from fedplan.models.attention import aligned, listen, places
from fedplan.models.description import blocks_of
from fedplan.models.params import Block
from fedplan.naming import Registry
from fedplan.tensors.devices import at_rest, brought, device_of, numbers, widest
from fedplan.tensors.named import Batch

AT_ONCE = 8
"""Rows that a probe runs together: maps grow with the square of the length."""


@dataclass(frozen=True)
class Look:
    """What a probe may use: the model as the turn begins, the rows, their loss, and a seed."""

    model: nn.Module
    rows: Examples
    blocks: tuple[Block, ...]
    seed: int
    loss: Loss

    def some(self, rows: int) -> Iterator[Tensor]:
        """Indices of some of the rows, drawn by the seed, a few at once."""
        drawn = torch.randperm(len(self.rows), generator=seeds.generator("probe", self.seed))
        if not len(drawn):
            raise FedplanError("a probe needs rows to look at, and the client has none")
        yield from cast("tuple[Tensor, ...]", drawn[:rows].split(AT_ONCE))

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        """Rows of these indices, where the model is."""
        return brought(self.rows.batch(indices), device_of(self.model))


Probe = Callable[[Look], Mapping[Block, float]]
"""Scores blocks. One that looks at no rows says so by `public`: see the function of this name."""
Scorer = TypeVar("Scorer", bound=Probe)


def public(probe: Scorer) -> Scorer:
    """Say of a probe that it looks at no rows. It is given none, so what it says tells nothing."""
    probe.public = True  # pyright: ignore[reportFunctionMemberAccess]
    return probe


def is_public(probe: Probe) -> bool:
    """Whether a probe says that it looks at no rows; who does not say it looks at them."""
    return getattr(probe, "public", False) is True


@public
@stated("random")
def at_random(look: Look) -> dict[Block, float]:
    """Scores that look at nothing: the control that a probe must beat."""
    drawn = torch.rand(len(look.blocks), generator=seeds.generator("probe", look.seed))
    return {block: float(score) for block, score in zip(look.blocks, drawn, strict=True)}


@public
@stated("last")
def from_the_top(look: Look) -> dict[Block, float]:
    """The later a block, the higher its score: `best(k)` is then the last k blocks."""
    return {block: float(block.number) for block in look.blocks}


@public
@stated("middle")
def from_the_middle(look: Look) -> dict[Block, float]:
    """The nearer to the middle of its stack a block is, the higher its score."""
    counts = Counter(block.stack for block in look.blocks)
    return {b: -abs(b.number - counts[b.stack] / 2) for b in look.blocks}


@dataclass(frozen=True)
class Fixed:
    """A probe that always names the same blocks."""

    numbers: tuple[int, ...]
    public: ClassVar[bool] = True

    @property
    def text(self) -> str:
        """It in one line, for both ends to compare."""
        return phrase("fixed", *self.numbers)

    def __call__(self, look: Look) -> dict[Block, float]:
        if strange := set(self.numbers) - {block.number for block in look.blocks}:
            raise FedplanError(f"there is no block {min(strange)} to fix the choice on")
        scores = {number: float(len(self.numbers) - i) for i, number in enumerate(self.numbers)}
        return {block: scores.get(block.number, 0.0) for block in look.blocks}


def fixed(*numbers: int) -> Probe:
    """These blocks of each stack, always; where `best` wants fewer, those named first."""
    return Fixed(numbers)


def public_look(blocks: tuple[Block, ...], seed: int) -> Look:
    """All that a public probe may use: neither rows, nor their loss, nor a model of theirs."""
    return Look(nn.Module(), _Nothing(), blocks, seed, _no_loss)


class _Nothing:
    """No rows."""

    def __len__(self) -> int:
        return 0

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        raise FedplanError("a probe that is said to look at no rows looked at some")


def _no_loss(model: nn.Module, batch: Batch) -> Tensor:
    raise FedplanError("a probe that is said to look at no rows asked for their loss")


def _require_rows(rows: int) -> None:
    if rows < 1:
        raise FedplanError(f"a probe cannot look at rows = {rows}: give it 1 or more")


def _first(real: Tensor) -> Tensor:
    return real & (real.cumsum(1) == 1)


def _last(real: Tensor) -> Tensor:
    return _first(real.flip(1)).flip(1)


def _content(real: Tensor) -> Tensor:
    return real & ~_first(real) & ~_last(real)


_BY: dict[str, Callable[[Tensor], Tensor]] = {"all": Tensor.clone, "first": _first, "last": _last}
_TO: dict[str, Callable[[Tensor], Tensor]] = {"first": _first, "last": _last, "content": _content}


def attention(to: str = "", by: str = "", rows: int = 64, bounded: bool = False) -> Probe:
    """How much each block attends to the positions that matter, per example (SAFL's formula 1).

    The sum over heads, over queries `by` (all, first, last) and over keys `to` (first, last,
    content: all but these two, labelled) of the probabilities. `bounded` divides it by heads and
    queries. By default all look to the first, where a [CLS] stands. In a causal decoder the last,
    which has seen all others, looks to the content: there the first token is a sink of attention
    whatever the task, and the last is seen by itself alone.
    """
    _require_rows(rows)
    _require("to", to, (*_TO, "labelled"))
    _require("by", by, tuple(_BY))

    @stated(phrase("attention", to=to, by=by, rows=rows, bounded=bounded))
    def attending(look: Look) -> dict[Block, float]:
        total, count = dict.fromkeys(look.blocks, 0.0), 0
        for indices in look.some(rows):
            batch = look.batch(indices)
            heard = _Heard(batch, to, by)
            listen(look.model, batch, heard)
            for block in look.blocks:
                total[block] += heard.score(block, bounded)
            count += len(indices)
        return {block: score / count for block, score in total.items()}

    return attending


def _require(what: str, word: str, known: tuple[str, ...]) -> None:
    if word and word not in known:
        raise FedplanError(f"attention has no {what} = {word!r}; there are {', '.join(known)}")


@dataclass(frozen=True)
class _Heard:
    """The attention of a batch: each example's sum, and heads times queries, of each block."""

    batch: Batch
    to: str
    by: str
    sums: dict[Block, Tensor] = field(default_factory=dict[Block, Tensor])
    sizes: dict[Block, Tensor] = field(default_factory=dict[Block, Tensor])

    def __call__(self, block: Block, maps: Tensor) -> None:
        queries, keys = (each.to(maps.device) for each in self._positions(block, maps))
        queries, keys = aligned(queries, maps.shape[2]), aligned(keys, maps.shape[3])
        wide = widest(maps.device)
        # Rows one by one: what a padded query attends to may be no number at all.
        sums = [
            each[:, query][..., key].sum(dtype=wide)
            for each, query, key in zip(maps, queries, keys, strict=True)
        ]
        self._add(self.sums, block, torch.stack(sums))
        self._add(self.sizes, block, queries.sum(1).to(wide) * maps.shape[1])

    def _positions(self, block: Block, maps: Tensor) -> tuple[Tensor, Tensor]:
        real = places(self.batch, block.stack)
        if real is None:
            real = maps.new_ones(maps.shape[0], maps.shape[2], dtype=torch.bool)
        causal = block.stack == "decoder"
        to = self.to or ("content" if causal else "first")
        by = self.by or ("last" if causal else "all")
        return _BY[by](real), self._labelled(real) if to == "labelled" else _TO[to](real)

    def _labelled(self, real: Tensor) -> Tensor:
        labels = self.batch.get("labels")
        if labels is None or labels.shape != real.shape:
            raise FedplanError('attention(to="labelled") needs a label for each token of the rows')
        return real & (labels.to(real.device) != -100)

    def _add(self, held: dict[Block, Tensor], block: Block, each: Tensor) -> None:
        """Add what belongs to each example: its row, its image's windows, or texts of no row."""
        rows = len(next(iter(self.batch.values())))
        if block.stack == "text" and "input_ids" not in self.batch:
            each = each.sum().expand(rows)
        held[block] = each.reshape(rows, -1).sum(1).cpu().double() + held.get(block, 0.0)

    def score(self, block: Block, bounded: bool) -> float:
        if block not in self.sums:
            raise FedplanError(
                f"no self-attention was heard in {block.stack} block {block.number}: its attention "
                "gives no probabilities, so another probe must choose"
            )
        sums = self.sums[block]
        return float((sums / self.sizes[block].clamp(min=1) if bounded else sums).sum())


def gradient(rows: int = 64) -> Probe:
    """How steep the loss is in each block: the norm of its gradient, whatever is frozen."""
    _require_rows(rows)

    @stated(phrase("gradient", rows=rows))
    def steepness(look: Look) -> dict[Block, float]:
        modules = blocks_of(look.model)
        found = _gradients(look, [w for b in look.blocks for w in modules[b].parameters()], rows)
        wide = widest(device_of(look.model))
        sums = [each.to(wide).square().sum() for each in found.values()]
        squares = dict(zip(found, numbers(sums), strict=True))
        return {
            block: sum(squares.get(weight, 0.0) for weight in modules[block].parameters()) ** 0.5
            for block in look.blocks
        }

    return steepness


def _gradients(look: Look, weights: list[nn.Parameter], rows: int) -> dict[nn.Parameter, Tensor]:
    """The gradient of the mean loss over the rows looked at; the model's own stay untouched."""
    flags = {weight: weight.requires_grad for weight in weights if weight.is_floating_point()}
    found, parts = {weight: torch.zeros_like(weight) for weight in flags}, list(look.some(rows))
    try:
        for weight in flags:
            weight.requires_grad_(True)
        with at_rest(look.model), torch.enable_grad():
            for indices in parts:
                share = len(indices) / sum(map(len, parts))
                loss = look.loss(look.model, look.batch(indices)) * share
                each = torch.autograd.grad(loss, list(flags), materialize_grads=True)
                for weight, steps in zip(flags, each, strict=True):
                    found[weight] += steps
    finally:
        for weight, flag in flags.items():
            weight.requires_grad_(flag)
    return found


PROBES: dict[str, Probe] = {
    "attention": attention(),
    "gradient": gradient(),
    "random": at_random,
    "last": from_the_top,
    "middle": from_the_middle,
}
"""The probes that everybody has, with their defaults."""
PROBE_NAMES: Registry[Probe] = Registry("probe", PROBES)
"""All probes that a study can name."""


def probe_named(name: str) -> Probe:
    """The probe of a name, or that which stands at `package.module:attribute`."""
    return PROBE_NAMES.find(name).value
