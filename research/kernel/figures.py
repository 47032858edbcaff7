# SPDX-License-Identifier: Apache-2.0
"""Three figures of the kernel lab, drawn from its result files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

from fedplan.reports.figures.charts import Series, line_chart
from fedplan.reports.figures.drawing import Drawing

STEPS = {1: "one step", 2: "2 steps", 5: "5 steps", 10: "10 steps", 20: "20 steps"}
TALLEST = 2.5
"""Of the walls on the left of the second figure only what is below is drawn."""


def drawn(folder: Path) -> dict[str, Drawing]:
    """All three, by the names of their files."""
    found = json.loads((folder / "curves.json").read_text())["cells"]
    return {"descent": _descent(found), "warm-up": _warm_up(found), "gain": _gain(found)}


def _descent(found: list[dict[str, Any]], steps: int = 10) -> Drawing:
    lines = [
        Series(f"h = {each['heterogeneity']:g}", tuple(enumerate(each["profile"])))
        for each in found
        if each["steps"] == steps
    ]
    y = f"profile above its lowest, {steps} local steps"
    return line_chart("Profile descent under heterogeneity", lines, y=y, size=(720, 330))


def _warm_up(found: list[dict[str, Any]], heterogeneity: float = 0.5) -> Drawing:
    lines, over = list[Series](), list[float]()
    for each in found:
        if each["heterogeneity"] == heterogeneity:
            over = each["median over that without a freeze"]
            lines.append(Series(STEPS[each["steps"]], tuple(_below(over))))
    # It also lets the axis begin at 0, where no line is below the walls.
    lines.append(Series("no freeze", ((0.0, 1.0), (float(len(over) - 1), 1.0))))
    y = f"final error over that without a freeze, median of seeds, heterogeneity {heterogeneity:g}"
    x = "rounds of warm-up"
    return line_chart("Final error against warm-up", lines, x=x, y=y, size=(720, 330))


def _below(over: list[float]) -> Iterator[tuple[float, float]]:
    """The points of a line below its wall, and where it comes out of it."""
    yield 0.0, over[0] if over[0] <= TALLEST else nan
    for place, (last, here) in enumerate(pairwise(over), start=1):
        if here <= TALLEST < last:
            yield place - (TALLEST - here) / (last - here), TALLEST
        yield float(place), here if here <= TALLEST else nan


def _gain(found: list[dict[str, Any]]) -> Drawing:
    lines = [
        Series(
            name,
            tuple((c["heterogeneity"], 100 * c["gain"]) for c in found if c["steps"] == steps),
        )
        for steps, name in STEPS.items()
    ]
    y = "% of the error without a freeze that the best warm-up saves"
    x = "heterogeneity"
    return line_chart("Gain against heterogeneity", lines, x=x, y=y, whole=False, size=(720, 330))
