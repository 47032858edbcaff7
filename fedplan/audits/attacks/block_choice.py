# SPDX-License-Identifier: Apache-2.0
"""Attack on block selection: infer a client's population from the blocks that were chosen."""

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
from fedplan.audits.attacks.inference import auc_error, distinguishing_auc
from fedplan.models.description import block_modules
from fedplan.models.params import Block
from fedplan.privacy.accounting.accountant import calibrate
from fedplan.privacy.accounting.events import Release
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
Scores = Mapping[Block, float]


@dataclass(frozen=True)
class ChoiceLeak:
    """AUC of distinguishing two populations by the choice of `k` blocks; 0.5 is a guess.

    raw: by one client's own choice. random: by a random choice.
    vote: by the winners of a noisy vote with one client of either population among both.
    cohort: by the winners of a noisy vote of one population alone, which a vote does not hide.
    agreed: fraction of the winners of `vote` that would have won without noise.
    raw_error, error: standard errors of an AUC of 0.5, for `raw` and for the votes.
    """

    # The field names are keys of the JSON report.
    k: int
    raw: float
    random: float
    vote: float
    cohort: float
    agreed: float
    raw_error: float
    error: float


def attack_block_choices(clients: int, trials: int, secret: bytes) -> list[ChoiceLeak]:
    """Attack the choice of blocks of two populations of `clients` clients each, for each size.

    trials: votes simulated per population; secret: of the noise. Results are means over models.
    """
    noise = calibrate(EPSILON, DELTA, lambda noise: [Release(noise)])
    leaks = {k: list[ChoiceLeak]() for k in CHOICE_SIZES}
    for number in range(MODELS):
        scores = [_probe_scores(number, population, clients) for population in (0, 1)]
        for k, model_leaks in leaks.items():
            ballots = [[make_ballot(score, k) for score in population] for population in scores]
            votes = _Votes(tuple(scores[0][0]), NoisyVote(k, noise), secret, number)
            model_leaks.append(_attack_one(votes, ballots, trials))
    return [_mean(model_leaks) for model_leaks in leaks.values()]


def _probe_scores(number: int, population: int, clients: int) -> list[Scores]:
    """Block scores of each client of a population, by the attention probe on model `number`."""
    model = victims.text_classifier(
        vocabulary=VOCABULARY, width=32, blocks=BLOCKS, length=LENGTH, spread=0.3, number=number
    )
    texts = (
        victims.population_texts(population, i, EXAMPLES, vocabulary=VOCABULARY, length=LENGTH)
        for i in range(clients)
    )
    blocks, probe = tuple(block_modules(model)), attention_probe()
    loss = victims.classification_loss
    return [probe(ProbeInput(model, examples, blocks, 0, loss)) for examples in texts]


def _attack_one(votes: _Votes, ballots: Sequence[Ballots], trials: int) -> ChoiceLeak:
    """Attack the choices on one model; `ballots` are those of both populations."""
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


def _mean(leaks: Sequence[ChoiceLeak]) -> ChoiceLeak:
    rows = [astuple(leak)[1:] for leak in leaks]
    return ChoiceLeak(leaks[0].k, *(fmean(column) for column in zip(*rows, strict=True)))


class _VoteResult(NamedTuple):
    """A simulated vote: its counts without noise, and its winners with noise."""

    counts: dict[Block, int]
    winners: frozenset[Block]


@dataclass(frozen=True)
class _Votes:
    """Simulated votes on the blocks of model `number`, by cohorts sampled from few ballots."""

    blocks: tuple[Block, ...]
    vote: NoisyVote
    secret: bytes
    number: int

    def simulate(
        self, name: str, victims: Ballots, others: Ballots, trials: int
    ) -> list[_VoteResult]:
        """Votes of cohorts of one random victim's ballot among random ballots of others."""
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
        """Ballots of clients that choose at random."""
        generator = seeds.generator("chance", population, self.vote.k, self.number)
        numbers = torch.rand(trials, len(self.blocks), generator=generator)
        return [
            make_ballot(dict(zip(self.blocks, scores, strict=True)), self.vote.k)
            for scores in cast("list[list[float]]", numbers.tolist())
        ]

    def observer_auc(self, populations: Sequence[Ballots]) -> float:
        """AUC of an observer who distinguishes two populations by their ballots."""
        one, other = (self._one_hot(ballots) for ballots in populations)
        return distinguishing_auc(one, other)

    def _one_hot(self, ballots: Ballots) -> Tensor:
        return torch.tensor([[block in ballot for block in self.blocks] for ballot in ballots])
