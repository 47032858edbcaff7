# SPDX-License-Identifier: Apache-2.0
"""Run the kernel lab: `python -m research.kernel` writes all of research/results/kernel in some minutes.

`table`, `grid`, `batches` and `draw` name parts of it; figures are drawn from the files that are there.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from research.bench.facts import facts_of
from research.kernel import table
from research.kernel.figures import drawn
from research.kernel.grid import (
    MEASURED,
    SHARES,
    TUNED,
    Cell,
    cells,
    chosen,
    differing,
    joined,
    noisy,
)
from research.kernel.problem import Setting
from research.kernel.rounds import Pace
from research.kernel.rules import LEAST, Balance, Bend, Chance, Late, Never, Rule

ROOT = Path(__file__).parents[2]
OUT = ROOT / "research" / "results" / "kernel"
PLAYED = ROOT / "build" / "kernel"
"""Courses that were played, so that a lab that was stopped goes on; delete it to play them anew."""
PARTS = ("table", "grid", "batches", "draw")
DIGITS = 6
NUMBERS = re.compile(r"\[[^][{}]*\]")
"""A list of numbers, which stands in one line."""


def write(name: str, said: dict[str, Any]) -> None:
    """Write a result with where it comes from."""
    OUT.mkdir(parents=True, exist_ok=True)
    facts = {"command": "python -m research.kernel", **facts_of(ROOT)}
    text = json.dumps(short({**facts, **said}), indent=1)
    (OUT / name).write_text(NUMBERS.sub(lambda found: " ".join(found[0].split()), text) + "\n")


def short(said: Any) -> Any:
    """Numbers with the digits that mean something."""
    if isinstance(said, float):
        return float(f"{said:.{DIGITS}g}")
    if isinstance(said, dict):
        return {key: short(each) for key, each in said.items()}
    return [short(each) for each in said] if isinstance(said, list | tuple) else said


def write_table() -> None:
    rows = [table.row(*each, PLAYED) for each in table.ROWS]
    seeds, warm_ups = list(table.SEEDS), list(table.WARM_UPS)
    write("table.json", {"seeds": seeds, "warm-ups": warm_ups, "rows": rows})


def write_grid() -> None:
    tuned, measured = list(cells(TUNED, PLAYED)), list(cells(MEASURED, PLAYED))
    # Nothing of the curves was chosen, so they take all seeds; the rules take those left out.
    every = [joined(*both) for both in zip(tuned, measured, strict=True)]
    write("curves.json", {"seeds": [*TUNED, *MEASURED], "cells": [curve(cell) for cell in every]})
    write("rules.json", rules(tuned, measured))


def write_batches() -> None:
    """The same rules, with the same constants, where steps look at some of the rows."""
    found = list(noisy(MEASURED, PLAYED))
    told = json.loads((OUT / "rules.json").read_text())["rules"]
    every = with_shares({each["rule"]: each["share"] for each in told if "share" in each})
    said = {"seeds": list(MEASURED), "batch": Setting.rows // 4, "rows": Setting.rows}
    write("batches.json", {**said, "rules": [judged(rule, found) for rule in every]})


def curve(cell: Cell) -> dict[str, Any]:
    """What the figures show of a cell."""
    profiles = zip(*(one.profile for one in cell.courses), strict=True)
    relative = zip(*([e / one.errors[-1] for e in one.errors] for one in cell.courses), strict=True)
    at_best = [one.ends[cell.best] for one in cell.courses]
    return {
        "heterogeneity": cell.heterogeneity,
        "steps": cell.steps,
        "best": cell.best,
        "best by seed": [one.errors.index(min(one.errors)) for one in cell.courses],
        "gain": cell.gain,
        "split at best": {
            part: fmean(getattr(each, part) for each in at_best)
            for part in ("bias", "drift", "rest")
        },
        "errors": cell.errors,
        "median over that without a freeze": [median(each) for each in relative],
        "profile": [fmean(each) for each in profiles],
    }


def rules(tuned: Sequence[Cell], measured: Sequence[Cell]) -> dict[str, Any]:
    """The rules with their constants, and what each comes to in every cell."""
    tried = chosen(tuned)
    best = {kind: min(found, key=lambda share: found[share]) for kind, found in tried.items()}
    every = with_shares({kind.name: share for kind, share in best.items()})
    return {
        "seeds": list(MEASURED),
        "seeds of the constants": list(TUNED),
        "rounds": Pace.rounds,
        "rate": Pace.rate,
        "not before": LEAST,
        "tried": {kind.name: [[s, tried[kind][s]] for s in SHARES[kind]] for kind in SHARES},
        "rules": [judged(rule, measured) for rule in every],
    }


def with_shares(shares: Mapping[str, float]) -> list[Rule]:
    """All rules, with the constants that were chosen."""
    return [
        *(Bend(shares[Bend.name]), Balance(shares[Balance.name])),
        *(Chance(Setting.clients), Late(), Never()),
    ]


def judged(rule: Rule, grid: Sequence[Cell]) -> dict[str, Any]:
    """A rule on the grid: by cell, and over the cells whose clients differ."""
    excess = [cell.excess(rule) for cell in differing(grid)]
    by_seed = zip(*(cell.excess_by_seed(rule) for cell in differing(grid)), strict=True)
    agreed = [cell for cell in grid if not cell.heterogeneity]
    return {
        "rule": rule.name,
        "formula": rule.formula,
        **({"share": rule.share} if isinstance(rule, Bend | Balance) else {}),
        "mean excess": fmean(excess),
        "median excess": median(excess),
        "worst excess": max(excess),
        "mean excess by seed": [fmean(each) for each in by_seed],
        "cells within 10 %": sum(each <= 0.1 for each in excess),
        "cells": len(excess),
        "never where clients agree": all(
            done == Pace.rounds for cell in agreed for done in cell.warm_ups(rule)
        ),
        "by cell": [
            {
                "heterogeneity": cell.heterogeneity,
                "steps": cell.steps,
                "warm-ups": cell.warm_ups(rule),
                "error": cell.error(rule),
                "best": cell.best,
                "best error": cell.errors[cell.best],
                "excess": cell.excess(rule),
            }
            for cell in grid
        ],
    }


def draw() -> None:
    for name, drawing in drawn(OUT).items():
        (OUT / f"{name}.svg").write_text(drawing.svg(alone=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m research.kernel", description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="only these parts")
    asked = parser.parse_args().parts or PARTS
    steps = {"table": write_table, "grid": write_grid, "batches": write_batches, "draw": draw}
    for part in PARTS:
        if part in asked:
            steps[part]()


if __name__ == "__main__":
    main()
