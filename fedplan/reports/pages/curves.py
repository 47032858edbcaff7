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
    """A named group of runs that differ only in their seed."""

    name: str
    runs: tuple[RunFacts, ...]

    def series(self, of: Callable[[RunFacts], Series]) -> Series:
        """Return the mean of a series over the runs that have it, with a band."""
        return mean_series(self.name, [series for run in self.runs if (series := of(run)).points])


def group_runs(runs: Sequence[RunFacts]) -> list[SeedGroup]:
    """Group runs that differ only in their seed, under distinct names."""
    groups = group_by_seed(
        runs, lambda facts: (facts.study, facts.agreement.method.plan.text, facts.run.folder)
    )
    return [SeedGroup(name, tuple(group)) for name, group in groups]


def run_names(runs: Sequence[RunFacts]) -> list[str]:
    """Return distinct names of runs: the name of the group, the seed, and the folder if needed.

    A single run has an empty name.
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
    """Return the section with global scores, personal scores and training loss by round."""
    groups = group_runs(runs)
    figures = _single_group(groups[0]) if len(groups) == 1 else _several_groups(groups)
    figures = tuple(figure for figure in figures if figure.drawing.rows)
    return PageSection("Learning curves", figures=figures)


def _single_group(group: SeedGroup) -> list[PageFigure]:
    """Return a figure of global, personal and worst-client scores, and one of the loss."""
    score = group.runs[0].score[0]
    kinds: list[tuple[str, Callable[[RunFacts], Series]]] = [
        ("global", lambda facts: facts.global_scores("")),
        ("personal, mean", lambda facts: facts.personal_scores("")),
    ]
    if not group.runs[0].privacy_unit:
        kinds.append(("worst client", lambda facts: facts.personal_scores("", worst=True)))
    series = [SeedGroup(name, group.runs).series(of) for name, of in kinds]
    drawing = line_chart(f"{score.capitalize()} by round", series, y=score)
    return [
        PageFigure("scores", drawing, _score_caption([group])),
        _loss([SeedGroup("loss", group.runs)]),
    ]


def _several_groups(groups: Sequence[SeedGroup]) -> list[PageFigure]:
    """Return figures of global scores, personal scores and loss with a line per group."""
    score = groups[0].runs[0].score[0]
    global_ = [group.series(lambda facts: facts.global_scores("")) for group in groups]
    personal = [group.series(lambda facts: facts.personal_scores("")) for group in groups]
    caption = _score_caption(groups)
    return [
        PageFigure("scores", line_chart(f"Global {score} by round", global_, y=score), caption),
        PageFigure(
            "own", line_chart(f"Personal {score} by round, mean", personal, y=score), caption
        ),
        _loss(groups),
    ]


def _loss(groups: Sequence[SeedGroup]) -> PageFigure:
    """Return the figure of the training loss with a line per group."""
    series = [group.series(lambda facts: facts.column("", "loss")) for group in groups]
    caption = "Mean over the training examples of the clients that report their loss."
    return PageFigure("loss", line_chart("Training loss by round", series, y="loss"), caption)


def _score_caption(groups: Sequence[SeedGroup]) -> str:
    """Return the caption of figures of scores."""
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
