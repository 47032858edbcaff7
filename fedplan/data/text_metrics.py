# SPDX-License-Identifier: Apache-2.0
"""Metrics of generated texts beside the true ones: exact match, ROUGE-L and chrF."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import fsum

from fedplan.errors import import_extra


def exact_match(truth: Sequence[str], texts: Sequence[str]) -> float:
    """Return the fraction of texts that equal the true ones."""
    return sum(true == text for true, text in zip(truth, texts, strict=True)) / len(truth)


def rouge_l(truth: Sequence[str], texts: Sequence[str]) -> float:
    """Return the mean ROUGE-L (F1, without stemming) of texts, in [0, 1], by rouge-score."""
    return fsum(map(_rouge_l, truth, texts)) / len(truth)


@lru_cache(maxsize=10_000)  # bootstrap samples repeat each text
def _rouge_l(truth: str, text: str) -> float:
    scorer = import_extra("rouge_score.rouge_scorer", "the metric rouge_l").RougeScorer(["rougeL"])
    return float(scorer.score(truth, text)["rougeL"].fmeasure)


def chrf(truth: Sequence[str], texts: Sequence[str]) -> float:
    """Return the chrF2 of all texts together, in [0, 100], by sacrebleu."""
    library = import_extra("sacrebleu", "the metric chrf")
    return float(library.corpus_chrf(list(texts), [list(truth)]).score)
