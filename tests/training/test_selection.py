# SPDX-License-Identifier: Apache-2.0
"""Choosing blocks saves what it says: bytes on the wire, and the backward pass below them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import zoo
from clients import few, loss
from torch import Tensor, nn

from fedplan.language.parser import parse
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.methods.registry import method_by_name
from fedplan.models.catalog import params_of
from fedplan.models.description import block_modules, describe
from fedplan.models.params import Block, Params
from fedplan.training.freezing import trainable

NAMES = ("bert", "llama", "vit", "gpt-neox", "t5")


@pytest.mark.parametrize("name", NAMES)
def test_blocks_below_the_first_trained_one_get_no_backward_pass(name: str) -> None:
    model = zoo.build(name)
    blocks = block_modules(model)
    reached = set[Block]()
    for block, module in blocks.items():
        module.register_forward_hook(_note(reached, block))
    stack = next(reversed(blocks)).stack
    top = max(block.number for block in blocks if block.stack == stack)
    roles = resolve(
        parse(f"chain(freeze(), share({stack} & blocks({top})))"), describe(model), Turn()
    )
    with trainable(model, roles) as trainable_params:
        assert list(trainable_params.parameters())
        loss(model, few(name)["client-0"].batch(torch.arange(2))).backward()
    assert reached == {Block(stack, top)}


def _note(reached: set[Block], block: Block) -> Callable[..., None]:
    """A hook that notes a block whose output carries a graph: only such a one is gone back to."""

    def hook(_: nn.Module, __: object, out: object) -> None:
        while not isinstance(out, Tensor):
            out = out[0]  # type: ignore[index]
        if out.requires_grad:
            reached.add(block)

    return hook


def _up(params: Params, name: str, **settings: object) -> int:
    blocks = {p.block_id for p in params if p.block_id}
    scores = {block: float(block.number) for block in blocks if block}
    roles = resolve(method_by_name(name, settings).plan, params, Turn(scores=scores))
    return sum(p.nbytes for p, role in roles.items() if role is Role.SHARE)


def test_four_of_twelve_blocks_save_two_thirds_and_pruning_three_quarters() -> None:
    params = params_of("bert-base", task="text-classification", labels=8)
    body = tuple(p for p in params if p.block is not None or p.kind == "head")
    for held, chosen, pruned in ((params, 0.735, 0.82), (body, 0.66, 0.77)):
        whole = _up(held, "fedavg")
        assert 1 - _up(held, "safl", k=4) / whole > chosen
        assert 1 - _up(held, "safl", k=4, whole=2) / whole > pruned
