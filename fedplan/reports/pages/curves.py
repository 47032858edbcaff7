# SPDX-License-Identifier: Apache-2.0
"""Curves: how runs learned, round by round; those that differ by their seed alone as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series, mean_series
from fedplan.reports.groups import seed_groups
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import PageSection, Shown


@dataclass(frozen=True)
class SeedGroup:
    """Runs of one study that differ by their seed alone, under a name."""

    name: str
    runs: tuple[RunFacts, ...]

    def series(self, of: Callable[[RunFacts], Series]) -> Series:
        """One number of these runs over the rounds: their mean, with a band."""
        return mean_series(self.name, [found for run in self.runs if (found := of(run)).points])


def groups_of(runs: Sequence[RunFacts]) -> list[SeedGroup]:
    """Runs put together that differ by their seed alone, under names that tell them apart."""
    told = seed_groups(
        runs, lambda each: (each.study, each.run.agreement.method.plan.text, each.run.folder)
    )
    return [SeedGroup(name, tuple(group)) for name, group in told]


def run_names(runs: Sequence[RunFacts]) -> list[str]:
    """A name for each of several runs: that of its group, with its seed; one alone needs none."""
    if len(runs) == 1:
        return [""]
    named = {id(run): group for group in groups_of(runs) for run in group.runs}
    names = list[str]()
    for run in runs:
        group = named[id(run)]
        seed = f", seed {run.study.seed}" if len(group.runs) > 1 else ""
        names.append(f"{group.name}{seed}")
    twice = {name for name in names if names.count(name) > 1}
    return [
        f"{name} in {run.run.folder}" if name in twice else name
        for name, run in zip(names, runs, strict=True)
    ]


def curves_section(runs: Sequence[RunFacts]) -> PageSection:
    """How the world, and clients' own models, got better; and the loss that was trained on."""
    groups = groups_of(runs)
    figures = _alone(groups[0]) if len(groups) == 1 else _together(groups)
    return PageSection("Learning", figures=tuple(each for each in figures if each.drawing.rows))


def _alone(group: SeedGroup) -> list[Shown]:
    score = group.runs[0].score[0]
    kinds: list[tuple[str, Callable[[RunFacts], Series]]] = [
        ("world", lambda each: each.world_scores("")),
        ("own, mean", lambda each: each.own_scores("")),
    ]
    if not group.runs[0].hidden:
        kinds.append(("own, worst", lambda each: each.own_scores("", worst=True)))
    held = [SeedGroup(name, group.runs).series(of) for name, of in kinds]
    return [
        Shown(
            "scores", line_chart(f"{score.capitalize()} by round", held, y=score), _scores([group])
        ),
        _loss([SeedGroup("loss", group.runs)]),
    ]


def _together(groups: Sequence[SeedGroup]) -> list[Shown]:
    score = groups[0].runs[0].score[0]
    world = [group.series(lambda each: each.world_scores("")) for group in groups]
    own = [group.series(lambda each: each.own_scores("")) for group in groups]
    caption = _scores(groups)
    return [
        Shown("scores", line_chart(f"World: {score} by round", world, y=score), caption),
        Shown("own", line_chart(f"Clients' own, mean {score}", own, y=score), caption),
        _loss(groups),
    ]


def _loss(groups: Sequence[SeedGroup]) -> Shown:
    held = [group.series(lambda each: each.column("", "loss")) for group in groups]
    words = "The mean over the rows of clients that tell theirs, while they train."
    return Shown("loss", line_chart("Loss of training by round", held, y="loss"), words)


def _scores(groups: Sequence[SeedGroup]) -> str:
    score, higher = groups[0].runs[0].score
    words = [f"{score}: {'higher' if higher else 'lower'} is better."]
    several = [len(group.runs) for group in groups if len(group.runs) > 1]
    if several:
        count = f"{min(several)}" if min(several) == max(several) else "several"
        words.append(
            f"A line is the mean of {count} runs that differ by their seed alone; its band is from "
            "the lowest to the highest of them."
        )
    words.append("World is the federation's model; own is each client's model on its own rows.")
    if any(run.hidden for group in groups for run in group.runs):
        words.append("Scores on clients' rows are a simulation's, and no epsilon covers them.")
    return " ".join(words)
