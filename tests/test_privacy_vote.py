# SPDX-License-Identifier: Apache-2.0
"""Laws of the private vote: its cost is what an audit finds, and it still finds the winners."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter

import numpy as np
import pytest

from fedplan.params import Block
from fedplan.privacy import PrivacyError
from fedplan.privacy.accountant import epsilon
from fedplan.privacy.auditing import Draws, gaussian_lower_bound, lower_bound
from fedplan.privacy.events import Release, Vote
from fedplan.privacy.noise import Noise
from fedplan.privacy.vote import GaussianVote, GumbelVote, asked, counted

SECRET = bytes(range(32))
Case = tuple[int, int, float, list[int], list[int]]
LOG = logging.getLogger(__name__)
BLOCKS = [Block("encoder", i) for i in range(12)]


def chosen(vote: GumbelVote | GaussianVote, counts: list[int], draws: int) -> np.ndarray:
    """The ranks that the shipped vote gives, one row for each name of a release."""
    named = dict(enumerate(counts))
    return np.array([vote.choose(named, SECRET, f"vote {i}") for i in range(draws)])


def many(counts: list[int], noise: np.ndarray, k: int) -> np.ndarray:
    """The same at once, for the sizes that an audit takes."""
    return np.argsort(-(np.array(counts) + noise), axis=1)[:, :k]


def gumbel_draws(vote: GumbelVote, counts: list[int], draws: int) -> np.ndarray:
    noise = Noise.for_release(SECRET, "audit", *counts).gumbel(
        draws * len(counts), vote.k / vote.epsilon
    )
    return many(counts, noise.view(draws, -1).numpy(), vote.k)


def gaussian_draws(vote: GaussianVote, counts: list[int], draws: int) -> np.ndarray:
    shape, scale = (draws, len(counts)), vote.noise * math.sqrt(vote.k)
    noise = Noise.for_release(SECRET, "audit", *counts).gaussian(shape, scale)
    return many(counts, noise.numpy(), vote.k)


def statistics(ranks: np.ndarray, voted: list[int], blocks: int) -> Draws:
    """Of each draw: who is in, who is first, how many of the voted are in, whether in order."""
    inside = np.stack([(ranks == block).any(1) for block in range(blocks)], axis=1)
    first = np.stack([ranks[:, 0] == block for block in range(blocks)], axis=1)
    hits = inside[:, voted].sum(1, keepdims=True)
    ordered = [(ranks == order).all(1) for order in itertools.permutations(voted, ranks.shape[1])]
    return np.column_stack([inside, first, hits, *ordered[:24]]).astype(np.float64)


GUMBELS = [
    # blocks, K, epsilon, what the others voted, the victim's blocks
    (8, 1, 1.0, [0] * 8, [3]),
    (30, 1, 2.0, [0] * 30, [3]),
    (12, 4, 1.0, [0] * 12, [0, 1, 2, 3]),
    (6, 2, 3.0, [0] * 6, [0, 1]),
    (6, 2, 3.0, [2, 2, 0, 0, 0, 0], [4, 5]),
    (6, 3, 0.5, [5, 4, 3, 2, 1, 0], [0, 1, 2]),
    (12, 6, 0.5, [9, 9, 8, 8, 7, 7, 3, 3, 2, 2, 1, 1], [6, 7, 8, 9, 10, 11]),
    (4, 2, 8.0, [0] * 4, [2, 3]),
]


def audit(
    blocks: int,
    k: int,
    spent: float,
    others: list[int],
    voted: list[int],
    draws: int,
    wrong: float = 1,
) -> float:
    with_ = [count + (i in voted) for i, count in enumerate(others)]
    vote = GumbelVote(k, spent * wrong)
    one, other = (statistics(gumbel_draws(vote, c, draws), voted, blocks) for c in (with_, others))
    return lower_bound(one, other)


SIZES = [20_000, pytest.param(100_000, marks=pytest.mark.nightly)]


@pytest.mark.parametrize("draws", SIZES)
@pytest.mark.parametrize("case", GUMBELS, ids=lambda case: f"{case[1]} of {case[0]}")
def test_no_audit_passes_the_epsilon_of_a_vote(case: Case, draws: int) -> None:
    found = audit(*case, draws)
    LOG.info("audited %s", round(found, 3))
    assert found <= case[2]


@pytest.mark.parametrize(
    "draws,share", [(20_000, 0.75), pytest.param(100_000, 0.85, marks=pytest.mark.nightly)]
)
def test_the_audit_of_a_vote_comes_close(draws: int, share: float) -> None:
    assert audit(*GUMBELS[1], draws) >= share * 2


@pytest.mark.parametrize("wrong,case", [(4.0, GUMBELS[2]), (2.0, GUMBELS[0]), (1.25, GUMBELS[1])])
def test_the_audit_flags_a_wrong_scale(wrong: float, case: Case) -> None:
    """Forgetting K, taking half the noise, a quarter too little."""
    found = audit(*case, 50_000, wrong)
    LOG.info("audited %s", round(found, 3))
    assert found > case[2]


@pytest.mark.parametrize("draws", SIZES)
@pytest.mark.parametrize("k", [1, 3])
def test_no_audit_passes_the_epsilon_of_a_gaussian_vote(k: int, draws: int) -> None:
    vote, others = GaussianVote(k, 1.0), [0] * 6
    with_ = [int(i < k) for i in range(6)]
    one, other = (
        statistics(gaussian_draws(vote, counts, draws), list(range(k)), 6)
        for counts in (with_, others)
    )
    claimed = epsilon([vote.event], 1e-5)
    found = gaussian_lower_bound(one, other, delta=1e-5)
    LOG.info("audited %s", round(found, 3))
    assert found <= claimed


def test_the_audit_draws_as_the_vote_does() -> None:
    counts = [3, 1, 0, 2, 0]
    for vote, by in ((GumbelVote(2, 2.0), gumbel_draws), (GaussianVote(2, 1.0), gaussian_draws)):
        shipped = Counter(map(tuple, chosen(vote, counts, 4000).tolist()))
        at_once = Counter(map(tuple, by(vote, counts, 40_000).tolist()))
        for ranks, count in at_once.items():
            expected = count / 10
            assert abs(shipped[ranks] - expected) < 5 * math.sqrt(expected + 1)


def test_one_draw_is_an_exponential_mechanism() -> None:
    counts, spent = [3, 1, 0, 2], 1.5
    found = np.bincount(gumbel_draws(GumbelVote(1, spent), counts, 200_000)[:, 0]) / 200_000
    wanted = np.exp(spent * np.array(counts))
    assert np.abs(found - wanted / wanted.sum()).max() < 0.005


def peaked(clients: int, dice: np.random.Generator) -> list[list[Block]]:
    """Each client names six blocks, the first six four times as likely as the others."""
    chance = np.array([4.0] * 6 + [1.0] * 6) / 30
    return [
        [BLOCKS[i] for i in dice.choice(12, 6, replace=False, p=chance)] for _ in range(clients)
    ]


@pytest.mark.parametrize("trials", [40, pytest.param(200, marks=pytest.mark.nightly)])
def test_three_hundred_clients_find_the_exact_top_six(trials: int) -> None:
    dice, hits = np.random.default_rng(0), 0
    for trial in range(trials):
        counts = counted(peaked(300, dice), BLOCKS, 6)
        exact = sorted(BLOCKS, key=lambda block: -counts[block])[:6]
        found = GumbelVote(6, 0.5).choose(counts, SECRET, f"vote {trial}")
        hits += len(set(found) & set(exact))
    LOG.info("overlap %s", hits / 6 / trials)
    assert hits / 6 / trials >= 0.95


def test_votes_are_charged_as_what_they_are() -> None:
    assert GumbelVote(6, 0.5).event == Vote(0.5)
    assert GaussianVote(6, 2.0, 0.1).event == Release(2.0, 0.1)


@pytest.mark.parametrize("vote", [GumbelVote(3, 1.0), GaussianVote(3, 1.0)])
def test_the_same_counts_have_the_same_winners(vote: GumbelVote | GaussianVote) -> None:
    counts = dict.fromkeys(BLOCKS, 5)
    first = vote.choose(counts, SECRET, "vote 1")
    assert first == vote.choose(counts, SECRET, "vote 1") and len(set(first)) == 3
    assert set(first) <= set(BLOCKS)
    others = {tuple(vote.choose(counts, SECRET, f"vote {i}")) for i in range(30)}
    assert len(others) > 20
    more = {**counts, BLOCKS[0]: 6}
    digests = {vote.digest(c, SECRET, a) for c in (counts, more) for a in ("vote 1", "vote 2")}
    assert len(digests) == 4


def test_only_true_votes_count_and_each_at_most_one() -> None:
    one, two, three, four = BLOCKS[:4]
    votes = [[one, two], [two], [], [one, one], [one, two, three], [Block("decoder", 0)], (four,)]
    assert counted(votes, BLOCKS[:4], 2) == {one: 1, two: 2, three: 0, four: 1}


def test_clients_vote_every_so_many_rounds() -> None:
    assert [r for r in range(1, 32) if asked(r, 10)] == [1, 11, 21, 31]
    assert all(asked(r, 1) for r in range(1, 5))
    with pytest.raises(PrivacyError, match="period"):
        asked(1, 0)


@pytest.mark.parametrize("k", [0, 13])
def test_more_winners_than_blocks_are_told(k: int) -> None:
    with pytest.raises(PrivacyError, match="of 12 blocks"):
        GaussianVote(k, 1.0).choose(dict.fromkeys(BLOCKS, 0), SECRET, "vote 1")
