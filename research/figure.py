# SPDX-License-Identifier: Apache-2.0
"""Draw what privacy costs, from the result files: docs/privacy.svg."""

from __future__ import annotations

import statistics
from pathlib import Path

from table import EPSILONS, GRIDS, scores

from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series

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
    panels = list[str]()
    for place, study in enumerate(GRIDS):
        made = drawn(study)
        inner = made.svg(alone=True).replace(
            "<svg ", f'<svg x="{place * WIDE}" y="{TOP}" width="{WIDE}" height="{HIGH - TOP}" ', 1
        )
        title = (
            f'<text x="{place * WIDE + 8}" y="16" class="f-ink" font-size="13">{made.title}</text>'
        )
        panels += [title, inner]
    size = f"0 0 {WIDE * len(GRIDS)} {HIGH}"
    paper = '<rect width="100%" height="100%" class="f-paper"/>'
    OUT.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">{paper}'
        f"{''.join(panels)}</svg>\n"
    )


if __name__ == "__main__":
    main()
