# SPDX-License-Identifier: Apache-2.0
"""Memory: what a client's turn takes on its device, from shapes; activations are estimated."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from fedplan.errors import FedplanError
from fedplan.language.plan import Roles
from fedplan.models.params import ITEMSIZE, TRAINED, Block, Kind, Param, Params

STATES = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "sgd": 0, "momentum": 1,
          "rmsprop": 1, "adagrad": 1, "adafactor": 0}  # fmt: skip
"""Numbers that an optimiser remembers for each one that it trains."""
SCALES = 1 / 64 + 4 / (64 * 256)
"""Bytes beside each number of 4 bits: every 64 have a scale of a byte, and 256 of these another."""
PACKED = {"": 0.0, "nf4": 0.5 + SCALES, "fp4": 0.5 + SCALES, "int8": 1.0}
"""Bytes of one number of a quantised weight, as bitsandbytes packs it; rows of 8 bits are few."""
PAIRS = "uint8"
"""The dtype of a weight that is packed already: two numbers a byte."""
CARD = 24 * 10**9
"""A card that many have."""

_ATTENDING = (Kind.QUERY, Kind.KEY, Kind.VALUE)


@dataclass(frozen=True)
class Load:
    """One step of a client: its batch, tokens a row, optimiser, and how the model is held.

    `checkpointing` keeps a block's input alone and works the rest out again; `quantised` holds the
    linear weights of the blocks in 4 or 8 bits; `half` computes in 16 bits what is held in more.
    """

    batch: int = 8
    length: int = 512
    optimiser: str = "adamw"
    checkpointing: bool = False
    quantised: str = ""
    half: bool = False

    def __post_init__(self) -> None:
        if self.optimiser not in STATES:
            raise FedplanError(
                f"nobody knows what {self.optimiser!r} remembers: say one of {', '.join(STATES)}"
            )
        if self.quantised not in PACKED:
            known = ", ".join(filter(None, PACKED))
            raise FedplanError(f"quantised is {self.quantised!r}: say one of {known}")
        if self.batch < 1 or self.length < 1:
            raise FedplanError(f"a step has rows and tokens, not {self.batch} and {self.length}")

    @property
    def tokens(self) -> int:
        """The tokens of a batch."""
        return self.batch * self.length

    @property
    def text(self) -> str:
        """It in words."""
        held = f", weights in {self.quantised}" if self.quantised else ""
        again = ", checkpointing" if self.checkpointing else ""
        return f"batch {self.batch}, {self.length} tokens a row, {self.optimiser}{held}{again}"


@dataclass(frozen=True)
class Memory:
    """The bytes of a turn: the first three follow from shapes, activations are estimated."""

    weights: dict[str, int]
    gradients: int
    optimiser: int
    activations: int
    answers: int

    @property
    def total(self) -> int:
        """All of it, as if all of it were there at once."""
        held = sum(self.weights.values()) + self.gradients + self.optimiser
        return held + self.activations + self.answers

    def json(self) -> dict[str, Any]:
        """It for programs, in bytes."""
        return {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimiser": self.optimiser,
            "activations_estimated": self.activations,
            "answers_estimated": self.answers,
            "total_estimated": self.total,
            "fits_24_gb": self.total < CARD,
        }


def memory_of(params: Params, roles: Roles, step: Load) -> Memory:
    """The memory of one turn in which params have these roles."""
    trained = frozenset(p for p in params if roles[p].trained)
    weights = Counter[str]()
    for p in params:
        weights[_held(p, step)] += _nbytes(p, step)
    if step.half:
        # Autocast keeps a copy of each weight that it has cast, until the step is done.
        cast = (p for p in params if p.at and ITEMSIZE[p.dtype] > 2)
        weights["16-bit copies"] = sum(2 * p.numel for p in cast)
    gradients = sum(p.nbytes for p in trained)
    return Memory(
        {name: n for name, n in weights.items() if n},
        gradients,
        STATES[step.optimiser] * gradients,
        _activations(params, trained, step),
        _answers(params, trained, step),
    )


def _held(param: Param, step: Load) -> str:
    return step.quantised if _is_packed(param, step) else param.dtype


def _is_packed(param: Param, step: Load) -> bool:
    """A linear weight of a block; embeddings, norms, heads, biases and adapters stay."""
    linear = param.kind in (*_ATTENDING, Kind.OUT, Kind.MLP) and len(param.shape) > 1
    return bool(step.quantised) and linear and param.at is not None and "bias" not in param.tags


def _nbytes(param: Param, step: Load) -> int:
    if param.dtype == PAIRS:
        return int(_numel(param) * PACKED["nf4"])
    packed = _is_packed(param, step)
    return int(param.numel * PACKED[step.quantised]) if packed else param.nbytes


def _numel(param: Param) -> int:
    """How many numbers a param stands for."""
    return 2 * param.numel if param.dtype == PAIRS else param.numel


def _activations(params: Params, trained: frozenset[Param], step: Load) -> int:
    """What the blocks keep for the backward pass, from the lowest one that is trained on.

    With checkpointing it is the input of each, and one of them whole. A forward pass alone takes
    what its widest layer takes in and gives.
    """
    blocks = _blocks(params)
    if not trained or not blocks:
        return 0
    awake = _awake(blocks, trained)
    kept = [_kept(ps, trained, step) for ps in awake]
    passing = step.tokens * max((_width(b) + _inner(b)) * _item(b, step) for b in blocks.values())
    if step.checkpointing and kept:
        inputs = (step.tokens * _width(ps) * _item(ps, step) for ps in awake)
        return sum(inputs) + max(kept)
    return max(sum(kept), passing)


def _blocks(params: Params) -> dict[Block, list[Param]]:
    blocks = dict[Block, list[Param]]()
    for p in params:
        if p.at is not None:
            blocks.setdefault(p.at, []).append(p)
    return blocks


def _awake(blocks: dict[Block, list[Param]], trained: frozenset[Param]) -> list[list[Param]]:
    """The params of each block that a gradient passes."""
    lowest = {stack: _lowest(stack, trained) for stack in {at.stack for at in blocks}}
    if lowest.get("encoder") is not None and "decoder" in lowest:
        lowest["decoder"] = 0  # it looks at the encoder from its first block on
    found = list[list[Param]]()
    for at, params in blocks.items():
        low = lowest[at.stack]
        if low is not None and at.number >= low:
            found.append(params)
    return found


def _lowest(stack: str, trained: frozenset[Param]) -> int | None:
    """The lowest block of a stack that a gradient reaches: the first if embeddings are trained."""
    below = any(p.kind in (Kind.EMBED, Kind.PROMPT) and p.stack in ("", stack) for p in trained)
    numbers = [p.block for p in trained if p.stack == stack and p.block is not None]
    return 0 if below else min(numbers, default=None)


def _kept(params: list[Param], trained: frozenset[Param], step: Load) -> int:
    """The bytes that one block keeps.

    For each token: the input of each norm; query, key, value and what attention gives; what enters
    the activation of the MLP; and the input of every layer whose weight, or adapter, is trained.
    """
    width = _width(params)
    norms = [p for p in params if p.kind is Kind.NORM and p.numel == width and "bias" not in p.tags]
    root = not any(p.kind is Kind.NORM and "bias" in p.tags for p in params)
    numbers = width * len(norms) * (2 if root else 1)
    numbers += width * sum(p in trained for p in norms) * root
    numbers += sum(_outputs(params, kind, width) for kind in _ATTENDING)
    numbers += _outputs(params, Kind.QUERY, width)  # what attention gives is as wide as what asks
    numbers += _mlp(params, trained, width)
    numbers += width * _fed(params, trained, *_ATTENDING)
    adapters = [p for p in params if p in trained and p.kind is Kind.ADAPTER and "lora_a" in p.tags]
    numbers += sum(p.shape[0] for p in adapters)
    return step.tokens * numbers * _item(params, step)


def _mlp(params: list[Param], trained: frozenset[Param], width: int) -> int:
    """What an MLP keeps of a token; one with a gate has three matrices, and multiplies two."""
    whole, inner = _outputs(params, Kind.MLP, width), _inner(params)
    gated = whole > 2.5 * inner
    fed = _fed(params, trained, Kind.MLP)
    return (3 * inner if gated else inner) + fed * (width + inner)


def _inner(params: list[Param]) -> int:
    """How wide an MLP is within."""
    width = _width(params)
    sizes = [_numel(p) // width for p in params if p.kind is Kind.MLP and len(p.shape) > 1]
    return min(sizes, default=0)


def _outputs(params: list[Param], kind: Kind, width: int) -> int:
    """What layers of a kind give for a token, all together."""
    matrices = (p for p in params if p.kind is kind and len(p.shape) > 1 and "bias" not in p.tags)
    return sum(map(_numel, matrices)) // width


def _fed(params: list[Param], trained: frozenset[Param], *kinds: Kind) -> bool:
    """Whether a weight of some kinds is trained, or an adapter on one: then its input is kept."""
    hosts = set(kinds)
    return any(
        p in trained and len(p.shape) > 1 and (p.kind in hosts or not hosts.isdisjoint(p.on))
        for p in params
    )


def _width(params: list[Param]) -> int:
    """How wide the stream through a block is: as its norms."""
    norms = [p.numel for p in params if p.kind is Kind.NORM]
    return max(norms or [p.shape[-1] for p in params])


def _item(params: list[Param], step: Load) -> int:
    """Bytes of one number that a block computes: as it holds its own that are not packed."""
    if step.half:
        return 2
    sizes = Counter[str]()
    for p in params:
        if p.dtype in TRAINED and p.kind is not Kind.ADAPTER:
            sizes[p.dtype] += p.numel
    return ITEMSIZE[sizes.most_common(1)[0][0]] if sizes else 4


def _answers(params: Params, trained: frozenset[Param], step: Load) -> int:
    """Where a model answers with a word for each token: logits, their logarithms and gradients."""
    heads = [p for p in params if p.kind is Kind.HEAD and len(p.shape) > 1]
    tied = [p for p in params if p.kind is Kind.EMBED and p.tied]
    words = max((p.shape[0] for p in (*heads, *tied)), default=0)
    if not trained or words < 1000:
        return 0  # a classifier's answer, once a row
    item = 2 if step.half else ITEMSIZE[(heads or tied)[0].dtype]
    return step.tokens * words * (item + 8)
