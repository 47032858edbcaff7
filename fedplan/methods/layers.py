# SPDX-License-Identifier: Apache-2.0
"""Methods that train a part of the model, and leave the rest as it was loaded."""

from __future__ import annotations

from fedplan.method import Method
from fedplan.parts import bias, blocks, head
from fedplan.plan import chain, cycle, freeze, share


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
