# SPDX-License-Identifier: Apache-2.0
"""Draw what privacy costs, from the result files: docs/privacy.svg."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from table import EPSILONS, GRIDS, scores

from fedplan.reports.figures.charts import Series, line_chart
from fedplan.reports.figures.drawing import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OUT = Path(__file__).parents[1] / "docs" / "privacy.svg"
TITLES = {
    "private-digits": "300 hidden clients: digits, a ViT of 35 k params",
    "private-medquad": "hidden answers of nine institutes: gte-small, 33 M",
}
MEASURES = {"f1": "macro F1", "accuracy": "accuracy"}
WIDE, HIGH, TOP = 480, 300, 26


def drawn(study: str) -> Drawing:
    """The score of each method against epsilon: the mean over seeds, with a band."""
    ticks = list(reversed(EPSILONS))
    held = list[Series]()
    for method, found in scores(study).items():
        there = [(float(place), found[e]) for place, e in enumerate(ticks) if e in found]
        means = tuple((x, statistics.mean(each)) for x, each in there)
        held.append(Series(method, means, tuple((min(each), max(each)) for _, each in there)))
    names = [EPSILONS[e] for e in ticks]
    return line_chart(
        TITLES[study], held, x="epsilon (delta 1e-5)", y=MEASURES[GRIDS[study]], named=names,
        size=(WIDE, HIGH - TOP),
    )  # fmt: skip


def main() -> None:
    panels = [drawn(study) for study in GRIDS]

    def draw(figure: Figure) -> None:
        for place, (title, below) in enumerate(
            zip(*figure.subfigures(2, len(panels), height_ratios=[TOP, HIGH - TOP]), strict=True)
        ):
            title.text(8 / WIDE, 0.35, panels[place].title, size=13)
            panels[place].draw(below)

    both = "; ".join(panel.title for panel in panels)
    Drawing(both, WIDE * len(panels), HIGH, draw).save(OUT)


if __name__ == "__main__":
    main()
