# SPDX-License-Identifier: Apache-2.0
"""Laws of the private vote: its cost is what an audit finds, and it still finds the winners."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo
from clients import GUARANTEES, few, loss
from epsilon_bounds import Draws, gaussian_lower_bound
from torch import Tensor, nn

from fedplan.errors import PrivacyError
from fedplan.federation.agreement import Agreement
from fedplan.methods.registry import method_by_name
from fedplan.models.description import describe
from fedplan.models.params import Block
from fedplan.privacy.accounting.accountant import Release, calibrate, epsilon
from fedplan.privacy.guard import ClientGuard
from fedplan.privacy.mechanisms.vote import NoisyVote, count_ballots, is_voting_round, make_ballot
from fedplan.runners.local import Federation
from fedplan.training.fit import TrainArguments
from fedplan.training.probes import ProbeInput

SECRET = bytes(range(32))
LOG = logging.getLogger(__name__)
BLOCKS = [Block("encoder", i) for i in range(12)]
DELTA = 1e-5


def draws(vote: NoisyVote, counts: list[int], vote_name: list[int], number: int) -> Draws:
    """What the shipped vote releases, over and over: each count, and the sum of those voted for."""
    named = dict(enumerate(counts))
    released = np.array(
        [[*vote.release(named, SECRET, f"vote {i}").values()] for i in range(number)]
    )
    return np.column_stack([released, released[:, vote_name].sum(1)])


CASES = [
    # K, noise, what the others voted, the victim's blocks
    (1, 1.0, [0] * 8, [3]),
    (4, 1.0, [0] * 12, [0, 1, 2, 3]),
    (2, 0.5, [2, 2, 0, 0, 0, 0], [4, 5]),
    (6, 4.0, [9, 9, 8, 8, 7, 7, 3, 3, 2, 2, 1, 1], [6, 7, 8, 9, 10, 11]),
]
SIZES = [10_000, pytest.param(100_000, marks=pytest.mark.nightly)]
Case = tuple[int, float, list[int], list[int]]


def audit(case: Case, number: int, wrong: float = 1.0) -> float:
    k, noise, others, vote_name = case
    with_ = [count + (i in vote_name) for i, count in enumerate(others)]
    vote = NoisyVote(k, noise * wrong)
    one, other = (draws(vote, counts, vote_name, number) for counts in (with_, others))
    found = gaussian_lower_bound(one, other, delta=DELTA)
    LOG.info("audited %.3f of %.3f", found, epsilon([NoisyVote(k, noise).event], DELTA))
    return found


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} of {len(case[2])}")
def test_no_audit_passes_the_epsilon_of_a_vote(case: Case, number: int) -> None:
    assert audit(case, number) <= epsilon([NoisyVote(case[0], case[1]).event], DELTA)


@pytest.mark.parametrize(
    "number,share", [(10_000, 0.85), pytest.param(100_000, 0.92, marks=pytest.mark.nightly)]
)
def test_the_audit_of_a_vote_comes_close(number: int, share: float) -> None:
    case = CASES[1]
    assert audit(case, number) >= share * epsilon([NoisyVote(*case[:2]).event], DELTA)


@pytest.mark.parametrize(
    "wrong,case", [(0.85, CASES[0]), pytest.param(0.5, CASES[1], marks=pytest.mark.nightly)]
)
def test_the_audit_flags_a_wrong_scale(wrong: float, case: Case) -> None:
    """Forgetting K = 4, and a little too little."""
    assert audit(case, 10_000, wrong) > epsilon([NoisyVote(*case[:2]).event], DELTA)


def peaked(clients: int, dice: np.random.Generator) -> list[list[Block]]:
    """Each client names six blocks, the first six four times as likely as the others."""
    chance = np.array([4.0] * 6 + [1.0] * 6) / 30
    return [
        [BLOCKS[i] for i in dice.choice(12, 6, replace=False, p=chance)] for _ in range(clients)
    ]


@pytest.mark.parametrize("trials", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_three_hundred_clients_find_the_exact_top_six(trials: int) -> None:
    dice, hits = np.random.default_rng(0), 0
    vote = NoisyVote(6, calibrate(0.5, DELTA, lambda noise: [Release(noise)]))
    for simulation in range(trials):
        counts = count_ballots(peaked(300, dice), BLOCKS, 6)
        found = vote.release(counts, SECRET, f"vote {simulation}")
        hits += len(make_ballot(found, 6) & make_ballot(dict(counts), 6))
    LOG.info("overlap %s", hits / 6 / trials)
    assert hits / 6 / trials >= 0.95


def test_votes_are_charged_as_what_they_are() -> None:
    assert NoisyVote(6, 2.0, 0.1).event == Release(2.0, 0.1)
    assert NoisyVote(4, 2.0).stddev == 4.0


def test_the_same_counts_have_the_same_noise_and_others_another() -> None:
    counts, vote = dict.fromkeys(BLOCKS, 5), NoisyVote(3, 1.0)
    first = vote.release(counts, SECRET, "vote 1")
    assert first == vote.release(counts, SECRET, "vote 1") and list(first) == BLOCKS
    more = {**counts, BLOCKS[0]: 6}
    contents = [(c, a) for c in (counts, more) for a in ("vote 1", "vote 2")]
    assert len({vote.digest(c, SECRET, a) for c, a in contents}) == 4
    noises = {round(vote.release(c, SECRET, a)[BLOCKS[1]] - 5, 9) for c, a in contents}
    assert len(noises) == 4


def test_a_ballot_names_the_highest_scores() -> None:
    scores = {block: float(-abs(block.number - 4)) for block in BLOCKS}
    assert make_ballot(scores, 3) == {BLOCKS[3], BLOCKS[4], BLOCKS[5]}
    assert make_ballot(dict.fromkeys(BLOCKS, 1.0), 2) == set(BLOCKS[:2])
    assert make_ballot({**scores, BLOCKS[0]: float("nan")}, 3) == frozenset()


def test_only_true_votes_count_and_each_at_most_one() -> None:
    one, two, three, four = BLOCKS[:4]
    votes = [[one, two], [two], [], [one, one], [one, two, three], [Block("decoder", 0)], (four,)]
    assert count_ballots(votes, BLOCKS[:4], 2) == {one: 1, two: 2, three: 0, four: 1}


def test_there_is_a_vote_every_so_many_rounds() -> None:
    assert [r for r in range(1, 32) if is_voting_round(r, 10)] == [1, 11, 21, 31]
    assert all(is_voting_round(r, 1) for r in range(1, 5))
    with pytest.raises(PrivacyError, match="period"):
        is_voting_round(1, 0)


def test_a_vote_that_nobody_came_to_is_held_and_charged(tmp_path: Path) -> None:
    """If it were left out, all would know that nobody was there."""
    guarantee = GUARANTEES["veiled"]
    model = zoo.build("bert")
    agreement = Agreement(
        "empty",
        describe(model),
        method_by_name("safl", {"k": 1, "joint_choice": True}),
        TrainArguments(),
        guarantee,
    )
    fed = Federation(agreement, model, few("bert"), loss, tmp_path, rounds=1)
    round_state = fed.server.begin_round()
    round_state.cohort.clear()
    fed.poll_clients(round_state)
    assert fed.server.aggregation.guard is not None
    assert [charge.name for charge in fed.server.aggregation.guard.budget.charges] == [
        "round 1: vote"
    ]
    assert fed.global_state.choice


def test_votes_of_one_name_are_over_one_draw(tmp_path: Path) -> None:
    """They are charged as that. 200 draws at a rate below delta would be charged as nothing."""
    guarantee = replace(
        GUARANTEES["cloaked"], epsilon=1e6, sampling_rate=0.5, vote_noise_multiplier=1.0
    )
    guard, seen = ClientGuard(guarantee, tmp_path), list[int]()

    def probe(look: ProbeInput) -> dict[Block, float]:
        seen.append(int(look.examples.batch(torch.tensor([0]))["x"]))
        return dict.fromkeys(look.blocks, 0.0)

    def drawn(about: str, content: str) -> list[int]:
        seen.clear()
        guard.release_votes(
            ProbeInput(nn.Module(), Numbers(), tuple(BLOCKS), 0, loss), probe, 1, about, content
        )
        return list(seen)

    first = drawn("1/north", "a")
    assert 10 < len(first) < 90
    assert drawn("1/north", "b") == first and drawn("2/north", "a") != first
    assert len(guard.budget.charges) == 3


class Numbers:
    """Rows that say which they are."""

    def __len__(self) -> int:
        return 100

    def batch(self, indices: Tensor) -> dict[str, Tensor]:
        return {"x": indices}
