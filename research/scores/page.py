# SPDX-License-Identifier: Apache-2.0
"""The tables of research/pages/scores.md, from the result files: `python -m research.scores.page` writes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from research.kernel.page import table, written
from research.scores.question import Question, read_question
from research.scores.results import (
    BLOCKS,
    CONTROLS,
    Correlation,
    Found,
    Verdict,
    agreement,
    constant,
    correlations,
    read_results,
    verdicts,
)

PAGE = Path(__file__).parents[1] / "pages" / "scores.md"
TITLES = {"ncbi": "NCBI-disease", "medquad": "MedQuAD", "newsgroups": "20 Newsgroups"}


def tables() -> dict[str, str]:
    """Each table by its heading."""
    asked = read_question()
    found = read_results(asked)
    return {
        "What was played": table(_played(asked, found)),
        "What a block is worth, by task": table(_gains(asked, found)),
        "Readings and the gain of a block alone": table(_readings(asked, found, "alone")),
        "Readings and the cost of leaving a block out": table(_readings(asked, found, "without")),
    }


def _of(found: Sequence[Found], task: str, oracle: str) -> list[Found]:
    return [each for each in found if each.task == task and oracle in each.gains]


def _played(asked: Question, found: Sequence[Found]) -> Iterator[list[object]]:
    head = ["task", "seeds alone", "seeds without", "head alone: loss, score"]
    yield [*head, "best block with it", "all blocks", "seeds agree: alone", "without"]
    for task in asked.tasks:
        alone, without = (_of(found, task, oracle) for oracle in ("alone", "without"))
        first = [each.losses["head"] for each in alone]
        best = [min(each.losses[f"alone {b}"] for b in range(BLOCKS)) for each in alone]
        every = [each.losses["all"] for each in without]
        agreed = (_told(agreement(found, task, oracle)) for oracle in ("alone", "without"))
        ends = (_ends(each) for each in (first, best, every))
        yield [TITLES[task], len(alone), len(without), *ends, *agreed]


def _ends(runs: Sequence[tuple[float, float]]) -> str:
    if not runs:
        return "-"
    return f"{fmean(loss for loss, _ in runs):.3f}, {fmean(score for _, score in runs):.3f}"


def _told(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _gains(asked: Question, found: Sequence[Found]) -> Iterator[list[object]]:
    oracles = ("alone", "without")
    yield ["block", *(f"{TITLES[task]}, {oracle}" for oracle in oracles for task in asked.tasks)]
    for block in range(BLOCKS):
        row = list[object]()
        for oracle in oracles:
            for task in asked.tasks:
                held = [each.gains[oracle][block] for each in _of(found, task, oracle)]
                row.append(f"{1000 * fmean(held):.1f}" if held else "-")
        yield [block, *row]


def _readings(asked: Question, found: Sequence[Found], oracle: str) -> Iterator[list[object]]:
    told = list(correlations(found, oracle))
    judged = {each.reading: each for each in verdicts(asked, found)}
    ends = ["mean"] if oracle == "without" else ["mean", "informs on", "criterion"]
    yield ["reading", *(TITLES[task] for task in asked.tasks), *ends]
    played = [each for each in found if oracle in each.gains]
    names = dict.fromkeys(name for each in played for name in each.readings)
    for name in sorted(names, key=lambda name: -_mean(told, name)):
        cells = [_cell(told, played, name, task) for task in asked.tasks]
        known = any(each.reading == name for each in told)
        mean = f"{_mean(told, name):.2f}" if known else "-"
        rest = _judged(judged.get(name), name, len(asked.tasks)) if oracle == "alone" else []
        yield [name, *cells, mean, *rest]
    if not played:
        yield ["not played yet", *("-" for _ in (*asked.tasks, *ends))]


def _judged(found: Verdict | None, name: str, tasks: int) -> list[object]:
    if name in CONTROLS:
        return ["control", "-"]
    return [f"{len(found.informs)} of {tasks}", found.word] if found else ["-", "missed"]


def _mean(told: Sequence[Correlation], name: str) -> float:
    held = [each.mean for each in told if each.reading == name]
    return fmean(held) if held else -2.0


def _cell(told: Sequence[Correlation], played: Sequence[Found], name: str, task: str) -> str:
    """A correlation with its lowest and highest seed, or why there is none."""
    found = [each for each in told if (each.reading, each.task) == (name, task)]
    if not found:
        here = [each for each in played if each.task == task]
        return "constant" if any(constant(each.readings[name]) for each in here) else "-"
    seeds = found[0].by_seed
    ends = f" ({min(seeds):.2f} to {max(seeds):.2f})" if len(seeds) > 1 else ""
    return f"{found[0].mean:.2f}{ends}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(), tables()))
