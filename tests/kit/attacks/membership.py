# SPDX-License-Identifier: Apache-2.0
"""Membership inference from updates: which of the examples that a server knows a client has.

The server knows model, plan and training arguments, so it can train clients of its own: one for
each candidate alone, which gives the direction of the candidate, and shadow clients with random
candidates, which give the spread of updates (a likelihood ratio as in Carlini et al., LiRA, 2022).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from attacks.inference import auc
from attacks.shadows import Seen

FALSE_POSITIVES = 0.01
"""Rate of false positives at which true positives are counted."""
_RESAMPLES = 60
_RIDGE = 1e-3
"""Added to the covariance of updates, relative to its mean eigenvalue, if there is no noise."""


def matched_scores(
    updates: Tensor, directions: Tensor, shadows: Tensor, variance: float = 0.0
) -> Tensor:
    """Score each candidate in each update: high if the update has the candidate's direction.

    updates, directions, shadows: a row each for attacked clients, for clients that have one
    candidate alone, and for shadow clients. variance: that of known Gaussian noise on each number
    of `updates`; directions and shadows are without noise. Returns float64 of shape [updates,
    candidates]: the filter with the best signal-to-noise ratio against the spread of shadows.
    """
    mean = shadows.double().mean(0)
    spread = (shadows.double() - mean) / len(shadows) ** 0.5
    # Each direction is divided by (ridge + covariance), in the span of few rows (Woodbury).
    gram = spread @ spread.T
    ridge = variance + _RIDGE * float(gram.diagonal().sum()) / len(shadows) + 1e-300
    centred, lines = updates.double() - mean, directions.double()
    inner = torch.linalg.solve(gram + ridge * torch.eye(len(gram)).double(), spread @ lines.T)
    filtered = lines - inner.T @ spread
    norms = (filtered * lines).sum(1).clamp(min=1e-300).sqrt()
    return centred @ (filtered / norms[:, None]).T


def likelihood_ratios(scores: Tensor, shadow_scores: Tensor, members: Tensor) -> Tensor:
    """Log likelihood ratio that each candidate is a member, from scores of shadow clients.

    scores: [clients, candidates]; shadow_scores, members (boolean): [shadows, candidates]. The
    scores of a candidate are Gaussian with two means, of shadows with and without it; candidates
    share the two variances, as shadows are few.
    """
    inside, outside = members.double(), (~members).double()
    means, variances = list[Tensor](), list[Tensor]()
    for weight in (inside, outside):
        mean = (shadow_scores * weight).sum(0) / weight.sum(0).clamp(min=1)
        residuals = (shadow_scores - mean).square() * weight
        means.append(mean)
        variances.append((residuals.sum() / weight.sum()).clamp(min=1e-300))
    log_densities = [
        -(scores - mean).square() / (2 * variance) - variance.log() / 2
        for mean, variance in zip(means, variances, strict=True)
    ]
    return log_densities[0] - log_densities[1]


@dataclass(frozen=True)
class Scored:
    """Scores of one fold: of the matched filter, and their likelihood ratios, [rows, candidates].

    shadow_auc: the AUC on shadows, by which a server chooses among several attacks.
    """

    filtered: Tensor
    ratios: Tensor
    members: Tensor
    shadow_auc: float


def score_members(
    attacked: Seen, shadows: Seen, directions: Sequence[Tensor], variance: float = 0.0
) -> Scored:
    """Score the candidates of attacked clients by the direction that does best on shadows.

    directions: ways to see candidates alone, each [candidates, numbers]; variance: of known noise
    on `attacked`, which shadows do not have: it is added to theirs here.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(shadows.updates.shape, generator=generator).double() * variance**0.5
    options = list[Scored]()
    for lines in directions:
        scores = matched_scores(attacked.updates, lines, shadows.updates, variance)
        # The shadows are filtered by the other half of themselves, as the attacked are by shadows.
        shadow_scores = torch.empty(len(shadows), len(lines)).double()
        for i, half in enumerate(shadows.halves()):
            rows = slice(1 - i, None, 2)
            noisy = shadows.updates[rows] + noise[rows]
            shadow_scores[rows] = matched_scores(noisy, lines, half.updates, variance)
        ratios = likelihood_ratios(scores, shadow_scores, shadows.members)
        area = auc(shadow_scores[shadows.members], shadow_scores[~shadows.members])
        options.append(Scored(scores, ratios, attacked.members, area))
    return max(options, key=lambda option: option.shadow_auc)


@dataclass(frozen=True)
class MembershipLeak:
    """Result of a membership attack, each rate as (estimate, lower, upper) of 95 % confidence.

    auc: probability that a member scores above a non-member; 0.5 is a guess. true_positives: at
    FALSE_POSITIVES false ones. smallest_auc, smallest_true_positives: the power of the study: the
    smallest leak that four of five such studies would tell from a guess. chance_auc: the control,
    the same scores with the members of other clients. clients: attacked updates; trials: members
    and non-members among their candidates.
    """

    auc: tuple[float, float, float]
    true_positives: tuple[float, float, float]
    smallest_auc: float
    smallest_true_positives: float
    chance_auc: float
    clients: int
    trials: tuple[int, int]


def measure_membership(scores: Tensor, members: Tensor) -> MembershipLeak:
    """Measure how well `scores` [clients, candidates] tell the true entries of `members`.

    Standard errors are by a bootstrap of clients, as the candidates of one client are not
    independent.
    """
    # The control: the members of the next client. Scores are then of unrelated examples.
    wrong = members.roll(1, 0)
    (area, hits), (area_error, hits_error) = (
        membership_rates(scores, members),
        _errors(scores, members),
    )
    chance_area_error, chance_hits_error = _errors(scores, wrong)
    return MembershipLeak(
        _interval(area, area_error),
        _interval(hits, hits_error),
        # 1.96 standard errors for significance and 0.84 for a power of 80 %.
        0.5 + 2.8 * chance_area_error,
        FALSE_POSITIVES + 2.8 * chance_hits_error,
        fmean(
            membership_rates(scores, members.roll(i, 0))[0] for i in range(1, min(len(scores), 12))
        ),
        len(scores),
        (int(members.sum()), int((~members).sum())),
    )


def membership_rates(scores: Tensor, members: Tensor) -> tuple[float, float]:
    """AUC, and the rate of true positives at FALSE_POSITIVES."""
    inside, outside = scores[members], scores[~members]
    threshold = outside.quantile(1 - FALSE_POSITIVES)
    return auc(inside, outside), float((inside > threshold).double().mean())


def _errors(scores: Tensor, members: Tensor) -> tuple[float, float]:
    """Standard errors of `membership_rates`."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(scores), (_RESAMPLES, len(scores)), generator=generator)
    area, hits = (
        torch.tensor([membership_rates(scores[i], members[i]) for i in drawn]).std(0).tolist()
    )
    return area, hits


def _interval(rate: float, error: float) -> tuple[float, float, float]:
    return rate, max(0.0, rate - 1.96 * error), min(1.0, rate + 1.96 * error)
