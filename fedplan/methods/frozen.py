# SPDX-License-Identifier: Apache-2.0
"""Methods that train the whole model first, and then let a part of it stand still."""

from __future__ import annotations

from fedplan.errors import FedplanError
from fedplan.language.parser import parse_part
from fedplan.language.parts import Part, head, value
from fedplan.language.plan import chain, freeze, share, when
from fedplan.language.turn import phase
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned


def fedfrozen(
    warmup: int = 10, part: str = "query | key", reading: str = "A", with_head: bool = True
) -> Method:
    """FedFrozen: train everything for `warmup` rounds, then freeze the attention kernel.

    Du et al., FedFrozen, 2026 (arXiv 2605.06446). What goes on after the freeze is not known for a
    deep Transformer: in reading A everything but `part`, in reading B the values and the head. The
    layers below still move, so a frozen kernel is not a frozen attention map. Other parts are
    controls: `value`, or `kernel`, which also holds relative positions and adapters.
    """
    readings = {
        "A": freeze(parse_part(part)),
        "B": chain(freeze(), share(_and_head(value, with_head))),
    }
    if reading not in readings:
        raise FedplanError(f"fedfrozen has reading A and reading B, not {reading!r}")
    plan = chain(share(), when(phase("frozen"), readings[reading]))
    return Method(plan, announce=Planned({"frozen": warmup}))


def _and_head(part: Part, with_head: bool) -> Part:
    """A language model's head is tied to its embeddings, and is left out."""
    return part | head if with_head else part
