# SPDX-License-Identifier: Apache-2.0
"""Draw what privacy costs, from the result files: docs/privacy.png."""

from __future__ import annotations

import statistics
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt
from table import EPSILONS, GRIDS, scores

OUT = Path(__file__).parents[1] / "docs" / "privacy.png"
TITLES = {
    "private-digits": "300 hidden clients: digits, a ViT of 35 k params",
    "private-medquad": "hidden answers of nine institutes: gte-small, 33 M",
}
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee")


def main() -> None:
    ticks = list(reversed(EPSILONS))
    figure, axes = plt.subplots(1, len(GRIDS), figsize=(10, 3.6), layout="constrained")
    for axis, study in zip(axes, GRIDS, strict=True):
        for (method, row), colour in zip(scores(study).items(), COLOURS, strict=False):
            points = [(ticks.index(e), row[e]) for e in ticks if e in row]
            places = [place for place, _ in points]
            axis.plot(places, [statistics.mean(held) for _, held in points], "-o", color=colour,
                      label=method, markersize=4)  # fmt: skip
            for place, held in points:
                axis.plot([place] * len(held), held, "_", color=colour, alpha=0.6)
        axis.set_xticks(range(len(ticks)), [EPSILONS[e] for e in ticks])
        axis.set_xlabel("epsilon (delta 1e-5)")
        axis.set_ylabel({"f1": "macro F1", "accuracy": "accuracy"}[GRIDS[study]])
        axis.set_title(TITLES[study], fontsize=10)
        axis.set_ylim(0)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    figure.savefig(OUT, dpi=150)


if __name__ == "__main__":
    main()
