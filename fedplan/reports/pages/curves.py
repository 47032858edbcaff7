# SPDX-License-Identifier: Apache-2.0
"""The learning curves of a report; runs that differ only in their seed are one line."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series, mean_series
from fedplan.reports.groups import group_by_seed
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import PageFigure, PageSection


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seed, under a name that labels their common line in charts."""

    name: str
    runs: tuple[RunFacts, ...]

    def series(self, of: Callable[[RunFacts], Series]) -> Series:
        """Return the mean of `of(run)` over the runs that have points, with a band of its range."""
        return mean_series(self.name, [series for run in self.runs if (series := of(run)).points])


def group_runs(runs: Sequence[RunFacts]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, under distinct names, in order of first runs."""
    groups = group_by_seed(
        runs, lambda facts: (facts.study, facts.agreement.method.plan.text, facts.run.folder)
    )
    return [SeedGroup(name, tuple(group)) for name, group in groups]


def run_names(runs: Sequence[RunFacts]) -> list[str]:
    """Return a distinct name for each run: the name of its group, as "fedavg".

    The seed is added if the group has several runs, the folder if names are still equal. A single
    run has an empty name.
    """
    if len(runs) == 1:
        return [""]
    group_by_run = {id(run): group for group in group_runs(runs) for run in group.runs}
    names = list[str]()
    for run in runs:
        group = group_by_run[id(run)]
        seed = f", seed {run.study.seed}" if len(group.runs) > 1 else ""
        names.append(f"{group.name}{seed}")
    duplicates = {name for name in names if names.count(name) > 1}
    return [
        f"{name} in {run.run.folder}" if name in duplicates else name
        for name, run in zip(names, runs, strict=True)
    ]


def curves_section(runs: Sequence[RunFacts]) -> PageSection:
    """Return the section with scores and training loss of runs by round; empty without metrics.

    Runs that differ only in their seed are one line. A single group gets its global, personal and
    worst-client scores in one figure; several groups get a figure for each score.
    """
    groups = group_runs(runs)
    score, caption = groups[0].runs[0].score[0], _score_caption(groups)
    kinds: dict[str, Callable[[RunFacts], Series]] = {
        "global": lambda facts: facts.global_scores(""),
        "personal, mean": lambda facts: facts.personal_scores(""),
    }
    if len(groups) == 1:
        if not groups[0].runs[0].privacy_unit:
            kinds["worst client"] = lambda facts: facts.personal_scores("", worst=True)
        series = [SeedGroup(name, groups[0].runs).series(of) for name, of in kinds.items()]
        drawing = line_chart(f"{score.capitalize()} by round", series, y=score)
        figures, groups = (
            [PageFigure("scores", drawing, caption)],
            [SeedGroup("loss", groups[0].runs)],
        )
    else:
        lines = [[group.series(of) for group in groups] for of in kinds.values()]
        drawing = line_chart(f"Global {score} by round", lines[0], y=score)
        personal = line_chart(f"Personal {score} by round, mean", lines[1], y=score)
        figures = [
            PageFigure("scores", drawing, caption),
            PageFigure("personal", personal, caption),
        ]
    losses = [group.series(lambda facts: facts.column("", "loss")) for group in groups]
    caption = "Mean over the training examples of the clients that report their loss."
    drawing = line_chart("Training loss by round", losses, y="loss")
    figures.append(PageFigure("loss", drawing, caption))
    return PageSection("Learning curves", figures=tuple(f for f in figures if f.drawing.rows))


def _score_caption(groups: Sequence[SeedGroup]) -> str:
    """Return the caption of the figures of scores of these groups."""
    score, higher = groups[0].runs[0].score
    sentences = [f"{score}: {'higher' if higher else 'lower'} is better."]
    several = [len(group.runs) for group in groups if len(group.runs) > 1]
    if several:
        count = f"{min(several)}" if min(several) == max(several) else "several"
        sentences.append(
            f"A line is the mean of {count} runs with different seeds; its band is from the lowest "
            "to the highest."
        )
    sentences.append(
        "Global: the global model. Personal: each client's model on its own held-out examples."
    )
    if any(run.privacy_unit for group in groups for run in group.runs):
        sentences.append(
            "Scores on clients' examples exist in a simulation only; epsilon does not cover them."
        )
    return " ".join(sentences)
