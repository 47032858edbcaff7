# SPDX-License-Identifier: Apache-2.0
"""The first table: final errors by warm-up, over the three seeds that were looked at first."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev

from research.kernel.courses import kept
from research.kernel.problem import Setting
from research.kernel.rounds import Pace

WARM_UPS = (0, 5, 10, 20, 40, 80, 120, 150)
SEEDS = (0, 1, 2)
ROWS = (
    *((0.0, 5, True), (0.0, 20, True), (0.25, 5, True), (0.25, 20, True)),
    *((0.5, 1, True), (0.5, 5, True), (0.5, 20, True)),
    *((0.5, 5, False), (1.0, 5, False), (0.5, 20, False), (1.0, 20, False)),
)
"""Heterogeneity, local steps, and whether kernels differ by client; values and tokens always do."""


def row(heterogeneity: float, steps: int, kernels: bool, folder: Path) -> dict[str, object]:
    """One row: the mean and the deviation over seeds, for each warm-up."""
    setting = Setting(heterogeneity, kernels=kernels)
    made = [kept(setting, Pace(steps), seed, folder).errors for seed in SEEDS]
    by_warm_up = [[errors[done] for errors in made] for done in WARM_UPS]
    return {
        "heterogeneity": heterogeneity,
        "steps": steps,
        "kernels differ": kernels,
        "mean": [fmean(each) for each in by_warm_up],
        "deviation": [stdev(each) for each in by_warm_up],
    }
