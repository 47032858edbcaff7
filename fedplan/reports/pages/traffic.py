# SPDX-License-Identifier: Apache-2.0
"""The section of a report on uploaded and downloaded bytes by part, beside the forecast."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fedplan.federation.agreement import Agreement
from fedplan.federation.record import ROLE_BY_LETTER, RoundRecord, TurnRecord
from fedplan.language.plan import Role
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.reports.figures.bars import Bar, bar_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.figures.lines import line_chart
from fedplan.reports.figures.series import Series
from fedplan.reports.forecast_types import ByteRange
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.markup import paragraphs
from fedplan.reports.pages.page import PageFigure, PageSection
from fedplan.reports.units import byte_unit, megabytes
from fedplan.tensors.aux_tensors import param_key


@dataclass
class Traffic:
    """Counts the bytes uploaded and downloaded by kind of param, from the lines of a ledger.

    A ledger has only the total bytes of a turn; the params follow from the plan and from the
    versions that each client had. `versions` are the rounds of the params' last updates,
    `client_versions` the same as each client has them, and `personal_bits` the personal params of
    each client as a bit mask.
    """

    agreement: Agreement
    up: Counter[str] = field(default_factory=Counter[str])
    down: Counter[str] = field(default_factory=Counter[str])
    versions: dict[str, int] = field(default_factory=dict[str, int])
    client_versions: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    personal_bits: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._kinds = {p.key: str(p.kind) for p in self.agreement.params}

    def add_turn(self, line: TurnRecord) -> None:
        """Add the bytes of a turn, and record the versions that the client has after it."""
        for param, letter in zip(self.agreement.params, line.roles, strict=True):
            if ROLE_BY_LETTER[letter] is Role.SHARE:
                self.up[str(param.kind)] += self.agreement.upload_bytes(param)
        if line.full:
            self.client_versions.pop(line.client, None)
            self.personal_bits.pop(line.client, None)
        scores = {Block(stack, number): score for stack, number, score in line.scores or ()}
        turn = Turn(line.round, line.client, line.phase, line.traits, scores or None)
        versions = self.client_versions.setdefault(line.client, {})
        personal = self.personal_bits.get(line.client, 0)
        required = self.agreement.required(turn, personal)
        outdated = {k for k, v in required.items() if versions.get(k, v) < self._version(k)}
        versions |= {key: self._version(key) for key in outdated}
        self.personal_bits[line.client] = personal | self.agreement.personal_bits(turn)
        for key in outdated:
            self.down[self._kinds[param_key(key)]] += self.agreement.download_bytes[key]

    def add_round(self, line: RoundRecord) -> None:
        """Record the params that a round updated."""
        self.versions |= dict.fromkeys(line.moved, line.round)

    def _version(self, key: str) -> int:
        """Return the round of a param's last update, 0 for none."""
        return self.versions.get(key, 0)


def count_traffic(facts: RunFacts) -> Traffic:
    """Count the bytes uploaded and downloaded in a run by kind of param."""
    traffic = Traffic(facts.agreement)
    for record, turns in zip(facts.rounds, facts.turns, strict=True):
        for turn in turns:
            traffic.add_turn(turn)
        traffic.add_round(record)
    return traffic


def traffic_section(facts: RunFacts) -> PageSection:
    """Return the section on bytes by part and by round, beside the forecast.

    Under client-level differential privacy it has only the forecast.
    """
    title = "Upload and download"
    turns = sum(map(len, facts.turns))
    if not turns:
        return PageSection(title)
    if facts.client_level_dp:
        return PageSection(title, tuple(paragraphs(_forecast_text(facts))))
    traffic, count = count_traffic(facts), len(facts.rounds)
    up, down = traffic.up.total(), traffic.down.total()
    text = (
        f"Upload {megabytes(up)} MB, download {megabytes(down)} MB, in {turns} turns over "
        f"{count} rounds. {_compare_with_forecast(facts)}"
    )
    figures = (
        PageFigure(
            "bytes-up", _bars("Upload by part", traffic.up, turns, _forecast_uploads(facts)), UP
        ),
        PageFigure("bytes-down", _bars("Download by part", traffic.down, turns, {}), DOWN),
        PageFigure("bytes-up-rounds", _rounds(facts, "up"), ROUNDS),
        PageFigure("bytes-down-rounds", _rounds(facts, "down"), ROUNDS),
    )
    notes = [f"On the forecast: {note}." for note in facts.forecast.notes]
    return PageSection(title, tuple(paragraphs(text)), figures, tuple(paragraphs(*notes)))


UP = "Mean per turn. Black marks: the forecast."
DOWN = "Mean per turn. The forecast of downloads is for all parts together, in the next figures."
ROUNDS = (
    "Mean per turn of the round. Grey: the forecast, from least to most, for a client that takes "
    "part in every round."
)
"""Captions of the figures."""


def _bars(
    title: str, counts: Counter[str], turns: int, expected: dict[str, tuple[float, float]]
) -> Drawing:
    """Return a bar chart of the mean bytes per turn by kind, with the expected ranges."""
    size, unit = byte_unit(max(counts.values(), default=0) / turns)
    kinds = sorted(counts.keys() | expected.keys(), key=lambda kind: (-counts[kind], kind))
    bars = [
        Bar(kind, counts[kind] / turns / size, _divide_range(expected.get(kind), size))
        for kind in kinds
        if counts[kind] or any(expected.get(kind, ()))
    ]
    return bar_chart(
        title, bars, unit=f"{unit} per turn", format_value=lambda value: f"{value:.3g}"
    )


def _divide_range(span: tuple[float, float] | None, size: float) -> tuple[float, float] | None:
    """Return a range divided by a size; None stays None."""
    return None if span is None else (span[0] / size, span[1] / size)


def _forecast_uploads(facts: RunFacts) -> dict[str, tuple[float, float]]:
    """Return the forecast mean upload per turn by kind over the closed rounds, as (least, most)."""
    wire_cost, closed = facts.forecast.wire_cost, range(1, facts.run.round + 1)
    ranges = dict[str, list[ByteRange]]()
    for client in facts.forecast.clients:
        sums = dict[str, list[int]]()
        for stage in client.stages:
            times = sum(number in closed for number in stage.rounds)
            for param, role in stage.permitted.items():
                both = sums.setdefault(str(param.kind), [0, 0])
                both[0] += (
                    times * wire_cost.upload_bytes(param) * (stage.certain[param] is Role.SHARE)
                )
                both[1] += times * wire_cost.upload_bytes(param) * (role is Role.SHARE)
        for kind, (least, most) in sums.items():
            ranges.setdefault(kind, []).append((least, most))
    rounds = max(1, len(closed))
    return {
        kind: (min(low for low, _ in pairs) / rounds, max(high for _, high in pairs) / rounds)
        for kind, pairs in ranges.items()
    }


def _rounds(facts: RunFacts, direction: str) -> Drawing:
    """Return a line chart of the mean bytes per turn by round; `direction` is "up" or "down"."""
    means = [
        (record.round, sum(t.up if direction == "up" else t.down for t in turns) / len(turns))
        for record, turns in zip(facts.rounds, facts.turns, strict=True)
        if turns
    ]
    size, unit = byte_unit(max(count for _, count in means))
    return line_chart(
        f"{'Upload' if direction == 'up' else 'Download'} by round",
        [Series("mean turn", tuple((number, count / size) for number, count in means))],
        y=unit,
        expected=_forecast_band(facts, direction, size),
    )


def _forecast_band(facts: RunFacts, direction: str, size: float = 1.0) -> Series:
    """Return the forecast of each closed round over all classes of clients, in units of `size`."""
    ranges = [c.uploads if direction == "up" else c.downloads for c in facts.forecast.clients]
    columns = list(zip(*ranges, strict=True))[: facts.run.round]
    lows = [min(low for low, _ in column) / size for column in columns]
    highs = [max(high for _, high in column) / size for column in columns]
    return Series(
        "forecast",
        tuple((n, high) for n, high in enumerate(highs, 1)),
        tuple(zip(lows, highs, strict=True)),
    )


def _forecast_text(facts: RunFacts) -> str:
    """Return the forecast for a client, as the bytes of turns would reveal who was sampled."""
    clients, rounds = facts.forecast.clients, facts.forecast.rounds
    up, down = max(c.max_upload for c in clients), max(c.max_download for c in clients)
    return (
        "Not shown: client-level differential privacy protects the number and size of turns. "
        f"Forecast for a client that is sampled in all {rounds} rounds: upload at most "
        f"{megabytes(up)} MB, download at most {megabytes(down)} MB."
    )


def _compare_with_forecast(facts: RunFacts) -> str:
    """Return a sentence on the number of turns whose upload is outside of the forecast."""
    band = _forecast_band(facts, "up").band
    outside = [
        turn
        for record, turns in zip(facts.rounds, facts.turns, strict=True)
        for turn in turns
        if not band[record.round - 1][0] <= turn.up <= band[record.round - 1][1]
    ]
    if not outside:
        return "The upload of every turn is within the forecast."
    return f"The upload of {len(outside)} turns is outside of the forecast."
