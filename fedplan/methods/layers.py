# SPDX-License-Identifier: Apache-2.0
"""Methods that train a part of the model and leave the rest as loaded."""

from __future__ import annotations

from fedplan.language.parts import bias, blocks, body, head, mlp
from fedplan.language.plan import Plan, best, chain, cycle, freeze, share
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
    is the attention to the tokens `to` of the task. The paper leaves open how a block that only
    some clients sent is averaged (`absent`), whether the head is trained, and how the chosen blocks
    are pruned: here the head is trained (`with_head`), and all but the first `whole` of the chosen
    blocks leave out their MLP. `joint_choice` makes one choice for all clients from summed scores,
    which also shrinks the download. The controls are other probes: random, gradient, last, middle.
    """
    scorer = (
        attention_probe(to=to, by=by, rows=examples) if probe == "attention" else get_probe(probe)
    )
    plan = chain(freeze(), *([share(head)] if with_head else []), _chosen_blocks(k, whole))
    return Method(plan, probe=scorer, joint_choice=joint_choice, absent=absent)


def _chosen_blocks(k: int, whole: int) -> Plan:
    return chain(best(k, body & ~mlp), best(whole)) if 0 < whole < k else best(k)


def bitfit() -> Method:
    """BitFit: train the biases and the head.

    Ben Zaken et al., BitFit: Simple Parameter-efficient Fine-tuning, 2022.
    """
    return Method(chain(freeze(), share(bias | head)))


def fedpart(depth: int = 12) -> Method:
    """FedPart: one block per round, in order; the head in every round.

    Wang et al., Why Go Full? Elevating Federated Learning Through Partial Network Updates, 2024.
    The paper begins with full rounds and repeats its cycle: use `when(after(...), ...)` for that.
    """
    rounds = [share(blocks(block)) for block in range(depth)]
    return Method(chain(freeze(), cycle(*rounds), share(head)))


def head_only() -> Method:
    """Linear probing: train the head only. The baseline of partial methods."""
    return Method(chain(freeze(), share(head)))
