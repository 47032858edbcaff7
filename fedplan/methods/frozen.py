# SPDX-License-Identifier: Apache-2.0
"""Methods that train the whole model first and then freeze a part of it."""

from __future__ import annotations

from fedplan.errors import FedplanError
from fedplan.language.parser import parse_part
from fedplan.language.parts import head, value
from fedplan.language.plan import chain, freeze, share, when
from fedplan.language.predicates import phase
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases, SettledPhase
from fedplan.models.params import Kind


def fedfrozen(
    warmup: int = 10,
    part: str = "query | key",
    reading: str = "A",
    with_head: bool = True,
    settle: float = 0.0,
    by: str = "bend",
) -> Method:
    """FedFrozen: train everything for `warmup` rounds, then freeze query and key.

    Du et al., FedFrozen, 2026 (arXiv 2605.06446). The paper leaves open which params are trained
    after the freeze in a deep Transformer: in reading A everything but `part`, in reading B the
    values and, by `with_head`, the head. The layers below still move, so frozen queries and keys
    are not a frozen attention map. Other parts are controls: `value`, or `kernel`, which includes
    relative positions and adapters. With `settle` above 0 the freeze comes after at least `warmup`
    rounds, once the part has settled by the rule `by` ("bend" or "chance") with the threshold
    `settle`: see `SettledPhase`. Raises FedplanError for an unknown reading or rule, for a `by`
    other than "bend" without `settle`, and with `settle` for a `part` that is not kinds joined by
    `|`.
    """
    # The head of a language model is tied to its embeddings, so it can be left out.
    values = value | head if with_head else value
    readings = {"A": freeze(parse_part(part)), "B": chain(freeze(), share(values))}
    if reading not in readings:
        raise FedplanError(f"fedfrozen has the readings A and B, not {reading!r}")
    if by != "bend" and not settle:
        raise FedplanError(
            f"by = {by!r} takes effect only if settle is above 0: set settle, for example to 0.1"
        )
    plan = chain(share(), when(phase("frozen"), readings[reading]))
    if settle:
        # Drift is measured by kind, and not for smaller parts.
        kinds = tuple(word.strip() for word in part.split("|"))
        if unknown := [kind for kind in kinds if kind not in {kind.value for kind in Kind}]:
            raise FedplanError(
                f"settle takes whole kinds, and {unknown[0]!r} is none: join some, as query | key"
            )
        return Method(plan, phase_rule=SettledPhase("frozen", kinds, settle, warmup, by))
    return Method(plan, phase_rule=PlannedPhases({"frozen": warmup}))
