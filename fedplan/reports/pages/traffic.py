# SPDX-License-Identifier: Apache-2.0
"""Traffic: the bytes of a run by part, both ways, beside what was forecast of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fedplan.federation.agreement import Agreement
from fedplan.federation.record import ROLES, RoundRecord, TurnRecord
from fedplan.language.plan import Role
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.reports.figures.bars import Bar, bar_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import paragraphs
from fedplan.reports.pages.page import PageSection, Shown
from fedplan.reports.units import byte_unit, megabytes
from fedplan.reports.views import Span, View
from fedplan.tensors.riders import param_of


@dataclass
class Traffic:
    """What went up and came down, by kind of param, worked out from a ledger line by line.

    A ledger tells whole numbers of bytes; which params they were follows from the plan, and from
    what each client had by then.
    """

    agreement: Agreement
    up: Counter[str] = field(default_factory=Counter[str])
    down: Counter[str] = field(default_factory=Counter[str])
    versions: dict[str, int] = field(default_factory=dict[str, int])
    known: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    settled: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._kinds = {p.key: str(p.kind) for p in self.agreement.params}

    def turn(self, line: TurnRecord) -> None:
        """Count one turn."""
        params, scores = self.agreement.params, line.scores or ()
        for param, letter in zip(params, line.roles, strict=True):
            if ROLES[letter] is Role.SHARE:
                self.up[str(param.kind)] += self.agreement.up(param)
        if line.anew:
            self.known.pop(line.client, None)
            self.settled.pop(line.client, None)
        found = {Block(stack, number): score for stack, number, score in scores}
        turn = Turn(line.round, line.client, line.phase, line.traits, found or None)
        known = self.known.setdefault(line.client, {})
        settled = self.settled.get(line.client, 0)
        wanted = self.agreement.wanted(turn, settled)
        lacking = {k for k, first in wanted.items() if known.get(k, first) < self._version(k)}
        known |= {key: self._version(key) for key in lacking}
        self.settled[line.client] = settled | self.agreement.owned(turn)
        for key in lacking:
            self.down[self._kinds[param_of(key)]] += self.agreement.sizes[key]

    def round(self, line: RoundRecord) -> None:
        """Note what a round moved."""
        self.versions |= dict.fromkeys(line.moved, line.round)

    def _version(self, key: str) -> int:
        return self.versions.get(key, 0)


def traffic_of(facts: RunFacts) -> Traffic:
    """The bytes of a run by kind of param."""
    found = Traffic(facts.agreement)
    for record, turns in zip(facts.rounds, facts.turns, strict=True):
        for turn in turns:
            found.turn(turn)
        found.round(record)
    return found


def traffic_section(facts: RunFacts) -> PageSection:
    """Bytes by part and by round, up and down, beside the forecast."""
    title = "Bytes"
    turns = sum(map(len, facts.turns))
    if not turns:
        return PageSection(title)
    if facts.hides_clients:
        return PageSection(title, tuple(paragraphs(_forecast_words(facts))))
    traffic, count = traffic_of(facts), len(facts.rounds)
    up, down = traffic.up.total(), traffic.down.total()
    words = (
        f"{megabytes(up)} MB went up and {megabytes(down)} MB came down in {turns} turns over "
        f"{count} rounds. {_kept_to(facts)}"
    )
    figures = (
        Shown("bytes-up", _bars("Up, by part", traffic.up, turns, _foretold(facts)), UP),
        Shown("bytes-down", _bars("Down, by part", traffic.down, turns, {}), DOWN),
        Shown("bytes-up-rounds", _rounds(facts, "up"), ROUNDS),
        Shown("bytes-down-rounds", _rounds(facts, "down"), ROUNDS),
    )
    notes = [f"Of the forecast: {note}." for note in facts.forecast.notes]
    return PageSection(title, tuple(paragraphs(words)), figures, tuple(paragraphs(*notes)))


UP = "Of a turn, on average. A black mark is where the forecast said that the bar would end."
DOWN = "Of a turn, on average. A forecast of what comes down is told for all parts together."
ROUNDS = (
    "Of a client's turn, on average over those of the round. Behind is the forecast, from the "
    "least to the most, of a client that takes part in all rounds."
)


def _bars(
    title: str, found: Counter[str], turns: int, expected: dict[str, tuple[float, float]]
) -> Drawing:
    size, unit = byte_unit(max(found.values(), default=0) / turns)
    kinds = sorted(found.keys() | expected.keys(), key=lambda kind: (-found[kind], kind))
    bars = [
        Bar(kind, found[kind] / turns / size, _scaled(expected.get(kind), size))
        for kind in kinds
        if found[kind] or any(expected.get(kind, ()))
    ]
    return bar_chart(title, bars, unit=f"{unit} a turn", told=lambda each: f"{each:.3g}")


def _scaled(span: tuple[float, float] | None, size: float) -> tuple[float, float] | None:
    return None if span is None else (span[0] / size, span[1] / size)


def _foretold(facts: RunFacts) -> dict[str, tuple[float, float]]:
    """What a turn sends of each kind by the forecast, over the rounds that are closed."""
    fare, closed = facts.forecast.fare, range(1, facts.run.round + 1)
    spans = dict[str, list[Span]]()
    for view in facts.forecast.views:
        sums = dict[str, list[int]]()
        for stage in view.stages:
            times = sum(number in closed for number in stage.rounds)
            for param, role in stage.permitted.items():
                both = sums.setdefault(str(param.kind), [0, 0])
                both[0] += times * fare.up(param) * (stage.certain[param] is Role.SHARE)
                both[1] += times * fare.up(param) * (role is Role.SHARE)
        for kind, (least, most) in sums.items():
            spans.setdefault(kind, []).append((least, most))
    scale = max(1, len(closed))
    return {
        kind: (min(low for low, _ in held) / scale, max(high for _, high in held) / scale)
        for kind, held in spans.items()
    }


def _rounds(facts: RunFacts, way: str) -> Drawing:
    told = [
        (record.round, sum(t.up if way == "up" else t.down for t in turns) / len(turns))
        for record, turns in zip(facts.rounds, facts.turns, strict=True)
        if turns
    ]
    size, unit = byte_unit(max(count for _, count in told))
    return line_chart(
        f"{way.capitalize()}, by round",
        [Series("a turn", tuple((number, count / size) for number, count in told))],
        y=unit,
        expected=_band(facts, way, size),
    )


def _band(facts: RunFacts, way: str, size: float = 1.0) -> Series:
    """The forecast of each round, over all kinds of clients."""
    spans = [list(_spans(view, way)) for view in facts.forecast.views]
    columns = list(zip(*spans, strict=True))[: facts.run.round]
    lows = [min(low for low, _ in held) / size for held in columns]
    highs = [max(high for _, high in held) / size for held in columns]
    return Series(
        "forecast",
        tuple((n, high) for n, high in enumerate(highs, 1)),
        tuple(zip(lows, highs, strict=True)),
    )


def _spans(view: View, way: str) -> Iterator[Span]:
    yield from view.ups if way == "up" else view.downs


def _forecast_words(facts: RunFacts) -> str:
    """What was forecast of a client: what single turns sent would tell who was drawn."""
    views = facts.forecast.views
    up, down = max(view.up for view in views), max(view.down for view in views)
    return (
        "This study hides each client: how many turns there were, and what they sent, is not told. "
        f"By the forecast, a client that is drawn into all {facts.forecast.rounds} rounds sends at "
        f"most {megabytes(up)} MB and receives at most {megabytes(down)} MB."
    )


def _kept_to(facts: RunFacts) -> str:
    """Whether each turn sent what was forecast, in words."""
    band = _band(facts, "up").band
    out = [
        turn
        for record, turns in zip(facts.rounds, facts.turns, strict=True)
        for turn in turns
        if not band[record.round - 1][0] <= turn.up <= band[record.round - 1][1]
    ]
    if not out:
        return "What each turn sent lies within the forecast."
    return f"{len(out)} turns sent more or less than was forecast."
