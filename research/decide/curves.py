# SPDX-License-Identifier: Apache-2.0
"""Curves of a question: its score by round, or by bytes sent, as the mean over seeds."""

from __future__ import annotations

from fedplan.reports.figures.charts import Series, line_chart, mean_series
from fedplan.reports.figures.drawing import Drawing
from research.decide.question import QuestionFile
from research.decide.results import Played, fault_of, read_results


def by_bytes(asked: QuestionFile) -> Drawing:
    """The score against what all clients have sent; a band is from the lowest seed to the highest.

    It is for arms that send as much in each round as in any other: a round's bytes are a share of
    the run's.
    """
    runs = [each for each in read_results(asked.name).values() if not fault_of(asked, each)]
    lines = list[Series]()
    for arm in asked.question.arms:
        own = [_line(each) for each in runs if each.arm == arm and each.up]
        if own and len(own[0].points) > 1:
            lines.append(mean_series(arm, own))
    title, y = f"{asked.name}: score by bytes", asked.question.score.name
    return line_chart(title, lines, x="MB sent by all clients", y=y, size=(720, 330))


def _line(run: Played) -> Series:
    last = run.curve[-1][0]
    mega = (run.up or 0) / 1e6
    return Series(run.arm, tuple((round(mega * at / last), score) for at, score in run.curve))
