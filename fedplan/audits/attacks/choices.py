# SPDX-License-Identifier: Apache-2.0
"""Choices: what an observer learns of a client from nothing but which blocks were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import sqrt
from statistics import fmean
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedplan import seeds
from fedplan.audits.attacks import victims
from fedplan.audits.attacks.inference import auc_error, told_apart
from fedplan.models.description import blocks_of
from fedplan.models.params import Block
from fedplan.privacy.accounting.accountant import calibrate
from fedplan.privacy.accounting.events import Release
from fedplan.privacy.mechanisms.vote import Vote, ballot, counted
from fedplan.training.probes import Look, attention

VOCABULARY, LENGTH, ROWS, BLOCKS = 200, 12, 8, 12
CHOSEN = (2, 4, 6)
MODELS = 4
"""Models that are drawn and averaged over: which blocks stand out is an accident of each."""
EPSILON, DELTA, COHORT = 0.5, 1e-5, 300
Ballots = Sequence[frozenset[Block]]
Scores = Mapping[Block, float]


@dataclass(frozen=True)
class Observed:
    """The AUC of telling two peoples apart by the choice of `k` blocks: 0.5 is not at all.

    `raw` is by one client's own choice, `random` by one made by chance, `vote` by the winners of a
    noisy vote in which one client is of either people and the others are of both; `cohort` by those
    of a vote of one people alone, which no vote hides. `agreed` is the share of the winners that
    would have won without noise. The errors are those of an AUC of 0.5.
    """

    k: int
    raw: float
    random: float
    vote: float
    cohort: float
    agreed: float
    raw_error: float
    error: float


def seen(clients: int, trials: int, secret: bytes) -> list[Observed]:
    """Two peoples of so many clients each, seen through each way to choose, mean over models."""
    noise = calibrate(EPSILON, DELTA, lambda noise: [Release(noise)])
    found = {k: list[Observed]() for k in CHOSEN}
    for number in range(MODELS):
        scores = [_scores(number, people, clients) for people in (0, 1)]
        for k, each in found.items():
            raw = [[ballot(score, k) for score in people] for people in scores]
            poll = _Poll(tuple(scores[0][0]), Vote(k, noise), secret, number)
            each.append(_seen(poll, raw, trials))
    return [_mean(each) for each in found.values()]


def _scores(number: int, people: int, clients: int) -> list[Scores]:
    """What the probe of each client of a people says."""
    model = victims.reader(
        vocabulary=VOCABULARY, width=32, blocks=BLOCKS, length=LENGTH, spread=0.3, number=number
    )
    spoken = (
        victims.spoken(people, i, ROWS, vocabulary=VOCABULARY, length=LENGTH)
        for i in range(clients)
    )
    blocks, probe = tuple(blocks_of(model)), attention()
    return [probe(Look(model, rows, blocks, 0, victims.loss)) for rows in spoken]


def _seen(poll: _Poll, raw: Sequence[Ballots], trials: int) -> Observed:
    both, k = [*raw[0], *raw[1]], poll.vote.k
    mixed = [poll.held(f"{i} in both", raw[i], both, trials) for i in (0, 1)]
    alone = [poll.held(f"{i} alone", raw[i], raw[i], max(trials // 10, 2)) for i in (0, 1)]
    same = [len(held.winners & ballot(held.counts, k)) for held in mixed[0]]
    return Observed(
        k,
        raw=poll.told_apart(raw),
        random=poll.told_apart([poll.by_chance(i, trials) for i in (0, 1)]),
        vote=poll.told_apart([[held.winners for held in people] for people in mixed]),
        cohort=poll.told_apart([[held.winners for held in people] for people in alone]),
        agreed=sum(same) / k / trials,
        raw_error=auc_error(len(raw[0]), len(raw[1])) / sqrt(MODELS),
        error=auc_error(trials, trials) / sqrt(MODELS),
    )


def _mean(found: Sequence[Observed]) -> Observed:
    rows = [astuple(each)[1:] for each in found]
    return Observed(found[0].k, *(fmean(column) for column in zip(*rows, strict=True)))


class _Held(NamedTuple):
    """A vote that was held: its counts, which nobody sees, and its winners."""

    counts: dict[Block, int]
    winners: frozenset[Block]


@dataclass(frozen=True)
class _Poll:
    """Votes over the same blocks, by cohorts that are drawn from the ballots of few clients."""

    blocks: tuple[Block, ...]
    vote: Vote
    secret: bytes
    number: int

    def held(self, about: str, people: Ballots, others: Ballots, trials: int) -> list[_Held]:
        """Votes of cohorts of one client of a people among others."""
        dice, found = seeds.generator("cohorts", about, self.vote.k, self.number), list[_Held]()
        for simulation in range(trials):
            drawn = torch.randint(2**31, (COHORT,), generator=dice)
            one, *rest = cast("list[int]", drawn.tolist())
            cohort = [people[one % len(people)], *(others[i % len(others)] for i in rest)]
            counts = counted(cohort, self.blocks, self.vote.k)
            noisy = self.vote.release(counts, self.secret, f"{self.number}, {about}, {simulation}")
            found.append(_Held(counts, ballot(noisy, self.vote.k)))
        return found

    def by_chance(self, people: int, trials: int) -> Ballots:
        """What clients choose that look at nothing."""
        dice = seeds.generator("chance", people, self.vote.k, self.number)
        drawn = torch.rand(trials, len(self.blocks), generator=dice)
        scores = cast("list[list[float]]", drawn.tolist())
        return [ballot(dict(zip(self.blocks, each, strict=True)), self.vote.k) for each in scores]

    def told_apart(self, peoples: Sequence[Ballots]) -> float:
        """The AUC of an observer of these choices."""
        one, other = (self._hot(ballots) for ballots in peoples)
        return told_apart(one, other)

    def _hot(self, ballots: Ballots) -> Tensor:
        return torch.tensor([[block in each for block in self.blocks] for each in ballots])
