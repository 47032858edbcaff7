# SPDX-License-Identifier: Apache-2.0
"""Attack on block selection: infer a client's population from the blocks that were chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import partial
from math import sqrt
from statistics import fmean
from typing import NamedTuple, cast

import torch

from attacks import victims
from attacks.inference import auc_error, distinguishing_auc
from fedplan import seeds
from fedplan.models.description import block_modules
from fedplan.models.params import Block
from fedplan.privacy.accounting.accountant import Release, calibrate
from fedplan.privacy.mechanisms.vote import NoisyVote, count_ballots, make_ballot
from fedplan.training.probes import ProbeInput, attention_probe

VOCABULARY, LENGTH, EXAMPLES, BLOCKS = 200, 12, 8, 12
"""Sizes of the attacked model and of a client's data."""
CHOICE_SIZES = (2, 4, 6)
"""Numbers of blocks that are chosen."""
MODELS = 4
"""Random models that results are averaged over: the blocks that stand out differ by model."""
EPSILON, DELTA, COHORT = 0.5, 1e-5, 300
"""Privacy of one vote, and its number of voters."""
Ballots = Sequence[frozenset[Block]]


@dataclass(frozen=True)
class ChoiceLeak:
    """AUC of distinguishing two populations by the choice of `k` blocks; 0.5 is a guess.

    raw: by one client's own choice. random: by a random choice.
    vote: by the winners of a noisy vote in which one client of the population to be guessed votes
    together with clients of both populations.
    cohort: by the winners of a noisy vote in which all clients are of the population to be guessed;
    a vote does not hide this.
    agreed: fraction of the winners of `vote` that would have won without noise.
    raw_error: standard error of `raw` if the AUC is 0.5; error: the same of `random` and `vote`.
    """

    k: int
    raw: float
    random: float
    vote: float
    cohort: float
    agreed: float
    raw_error: float
    error: float


def attack_block_choices(clients: int, trials: int, secret: bytes) -> list[ChoiceLeak]:
    """Attack the choice of blocks of two populations of `clients` clients each.

    trials: votes simulated per population; secret: 32 bytes, the key of the votes' noise.
    Returns one result per size in CHOICE_SIZES, each the mean over MODELS random models. Clients
    score the blocks of a model by the attention probe on their own texts.
    """
    noise = calibrate(EPSILON, DELTA, lambda noise: [Release(noise)])
    leaks = {k: list[ChoiceLeak]() for k in CHOICE_SIZES}
    probe, loss = attention_probe(), victims.classification_loss
    population_texts = partial(
        victims.population_texts, examples=EXAMPLES, vocabulary=VOCABULARY, length=LENGTH
    )
    texts = [[population_texts(pop, i) for i in range(clients)] for pop in (0, 1)]
    for number in range(MODELS):
        model = victims.text_classifier(
            vocabulary=VOCABULARY, width=32, blocks=BLOCKS, length=LENGTH, spread=0.3, number=number
        )
        blocks = tuple(block_modules(model))
        scores = [[probe(ProbeInput(model, t, blocks, 0, loss)) for t in pop] for pop in texts]
        for k, model_leaks in leaks.items():
            ballots = [[make_ballot(score, k) for score in population] for population in scores]
            votes = _Votes(tuple(scores[0][0]), NoisyVote(k, noise), secret, number)
            model_leaks.append(_attack_choices(votes, ballots, trials))
    columns = {k: zip(*(astuple(leak)[1:] for leak in leaks[k]), strict=True) for k in leaks}
    return [ChoiceLeak(k, *map(fmean, values)) for k, values in columns.items()]


def _attack_choices(votes: _Votes, ballots: Sequence[Ballots], trials: int) -> ChoiceLeak:
    """Attack the choices of blocks of one model.

    ballots: the ballots of each of the two populations; trials: votes simulated per population, a
    tenth of them for `ChoiceLeak.cohort`.
    """
    both, k = [*ballots[0], *ballots[1]], votes.vote.k
    mixed = [votes.simulate(f"{i} in both", ballots[i], both, trials) for i in (0, 1)]
    few = max(trials // 10, 2)
    alone = [votes.simulate(f"{i} alone", ballots[i], ballots[i], few) for i in (0, 1)]
    same = [len(result.winners & make_ballot(result.counts, k)) for result in mixed[0]]
    return ChoiceLeak(
        k,
        raw=votes.observer_auc(ballots),
        random=votes.observer_auc([votes.random_ballots(i, trials) for i in (0, 1)]),
        vote=votes.observer_auc([[result.winners for result in results] for results in mixed]),
        cohort=votes.observer_auc([[result.winners for result in results] for results in alone]),
        agreed=sum(same) / k / trials,
        raw_error=auc_error(len(ballots[0]), len(ballots[1])) / sqrt(MODELS),
        error=auc_error(trials, trials) / sqrt(MODELS),
    )


class _VoteResult(NamedTuple):
    """A simulated vote: its counts without noise, and its winners with noise."""

    counts: dict[Block, int]
    winners: frozenset[Block]


@dataclass(frozen=True)
class _Votes:
    """Simulated votes of COHORT voters on the `blocks` of model `number`.

    vote: size of a ballot, and noise; secret: 32 bytes, the key of the noise. All random
    numbers follow from the fields and the arguments of a call: equal calls give equal results.
    """

    blocks: tuple[Block, ...]
    vote: NoisyVote
    secret: bytes
    number: int

    def simulate(
        self, name: str, victims: Ballots, others: Ballots, trials: int
    ) -> list[_VoteResult]:
        """Simulate `trials` votes: one random ballot of `victims` among COHORT - 1 of `others`.

        name: seeds the cohorts and the noise. Ballots are drawn with replacement.
        """
        generator = seeds.generator("cohorts", name, self.vote.k, self.number)
        results = list[_VoteResult]()
        for trial in range(trials):
            numbers = torch.randint(2**31, (COHORT,), generator=generator)
            first, *rest = cast("list[int]", numbers.tolist())
            cohort = [victims[first % len(victims)], *(others[i % len(others)] for i in rest)]
            counts = count_ballots(cohort, self.blocks, self.vote.k)
            noisy = self.vote.release(counts, self.secret, f"{self.number}, {name}, {trial}")
            results.append(_VoteResult(counts, make_ballot(noisy, self.vote.k)))
        return results

    def random_ballots(self, population: int, trials: int) -> Ballots:
        """`trials` ballots of uniformly random blocks; `population` is part of the seed."""
        generator = seeds.generator("chance", population, self.vote.k, self.number)
        numbers = torch.rand(trials, len(self.blocks), generator=generator)
        return [
            make_ballot(dict(zip(self.blocks, scores, strict=True)), self.vote.k)
            for scores in cast("list[list[float]]", numbers.tolist())
        ]

    def observer_auc(self, populations: Sequence[Ballots]) -> float:
        """AUC of an observer who distinguishes two populations by their ballots."""
        one, other = (
            torch.tensor([[block in ballot for block in self.blocks] for ballot in ballots])
            for ballots in populations
        )
        return distinguishing_auc(one, other)
