# SPDX-License-Identifier: Apache-2.0
"""Methods that train a part of the model and leave the rest as loaded."""

from __future__ import annotations

from fedplan.language.parts import bias, blocks, body, head, mlp
from fedplan.language.plan import best, chain, cycle, freeze, share
from fedplan.methods.method import Method
from fedplan.training.probes import attention_probe, get_probe


def safl(
    k: int = 4,
    whole: int = 0,
    probe: str = "attention",
    to: str = "",
    by: str = "",
    examples: int = 64,
    joint_choice: bool = False,
    absent: bool = False,
    with_head: bool = True,
) -> Method:
    """SAFL: each client trains and sends the `k` blocks with the highest attention scores.

    Li and Zhang, Selective Attention Federated Learning, 2025 (arXiv 2504.11793). A block's score
    is the attention from the query tokens `by` to the key tokens `to`, on `examples` examples: see
    `attention_probe`. The paper leaves open whether the head is trained (here by `with_head`), how
    the chosen blocks are pruned, and how a block that only some clients sent is averaged. With
    `whole` from 1 to `k` - 1, only the `whole` blocks of highest score train the MLP; otherwise all
    chosen blocks do. `absent`: clients that did not send a block count as unchanged,
    instead of not at all. `joint_choice` makes one choice for all clients from summed scores, which
    also shrinks the download. The controls are other probes: random, gradient, last, middle.
    """
    scorer = (
        attention_probe(to=to, by=by, examples=examples)
        if probe == "attention"
        else get_probe(probe)
    )
    chosen = chain(best(k, body & ~mlp), best(whole)) if 0 < whole < k else best(k)
    plan = chain(freeze(), *([share(head)] if with_head else []), chosen)
    return Method(plan, probe=scorer, joint_choice=joint_choice, absent=absent)


def bitfit() -> Method:
    """BitFit: train the biases and the head.

    Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning, 2022.
    """
    return Method(chain(freeze(), share(bias | head)))


def fedpart(depth: int = 12) -> Method:
    """FedPart: one block per round, in order; the head in every round.

    Wang et al., Why Go Full? Elevating Federated Learning Through Partial Network Updates, 2024.
    The cycle has the blocks 0 to `depth` - 1, and repeats until the run ends. The paper begins with
    rounds that train the whole model: for these, write a plan with `when(after(...), ...)`.
    """
    rounds = [share(blocks(block)) for block in range(depth)]
    return Method(chain(freeze(), cycle(*rounds), share(head)))


def head_only() -> Method:
    """Linear probing: train the head only. The baseline of partial methods."""
    return Method(chain(freeze(), share(head)))
