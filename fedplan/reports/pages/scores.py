# SPDX-License-Identifier: Apache-2.0
"""The sections of a report on scores: learning curves, clients, drift, and differential privacy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

from fedplan.errors import FedplanError
from fedplan.reports.figures.charts import Series, line_chart, small_multiples
from fedplan.reports.pages.facts import RunFacts, SeedGroup, group_runs
from fedplan.reports.pages.page import PageFigure, PageSection
from fedplan.reports.pages.test_scores import number
from fedplan.reports.study_explanation import read_privacy_statement
from fedplan.studies.run_scores import CLIENT_TESTS, COMMON_TEST, ScoreKind

MAX_CLIENTS = 24
"""The most clients in the figure: those with the worst scores."""
EPSILON_POINTS = 12
"""About the number of rounds at which epsilon is computed, as each takes a while."""


SCORE_KINDS: tuple[ScoreKind, ...] = ("personal", "worst client", "mean of clients", "global")
"""The scores that are drawn, in the order of a personal plan."""
LEGEND_EXAMPLES = {COMMON_TEST: "common test", CLIENT_TESTS: "own test"}
"""Short words for the examples of scores in a legend."""


def curves_section(runs: Sequence[RunFacts]) -> PageSection:
    """Return the section with scores and training loss of runs by round; empty without metrics.

    Runs that differ only in their seed are one line. A single group gets all of its scores in one
    figure; several groups get a figure for each score, that of the plans first.
    """
    groups, metric = group_runs(runs), runs[0].rules.metric
    personal = any(run.rules.personal for run in runs)
    kinds = SCORE_KINDS if personal else (SCORE_KINDS[-1], *SCORE_KINDS[:-1])
    figures, caption = list[PageFigure](), _score_caption(groups)
    if len(groups) == 1:
        (group,) = groups
        words = {s.kind: LEGEND_EXAMPLES[s.examples] for s in group.runs[0].scores.scores}
        several = len(set(words.values())) > 1
        names = {k: f"{k} ({words[k]})" if several and k in words else k for k in kinds}
        lines = [replace(group.scores(kind), name=names[kind]) for kind in kinds]
        drawing = line_chart(f"{metric.capitalize()} by round", lines, y=metric)
        figures.append(PageFigure("scores", drawing, caption=caption))
        groups = [replace(group, name="loss")]
    else:
        for kind in kinds:
            lines = [group.scores(kind) for group in groups]
            title = f"{metric}, {kind}, by round"
            drawing = line_chart(title[0].upper() + title[1:], lines, y=metric)
            figures.append(PageFigure(kind.replace(" ", "-"), drawing, caption=caption))
    losses = [group.series(lambda facts: facts.column("", "loss")) for group in groups]
    caption = "Mean over the training examples of the clients that report their loss."
    drawing = line_chart("Training loss by round", losses, y="loss")
    figures.append(PageFigure("loss", drawing, caption=caption))
    return PageSection("Learning curves", figures=tuple(f for f in figures if f.drawing.rows))


def clients_section(facts: RunFacts) -> PageSection:
    """Return the section on each client's score by round; empty if none was measured."""
    title, scores, (score, higher) = "Clients", facts.client_scores, facts.score
    whose = "personal " if facts.rules.personal else ""
    if not scores:
        return PageSection(title)
    if facts.privacy_unit:
        level = f"{facts.privacy_unit}-level differential privacy"
        text = f"Not shown: {level} protects the scores of single clients."
        return PageSection(title, (text,))

    def rank(series: Series) -> tuple[bool, float]:
        last = series.points[-1][1]
        return not isnan(last), last if higher else -last  # NaN (diverged) is the worst

    order = sorted(scores.values(), key=rank)
    worst, mean = order[0], facts.mean_client_scores("mean of all clients")
    last, average = map(number, (worst.last, mean.last))
    text = (
        f"Worst client: {worst.name}, with {score} {last}; mean of all "
        f"{len(scores)} clients: {average}."
    )
    drawn, narrow = (
        small_multiples(
            f"{whose}{score} of each client by round".capitalize(),
            order[:MAX_CLIENTS] if len(order) > MAX_CLIENTS else list(scores.values()),
            marked={worst.name: "worst client"},
            behind=mean,
            y=score,
            columns=columns,
        )
        for columns in (6, 3)
    )
    some = f"The {MAX_CLIENTS} worst of {len(scores)} clients. "
    caption = (some if len(scores) > MAX_CLIENTS else "") + (
        f"The {whose or 'global '}model at each client, on its own test examples, with the last "
        f"{score}, all on one scale. Dashed: mean of all clients."
    )
    figure = PageFigure("clients", drawn, narrow, caption)
    return PageSection(title, (text,), (figure,))


def drift_section(facts: RunFacts, name: str = "") -> PageSection:
    """Return the section on client drift: the share of updates lost in averaging, by kind."""
    shares = dict[str, list[tuple[float, float]]]()
    for record in facts.rounds:
        for kind, (spread, step) in record.drift.items():
            if spread + step > 0:
                shares.setdefault(kind, []).append((record.round, spread / (spread + step)))
    if not shares:
        return PageSection("Client drift")
    series = [Series(kind, tuple(points)) for kind, points in shares.items()]
    series.sort(key=lambda each: -(each.last or 0.0))
    title = f"Client drift by kind of param{f', {name}' if name else ''}"
    drawn = line_chart(title, series, y="share lost", size=(480, 280))
    caption = (
        "The share of the clients' updates that cancels out in the average: 0 if all updates are "
        "equal, near 1 if they point in different directions. Only shared params are averaged."
    )
    return PageSection("Client drift", figures=(PageFigure("drift", drawn, caption=caption),))


def privacy_section(facts: RunFacts) -> PageSection:
    """Return the section on the privacy statement and epsilon by round; empty without privacy."""
    title, guarantee, rounds = "Differential privacy", facts.agreement.guarantee, facts.run.round
    if guarantee is None or not rounds:
        return PageSection(title)
    try:
        text = read_privacy_statement(facts.run.folder).text().partition("\nNot covered")[0]
    except FedplanError as error:
        text = (
            f"Differential privacy is {guarantee.unit}-level. Each site has the account of its own "
            f"spent epsilon ({error})."
        )
    step = max(1, rounds // EPSILON_POINTS)
    numbers = sorted({1, *range(step, rounds + 1, step), rounds})
    spent = Series("forecast", tuple((float(n), guarantee.forecast_epsilon(n)) for n in numbers))
    limit = ("guarantee", guarantee.epsilon)
    drawn = line_chart("Epsilon by round", [spent], y="epsilon", limit=limit)
    caption = (
        f"{guarantee.unit.capitalize()}-level, at delta {guarantee.delta:g}: the forecast for one "
        f"{guarantee.unit} that is part of every round."
    )
    figures = [PageFigure("epsilon", drawn, caption=caption)]
    score, scores = facts.score[0], dict(facts.score_series("global", "global").points)
    reached = Series("global", tuple((e, scores[n]) for n, e in spent.points if n in scores))
    if reached.points:
        by_epsilon = f"Global {score} by epsilon spent"
        drawn = line_chart(by_epsilon, [reached], x="epsilon", y=score, whole=False)
        caption = "The global model after the same rounds."
        figures.append(PageFigure("score-by-epsilon", drawn, caption=caption))
    return PageSection(title, (text,), tuple(figures))


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
    kinds = {score.kind: score for group in groups for score in group.runs[0].scores.scores}
    if len(several) < len(groups) and any(score.interval for score in kinds.values()):
        sentences.append(
            "The band of a single run spans what the bins and the noise of counts leave possible."
        )
    explained = {
        "personal": "Personal: mean over the clients' models",
        "mean of clients": "Mean of clients: the global model at the clients",
        "global": "Global: the global model",
    }
    sentences += [
        f"{text}, {kinds[kind].on if kind == 'global' else 'each on its own test examples'}."
        for kind, text in explained.items()
        if kind in kinds
    ]
    guarantees = [run.agreement.guarantee for group in groups for run in group.runs]
    if any(each and not each.evaluation_noise_multiplier for each in guarantees):
        sentences.append(
            "Scores on clients' examples exist in a simulation only; epsilon does not cover them."
        )
    return " ".join(sentences)
