# SPDX-License-Identifier: Apache-2.0
"""The server's optimizers: each against its formula, to the bit, and a user's own beside them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from clients import few, loss
from torch import Tensor

from fedplan.federation.agreement import Agreement
from fedplan.federation.global_state import GlobalState
from fedplan.language.plan import share
from fedplan.methods import (
    Method,
    ServerOptimizer,
    adagrad,
    adam,
    mean,
    method_by_name,
    nesterov,
    yogi,
)
from fedplan.methods import momentum as with_momentum
from fedplan.methods.server_optimizer import Mean, StatefulOptimizer
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.training import TrainArguments

Memory = dict[str, Tensor]
RULES: dict[str, Callable[..., Mean | StatefulOptimizer]] = {
    "mean": mean,
    "momentum": with_momentum,
    "nesterov": nesterov,
    "adam": adam,
    "yogi": yogi,
    "adagrad": adagrad,
}


def formula(rule: str, change: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """A move and both memories, as Reddi et al. write them (tau = 1e-3, beta = 0.9 and 0.99)."""
    if rule == "mean":
        return change, first, second
    if rule in ("momentum", "nesterov"):
        first = 0.9 * first + change
        return (first if rule == "momentum" else change + 0.9 * first), first, second
    first, square = 0.9 * first + (1 - 0.9) * change, change**2
    if rule == "adam":
        second = 0.99 * second + (1 - 0.99) * square
    if rule == "yogi":
        second = second - (1 - 0.99) * square * torch.sign(second - square)
    if rule == "adagrad":
        second = second + square
    return first / (second.sqrt() + 1e-3), first, second


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rule_is_its_formula_to_the_bit(rule: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    served, memory = RULES[rule](0.1), Memory()
    value = expected = torch.randn(50).to(dtype)
    first, second = torch.zeros(50), torch.full((50,), (1e-3) ** 2, dtype=torch.float64)
    for _ in range(4):
        heard = torch.randn(50).to(dtype)
        change = heard.double() - expected.double()
        moved, first, second = formula(rule, change, first.double(), second.double())
        first, second = first.float(), second.float()
        expected = (expected.double() + 0.1 * moved).to(dtype)
        value, memory = served(value, heard, memory)
        assert value.dtype == dtype and torch.equal(value, expected)
        assert all(held.dtype == torch.float32 for held in memory.values())


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_moves_towards_the_mean(rule: str) -> None:
    served, value = RULES[rule](lr=0.1), torch.zeros(3)
    goal, memory = torch.tensor([1.0, -1.0, 0.0]), Memory()
    for _ in range(3):
        value, memory = served(value, goal, memory)
    assert value[0] > 0 > value[1] and value[2] == 0


def test_the_mean_at_lr_one_is_the_mean_itself() -> None:
    heard = torch.randn(5)
    assert mean()(torch.randn(5), heard, {})[0] is heard
    assert Method(share()).server_optimizer == mean()


def test_two_rules_with_other_settings_have_other_texts() -> None:
    made = [make(lr) for make in RULES.values() for lr in (0.5, 1.0)]
    made += [adam(0.5, eps=1e-2), adam(0.5, beta1=0.8), adam(0.5, beta2=0.9)]
    texts = [each.text for each in made]
    assert len(set(texts)) == len(texts)
    assert len(set(made)) == len(made)
    assert adam(1) == adam(1.0) and adam(1).text == adam(1.0).text


def test_the_published_methods_take_them() -> None:
    assert method_by_name("fedavgm").server_optimizer == with_momentum(1.0, 0.9)
    assert method_by_name("fedadam").server_optimizer == adam(0.01)
    assert method_by_name("fedyogi", {"eps": 0.5}).server_optimizer == yogi(0.01, eps=0.5)
    inside = method_by_name("fedfrozen").with_training_of(method_by_name("fedadam"))
    assert inside.server_optimizer == adam(0.01)


def test_a_function_of_the_user_serves_and_its_memory_is_kept(tmp_path: Path) -> None:
    def halfway(old: Tensor, heard: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        rounds = memory.get("rounds", torch.zeros(1)) + 1
        return (old + heard) / 2, {"rounds": rounds}

    def after(made: ServerOptimizer, folder: str) -> GlobalState:
        model = zoo.build("bert")
        method = Method(share(), server_optimizer=made)
        agreement = Agreement("own", describe(model), method, TrainArguments(batch_size=2, steps=1))
        fed = Federation(agreement, model, few("bert"), loss, tmp_path / folder, rounds=3)
        for _ in range(2):
            fed.commit(fed.run_round())
        return fed.global_state

    own, given = after(halfway, "own"), after(mean(0.5), "given")
    assert own.memory.keys() == own.values.keys()
    assert {float(held["rounds"]) for held in own.memory.values()} == {2.0}
    for key, value in given.values.items():
        assert torch.allclose(value, own.values[key], rtol=0, atol=1e-6), key
