# SPDX-License-Identifier: Apache-2.0
"""Newcomers, absentees and lost homes: what each finds when it takes its turn."""

from __future__ import annotations

import shutil
from pathlib import Path

import duals
import pytest
import torch
from torch import Tensor

from fedplan.audits.ledger import verify_ledger
from fedplan.federation.agreement import Agreement
from fedplan.federation.messages import OutdatedClientState
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.journal import client_state_folder
from fedplan.training.fit import TrainArguments

PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)


@pytest.fixture
def whole(tmp_path: Path) -> Federation:
    torch.manual_seed(0)
    made = method_by_name("pfeddc")
    assert made.adapt is not None
    model = made.adapt(duals.build("clip"))
    agreement = Agreement("absence", describe(model), made, PACE)
    rows = duals.pictures_of("ann", "berta", "carla!")
    return Federation(agreement, model, rows, duals.ASKED.loss, tmp_path, rounds=6)


def play(whole: Federation, *absent: str) -> dict[str, set[str]]:
    """One round without some clients; what came down to each of the others."""
    away = {name: whole.server.roster.pop(name) for name in absent}
    round_state = whole.run_round()
    whole.commit(round_state)
    whole.server.roster |= away
    return {name: set(down.values) for name, down in round_state.cohort.items()}


def home(whole: Federation, name: str) -> dict[str, Tensor]:
    return whole.clients[name].journal.client_state()[0]


def own(whole: Federation) -> set[str]:
    return {p.key for p in whole.agreement.params if p.stack == "fusion" or "own" in p.words}


def faults(whole: Federation) -> list[str]:
    return verify_ledger(whole.agreement, read_json_lines(whole.server.folder / "ledger.jsonl"))


def test_a_newcomer_starts_from_todays_common_prompts_and_fresh_own_ones(whole: Federation) -> None:
    for _ in range(2):
        play(whole, "carla!")
    common = {p.key for p in whole.agreement.exchanged}
    before = whole.personal_values("carla!")
    assert all(torch.equal(before[k], whole.global_state.values[k]) for k in common)
    assert all(torch.equal(before[k], whole.server.start[k]) for k in own(whole))
    assert not home(whole, "carla!")
    came = play(whole)
    assert came["carla!"] == common
    assert set(home(whole, "carla!")) == own(whole)
    assert not faults(whole)


def test_an_absentee_keeps_its_own_and_gets_what_it_missed(whole: Federation) -> None:
    play(whole)
    kept = home(whole, "ann")
    for _ in range(2):
        play(whole, "ann")
    again = home(whole, "ann")
    assert all(torch.equal(kept[k], again[k]) for k in own(whole))
    assert play(whole)["ann"] == {p.key for p in whole.agreement.exchanged}
    assert not faults(whole)


def test_a_lost_client_state_is_refused_before_it_is_trained(whole: Federation) -> None:
    for _ in range(2):
        play(whole)
    shutil.rmtree(client_state_folder(whole.server.folder, "ann"))
    for act in (lambda: whole.personal_values("ann"), lambda: play(whole)):
        with pytest.raises(OutdatedClientState, match=r"for round 2.*ends with round 0"):
            act()
