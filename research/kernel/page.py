# SPDX-License-Identifier: Apache-2.0
"""The tables of research/pages/kernel.md, from the result files: `python -m research.kernel.page` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

OUT = Path(__file__).parents[1] / "results" / "kernel"
PAGE = Path(__file__).parents[1] / "pages" / "kernel.md"


def tables(folder: Path = OUT) -> dict[str, str]:
    """Each table by its heading."""
    first, curves, rules, batches = (
        json.loads((folder / f"{name}.json").read_text())
        for name in ("table", "curves", "rules", "batches")
    )
    return {
        "Final errors": table(_first(first)),
        "The best warm-up": table(_best(curves["cells"])),
        "The error at the best warm-up": table(_split(curves["cells"])),
        "Rules": table(_rules(rules)),
        "Where the first rule freezes": table(_cells(rules["rules"][0]["by cell"])),
        "With small batches": table(_batches(batches)),
    }


def table(rows: Iterable[Sequence[object]]) -> str:
    """Rows as Markdown; the first is the head."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def _first(said: dict[str, Any]) -> Iterator[list[object]]:
    yield ["heterogeneity", "local steps", *said["warm-ups"][:-1], "never"]
    for row in said["rows"]:
        what = "" if row["kernels differ"] else ", values and tokens alone"
        least = min(row["mean"])
        told = [f"**{_short(m)}**" if m == least else _short(m) for m in row["mean"]]
        yield [f"{row['heterogeneity']:g}{what}", row["steps"], *told]


def _by_level(cells: list[dict[str, Any]]) -> dict[float, list[dict[str, Any]]]:
    found = dict[float, list[dict[str, Any]]]()
    for cell in cells:
        found.setdefault(cell["heterogeneity"], []).append(cell)
    return found


def _best(cells: list[dict[str, Any]], rounds: int = 150) -> Iterator[list[object]]:
    levels = _by_level(cells)
    steps = [cell["steps"] for cell in next(iter(levels.values()))]
    yield ["heterogeneity", *(f"{each} step{'s' * (each > 1)}" for each in steps)]
    for level, row in levels.items():
        yield [f"{level:g}", *(_earliest(cell, rounds) for cell in row)]


def _earliest(cell: dict[str, Any], rounds: int) -> str:
    """The median over seeds of the best warm-up; that for their mean error, and what it saves."""
    middle, best = median(cell["best by seed"]), cell["errors"].index(min(cell["errors"]))
    if middle == rounds == best:
        return "never"
    one, other = ("never" if each == rounds else f"{each:g}" for each in (middle, best))
    return f"{one} / {other}, {100 * cell['gain']:.0f} %"


def _split(cells: list[dict[str, Any]]) -> Iterator[list[object]]:
    yield [
        "heterogeneity",
        "local steps",
        "freezing bias",
        "value drift",
        "rest",
        "without a freeze",
    ]
    for cell in cells:
        if cell["heterogeneity"] in (0.25, 0.5, 1.0) and cell["steps"] in (5, 20):
            parts = (_short(cell["split at best"][part]) for part in ("bias", "drift", "rest"))
            never = _short(cell["errors"][-1])
            yield [f"{cell['heterogeneity']:g}", cell["steps"], *parts, never]


def _rules(said: dict[str, Any]) -> Iterator[list[object]]:
    head = ["rule", "freezes when", "mean excess", "median", "worst", "cells within 10 %"]
    yield [*head, "never where clients agree", "mean excess by seed"]
    for rule in said["rules"]:
        shares = (f"{100 * rule[f'{each} excess']:.1f} %" for each in ("mean", "median", "worst"))
        within = f"{rule['cells within 10 %']} of {rule['cells']}"
        agrees = "yes" if rule["never where clients agree"] else "no"
        found = rule["mean excess by seed"]
        seeds = f"{100 * min(found):.1f} to {100 * max(found):.1f} %"
        yield [rule["rule"], f"`{rule['formula']}`", *shares, within, agrees, seeds]


def _batches(said: dict[str, Any], rounds: int = 150) -> Iterator[list[object]]:
    rules = [
        each for each in said["rules"] if each["rule"] in ("bend", "balance", "chance", "never")
    ]
    yield ["heterogeneity", "local steps", "best fixed", *(f"error, {r['rule']}" for r in rules)]
    for same in zip(*(rule["by cell"] for rule in rules), strict=True):
        best = "never" if same[0]["best"] == rounds else f"{same[0]['best']}"
        told = [f"{_short(cell['error'])} ({_about(cell, rounds)})" for cell in same[:-1]]
        fixed = f"{_short(same[0]['best error'])} ({best})"
        where = f"{same[0]['heterogeneity']:g}", same[0]["steps"]
        yield [*where, fixed, *told, _short(same[-1]["error"])]


def _when(cell: dict[str, Any], rounds: int) -> str:
    """After how many rounds a rule freezes, seed by seed."""
    when = ["never" if each == rounds else str(each) for each in cell["warm-ups"]]
    return when[0] if len(set(when)) == 1 else ", ".join(when)


def _about(cell: dict[str, Any], rounds: int) -> str:
    """From the earliest to the latest of all seeds."""
    ends = min(cell["warm-ups"]), max(cell["warm-ups"])
    told = ["never" if each == rounds else str(each) for each in ends]
    return told[0] if told[0] == told[1] else " to ".join(told)


def _cells(cells: list[dict[str, Any]], rounds: int = 150) -> Iterator[list[object]]:
    yield [
        "heterogeneity",
        "local steps",
        "rounds, seed by seed",
        "error",
        "best fixed",
        "its error",
        "excess",
    ]
    for cell in cells:
        if cell["heterogeneity"] in (0.0, 0.25, 0.5, 1.0):
            fixed = "never" if cell["best"] == rounds else cell["best"]
            errors = _short(cell["error"]), fixed, _short(cell["best error"])
            excess = f"{100 * cell['excess']:.1f} %"
            told = _when(cell, rounds)
            yield [f"{cell['heterogeneity']:g}", cell["steps"], told, *errors, excess]


def _short(number: float) -> str:
    return f"{number:.4f}" if abs(number) < 0.01 else f"{number:.3f}"


def written(text: str, found: dict[str, str]) -> str:
    """A page with these tables under their headings, in the place of those that it has."""
    for heading, rows in found.items():
        place = rf"(?m)^(### {re.escape(heading)}\n\n(?:[^|#!\n].*\n\n)?)(?:\|.*\n)*\n?"
        text, count = re.subn(place, "\\g<1>" + rows + "\n\n", text)
        if count != 1:
            raise ValueError(f"the page has {count} headings {heading!r}: it needs one")
    return text


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), tables()))
