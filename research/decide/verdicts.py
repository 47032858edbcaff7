# SPDX-License-Identifier: Apache-2.0
"""Verdicts: which criteria were met, missed or left undecided, from paired runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

import numpy as np
from scipy.special import nctdtrinc, stdtr, stdtrit

from fedplan.sweeps.comparisons import markdown_table
from fedplan.sweeps.statistics import Interval, format_p_value, holm, mean_interval, p_value
from research.decide.question import Asked, Question

MET, MISSED, UNDECIDED, OPEN = "met", "missed", "undecided", "not all run"
STUDIES = 4000
"""Studies that are drawn to reckon a power."""
SEEN = 0.8
"""How often a study should see the smallest visible gain."""

Scores = Mapping[str, Mapping[int, float]]
"""What each arm came to, by seed."""


@dataclass(frozen=True)
class Verdict:
    """What became of a comparison: the paired gain, the p values, and the word for it.

    A gain is above zero where the arm is better. `p` is of no gain (or of the margin, where that is
    below zero), and `short` of a gain that is just the least that matters; both are corrected.
    `visible` is the smallest gain that four of five such studies would tell from zero, with the
    spread that was seen and the level of Holm's strictest step; None with fewer than two seeds.
    """

    asked: Asked
    seeds: int
    gain: Interval | None
    p: float | None
    short: float | None
    word: str
    visible: float | None = None


def judged(question: Question, scores: Scores) -> list[Verdict]:
    """A verdict on each comparison asked, Holm-corrected for all of them, run or not."""
    gains = [gains_of(each, scores, question.seeds) for each in question.comparisons]
    whole = [len(each) == len(question.seeds) for each in gains]
    pairs = list(zip(question.comparisons, gains, whole, strict=True))
    none = _corrected([_against(g, min(0.0, c.least)) if w else None for c, g, w in pairs])
    short = _corrected([_against(g, c.least) if w else None for c, g, w in pairs])
    found = list[Verdict]()
    for (asked, gain, ended), p, below in zip(pairs, none, short, strict=True):
        kept = mean_interval(gain) if gain else None
        word = _word(asked, gain, p, below, question.alpha) if ended else OPEN
        seen = visible(gain, question.alpha / len(question.comparisons))
        found.append(Verdict(asked, len(gain), kept, p, below, word, seen))
    return found


def visible(gains: Sequence[float], level: float) -> float | None:
    """The smallest mean that four of five studies would tell from zero at a two-sided level."""
    if len(gains) < 2:
        return None
    freedom, error = len(gains) - 1, stdev(gains) / len(gains) ** 0.5
    # The spread is estimated too: a mean that is no zero has a noncentral t.
    return float(nctdtrinc(freedom, 1 - SEEN, stdtrit(freedom, 1 - level / 2)) * error)


def gains_of(asked: Asked, scores: Scores, seeds: Sequence[int]) -> list[float]:
    """How much better the arm is, seed by seed, of those seeds that both have."""
    own, other = scores.get(asked.arm, {}), scores.get(asked.minus, {})
    sign = 1.0 if asked.better == "higher" else -1.0
    return [sign * (own[s] - other[s]) for s in seeds if s in own and s in other]


def power(question: Question, asked: Asked) -> float:
    """How often so many seeds would meet the criterion if the effect looked for were true.

    The level is that of Holm's first and strictest step.
    """
    pilot, seeds = question.pilot, len(question.seeds)
    effect = pilot.effect if asked.effect is None else asked.effect
    drawn = np.random.default_rng(0).normal(effect, pilot.spread, (STUDIES, seeds))
    middle, error = drawn.mean(1), drawn.std(1, ddof=1) / seeds**0.5
    far = (middle - min(0.0, asked.least)) / error
    p = 2 * stdtr(seeds - 1, -abs(far))
    there = (p < question.alpha / len(question.comparisons)) & (far > 0)
    return float((there & (middle >= asked.least)).mean())


def markdown(question: Question, verdicts: Sequence[Verdict]) -> str:
    """The table of verdicts."""
    heads = [
        "criterion",
        "seeds",
        "gain",
        "95 % interval",
        "least",
        "p",
        "p of least",
        "visible",
        "verdict",
    ]
    return markdown_table(heads, [_cells(question, each) for each in verdicts])


def _cells(question: Question, found: Verdict) -> list[str]:
    gain = found.gain
    there = gain is not None and gain.low is not None and gain.high is not None
    return [
        f"{found.asked.name}: {found.asked.claim}",
        f"{found.seeds} of {len(question.seeds)}",
        f"{gain.mean:+.4f}" if gain is not None else "",
        f"{gain.low:+.4f} to {gain.high:+.4f}" if gain is not None and there else "",
        f"{found.asked.least:+g}",
        format_p_value(found.p),
        format_p_value(found.short),
        f"{found.visible:.4f}" if found.visible is not None else "",
        found.word,
    ]


def _word(
    asked: Asked, gains: Sequence[float], p: float | None, short: float | None, alpha: float
) -> str:
    """Met: a gain, and as large as matters. Missed: less than matters. Else nobody knows."""
    middle = mean(gains)
    if p is not None and p < alpha and middle > min(0.0, asked.least) and middle >= asked.least:
        return MET
    return MISSED if short is not None and short < alpha and middle < asked.least else UNDECIDED


def _against(gains: Sequence[float], level: float) -> float | None:
    """How likely such gains are at a level; arms that are the same in each seed leave no doubt."""
    if not any(gains):
        return 0.0 if level else 1.0
    return p_value([each - level for each in gains])


def _corrected(values: Sequence[float | None]) -> list[float | None]:
    """Corrected for all that was asked: what has not run counts, and is not known."""
    found = holm([1.0 if p is None else p for p in values])
    return [None if p is None else each for p, each in zip(values, found, strict=True)]
