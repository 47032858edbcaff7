# SPDX-License-Identifier: Apache-2.0
"""What no turn trains is in memory once, and a fit that touches it is stopped in its turn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import zoo
from clients import few, loss
from torch import Tensor, nn

from fedplan.errors import FedplanError
from fedplan.federation.aggregation.defence import Defence
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_round import train_round
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.runners.local import Federation
from fedplan.tensors.named import digests
from fedplan.training.fit import TrainArguments

PACE = TrainArguments(lr=1e-2, batch_size=2, steps=1)
Meddle = Callable[[Tensor], None]


def federation(
    name: str, folder: Path, asked: Callable[..., Tensor] = loss, defence: Defence | None = None
) -> Federation:
    torch.manual_seed(0)
    method, model = method_by_name(name), zoo.build("bert")
    agreement = Agreement("base", describe(model), method, PACE)
    agreement = replace(agreement, defence=defence or Defence())
    return Federation(agreement, model, few("bert", 3), asked, folder, rounds=3)


def one_bit(value: Tensor) -> None:
    value.data.view(torch.uint8).view(-1)[5] ^= 1


def two_numbers(value: Tensor) -> None:
    flat = value.data.view(-1)
    flat[-3], flat[-4] = flat[-4].clone(), flat[-3].clone()


def all_of_it(value: Tensor) -> None:
    value.data.mul_(1.5)


@pytest.mark.parametrize("meddle", [one_bit, two_numbers, all_of_it])
def test_a_fit_that_writes_what_rests_is_stopped_in_its_first_turn(
    meddle: Meddle, tmp_path: Path
) -> None:
    """By `data`, which no version counter sees."""

    def meddling(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        meddle(next(model.parameters()))
        return loss(model, batch)

    fed = federation("head-only", tmp_path, meddling)
    with pytest.raises(FedplanError, match="trained by no turn of the plan, and changed"):
        fed.run_round()
    assert not (tmp_path / "ledger.jsonl").exists() or fed.global_state.round == 0


def test_only_what_may_change_is_copied_at_the_start(tmp_path: Path) -> None:
    fed = federation("head-only", tmp_path)
    held = {p.key for p in fed.agreement.trainable}
    assert fed.server.start.keys() == held < {p.key for p in fed.agreement.params}
    every = get_values(fed.model, fed.agreement.params)
    assert (
        digest_initial_model(fed.model, fed.agreement.params, {}).short_digests
        == fed.server.start_digests
        == digests(every)
    )


def test_the_start_is_let_go_of_once_the_world_has_moved(tmp_path: Path) -> None:
    fed = federation("fedavg", tmp_path / "one")
    start = dict(fed.server.start)
    fed.commit(fed.run_round())
    assert not fed.server.start
    values = fed.global_values()
    assert values.keys() == start.keys()
    assert any(not torch.equal(values[k], start[k]) for k in start)
    fed.commit(fed.run_round())
    at_once = digests(fed.global_state.values)
    in_two = federation("fedavg", tmp_path / "two")
    in_two.commit(in_two.run_round())
    del in_two
    again = federation("fedavg", tmp_path / "two")
    assert not again.server.start
    again.commit(again.run_round())
    assert digests(again.global_state.values) == at_once


def test_what_is_lent_is_the_models_own_and_what_is_held_is_not(tmp_path: Path) -> None:
    fed = federation("fedavg", tmp_path)
    round_state = fed.server.begin_round()
    name = next(iter(round_state.cohort))
    places = {t.untyped_storage().data_ptr() for t in fed.model.parameters()}
    for copy in (True, False):
        update = train_round(fed.agreement, fed.clients[name], round_state.cohort[name], copy=copy)
        found = {v.untyped_storage().data_ptr() in places for v in update.values.values()}
        assert found == {not copy}


@pytest.mark.parametrize("defence", [None, Defence(rule="median")])
def test_a_round_of_lent_updates_has_the_bits_of_copies(
    defence: Defence | None, tmp_path: Path
) -> None:
    fed = federation("fedavg", tmp_path / "lent", defence=defence)
    fed.run_round()
    other = federation("fedavg", tmp_path / "held", defence=defence)
    round_state = other.server.begin_round()
    updates = [
        train_round(other.agreement, other.clients[n], round_state.cohort[n])
        for n in round_state.cohort
    ]
    for update in updates:
        other.server.take(round_state, update)
    other.server.close_round(round_state)
    assert digests(fed.global_state.values) == digests(other.global_state.values)
