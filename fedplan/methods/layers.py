# SPDX-License-Identifier: Apache-2.0
"""Methods that train a part of the model, and leave the rest as it was loaded."""

from __future__ import annotations

from fedplan.language.parts import bias, blocks, body, head, mlp
from fedplan.language.plan import Plan, best, chain, cycle, freeze, share
from fedplan.methods.method import Method
from fedplan.training.probes import attention, probe_named


def safl(
    k: int = 4,
    whole: int = 0,
    probe: str = "attention",
    to: str = "",
    by: str = "",
    rows: int = 64,
    together: bool = False,
    absent: bool = False,
    with_head: bool = True,
) -> Method:
    """SAFL: each client trains and sends the `k` blocks that its attention says matter, each round.

    Li and Zhang, Selective Attention Federated Learning, 2025 (arXiv 2504.11793). A block's score
    is the attention that goes `to` the tokens of the task. The paper does not say how a block that
    only some sent is averaged (`absent`), what becomes of the head, or how the chosen blocks are
    pruned: here the head is always trained, and all but the first `whole` of the chosen blocks
    leave out their MLP. `together` is one choice for all from summed scores, which also shrinks
    what comes down. The controls are other probes: random, gradient, last, middle.
    """
    looks = attention(to=to, by=by, rows=rows) if probe == "attention" else probe_named(probe)
    plan = chain(freeze(), *([share(head)] if with_head else []), _chosen(k, whole))
    return Method(plan, probe=looks, together=together, absent=absent)


def _chosen(k: int, whole: int) -> Plan:
    return chain(best(k, body & ~mlp), best(whole)) if 0 < whole < k else best(k)


def bitfit() -> Method:
    """BitFit: train the biases and the head.

    Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning, 2022.
    """
    return Method(chain(freeze(), share(bias | head)))


def fedpart(depth: int = 12) -> Method:
    """FedPart: one block after the other, each for one round; the head always.

    Wang et al., Why Go Full? Elevating Federated Learning Through Partial Network Updates, 2024.
    The paper begins with full rounds and repeats its cycle: say so with `when(after(...), ...)`.
    """
    turns = [share(blocks(block)) for block in range(depth)]
    return Method(chain(freeze(), cycle(*turns), share(head)))


def head_only() -> Method:
    """Linear probing: train the head, nothing else. What a partial method must beat."""
    return Method(chain(freeze(), share(head)))
