# SPDX-License-Identifier: Apache-2.0
"""Methods that train the whole model first, and then let a part of it stand still."""

from __future__ import annotations

from fedplan.errors import FedplanError
from fedplan.language.parser import parse_part
from fedplan.language.parts import Part, head, value
from fedplan.language.plan import chain, freeze, share, when
from fedplan.language.turn import phase
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned, Settled
from fedplan.models.params import Kind


def fedfrozen(
    warmup: int = 10,
    part: str = "query | key",
    reading: str = "A",
    with_head: bool = True,
    settle: float = 0.0,
    by: str = "bend",
) -> Method:
    """FedFrozen: train everything for `warmup` rounds, then freeze the attention kernel.

    Du et al., FedFrozen, 2026 (arXiv 2605.06446). What goes on after the freeze is not known for a
    deep Transformer: in reading A everything but `part`, in reading B the values and the head. The
    layers below still move, so a frozen kernel is not a frozen attention map. Other parts are
    controls: `value`, or `kernel`, which also holds relative positions and adapters. With `settle`
    above 0, `warmup` is the least, and the freeze comes when the part has settled, `by` a rule: see
    `Settled`.
    """
    readings = {
        "A": freeze(parse_part(part)),
        "B": chain(freeze(), share(_and_head(value, with_head))),
    }
    if reading not in readings:
        raise FedplanError(f"fedfrozen has reading A and reading B, not {reading!r}")
    if by != "bend" and not settle:
        raise FedplanError(f"fedfrozen settles by {by} if settle is above 0: say how far, as 0.1")
    plan = chain(share(), when(phase("frozen"), readings[reading]))
    if settle:
        return Method(plan, announce=Settled("frozen", _kinds(part), settle, warmup, by))
    return Method(plan, announce=Planned({"frozen": warmup}))


def _kinds(part: str) -> tuple[str, ...]:
    """The kinds that a part joins: drift is told by kind, and of no smaller part."""
    named = [word.strip() for word in part.split("|")]
    if strange := [word for word in named if word not in {kind.value for kind in Kind}]:
        raise FedplanError(
            f"settle looks at whole kinds, and {strange[0]!r} is none: join some, as query | key"
        )
    return tuple(named)


def _and_head(part: Part, with_head: bool) -> Part:
    """A language model's head is tied to its embeddings, and is left out."""
    return part | head if with_head else part
