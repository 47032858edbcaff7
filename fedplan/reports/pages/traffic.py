# SPDX-License-Identifier: Apache-2.0
"""The section of a report on uploaded and downloaded bytes by part, beside the forecast."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.records import ROLE_BY_LETTER, RoundRecord, TurnRecord
from fedplan.language.plan import Role
from fedplan.language.predicates import Turn
from fedplan.models.params import Block
from fedplan.reports.figures.charts import Bar, Series, bar_chart, line_chart
from fedplan.reports.figures.drawing import Drawing
from fedplan.reports.forecasts import ByteRange
from fedplan.reports.formats import byte_unit, megabytes
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import PageFigure, PageSection
from fedplan.tensors.named import param_key


@dataclass
class Traffic:
    """Counts the bytes uploaded and downloaded in a run by kind of param, from ledger records.

    For each round call `add_turn` with each turn, then `add_round`; `up` and `down` have the sums.
    A ledger has only the total bytes of a turn; the params follow from the `agreement` (plan,
    params and compression), from `versions` (the round of each param's last update), from
    `client_versions` (by client, the round of the value of each param that the client has) and from
    `personal_bits` (by client, a bit mask of the personal params).
    """

    agreement: Agreement
    up: Counter[str] = field(default_factory=Counter[str])
    down: Counter[str] = field(default_factory=Counter[str])
    versions: dict[str, int] = field(default_factory=dict[str, int])
    client_versions: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    personal_bits: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self._kinds = {p.key: str(p.kind) for p in self.agreement.params}

    def add_turn(self, record: TurnRecord) -> None:
        """Add the bytes of a turn, and record the versions that the client has after the turn."""
        agreement, client = self.agreement, record.client
        letters = zip(agreement.params, record.roles, strict=True)
        shared = [param for param, letter in letters if ROLE_BY_LETTER[letter] is Role.SHARE]
        # A client may drop out before its masked input arrives, or send it in two attempts.
        update = sum(map(agreement.upload_bytes, shared))
        updates = record.upload_bytes // update if update else 0
        for param in shared:
            self.up[str(param.kind)] += updates * agreement.upload_bytes(param)
        if record.full:
            self.client_versions.pop(client, None)
            self.personal_bits.pop(client, None)
        scores = {Block(stack, number): score for stack, number, score in record.scores or ()}
        turn = Turn(record.round, client, record.phase, record.traits, scores or None)
        versions = self.client_versions.setdefault(client, {})
        personal = self.personal_bits.get(client, 0)
        for key, version in agreement.required(turn, personal).items():
            if versions.get(key, version) < (updated := self.versions.get(key, 0)):
                versions[key] = updated
                self.down[self._kinds[param_key(key)]] += agreement.download_bytes[key]
        self.personal_bits[client] = personal | agreement.personal_bits(turn)

    def add_round(self, record: RoundRecord) -> None:
        """Record the params that a round updated."""
        self.versions |= dict.fromkeys(record.changed, record.round)


def count_traffic(facts: RunFacts) -> Traffic:
    """Count the bytes uploaded and downloaded in a run by kind of param, from its ledger."""
    traffic = Traffic(facts.agreement)
    for record, turns in zip(facts.rounds, facts.turns, strict=True):
        for turn in turns:
            traffic.add_turn(turn)
        traffic.add_round(record)
    return traffic


def traffic_section(facts: RunFacts) -> PageSection:
    """Return the section on a run's bytes by part and by round, beside the forecast.

    Empty before the first turn; under client-level differential privacy it has only the forecast,
    as the bytes of turns would reveal the sampled clients.
    """
    title, turns = "Upload and download", sum(map(len, facts.turns))
    if not turns:
        return PageSection(title)
    if facts.client_level_dp:
        clients = facts.forecast.clients
        up, down = max(c.max_upload for c in clients), max(c.max_download for c in clients)
        text = (
            "Not shown: client-level differential privacy protects the number and size of turns. "
            f"Forecast for a client that is sampled in all {facts.forecast.rounds} rounds: upload "
            f"at most {megabytes(up)} MB, download at most {megabytes(down)} MB."
        )
        return PageSection(title, (text,))
    traffic, band = count_traffic(facts), _forecast_band(facts, "up").band
    limits = (band[record.round - 1] for record in facts.rounds)
    pairs = zip(limits, facts.turns, strict=True)
    outside = sum(not low <= t.upload_bytes <= high for (low, high), ts in pairs for t in ts)
    compared = f"The upload of {outside} turns is outside of the forecast."
    if not outside:
        compared = "The upload of every turn is within the forecast."
    text = (
        f"Upload {megabytes(traffic.up.total())} MB, download {megabytes(traffic.down.total())} MB,"
        f" in {turns} turns over {len(facts.rounds)} rounds. {compared}"
    )
    up_bars = _bars("Upload by part", traffic.up, turns, _forecast_uploads(facts))
    down_bars = _bars("Download by part", traffic.down, turns, {})
    figures = (
        PageFigure("upload-by-part", up_bars, caption=UP),
        PageFigure("download-by-part", down_bars, caption=DOWN),
        PageFigure("upload-by-round", _rounds(facts, "up"), caption=ROUNDS),
        PageFigure("download-by-round", _rounds(facts, "down"), caption=ROUNDS),
    )
    notes = tuple(f"On the forecast: {note}." for note in facts.forecast.notes)
    return PageSection(title, (text,), figures, notes)


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
    """Return a bar chart of the mean bytes per turn by kind; `counts` are of all turns together."""
    size, unit = byte_unit(max(counts.values(), default=0) / turns)
    bars = list[Bar]()
    for kind in sorted(counts.keys() | expected.keys(), key=lambda kind: (-counts[kind], kind)):
        span = expected.get(kind)
        if counts[kind] or any(span or ()):
            scaled = None if span is None else (span[0] / size, span[1] / size)
            bars.append(Bar(kind, counts[kind] / turns / size, scaled))
    return bar_chart(title, bars, unit=f"{unit} per turn", format_value="{:.3g}".format)


def _forecast_uploads(facts: RunFacts) -> dict[str, tuple[float, float]]:
    """Return the forecast (least, most) mean upload per turn of all classes, by kind of param."""
    wire_cost, closed = facts.forecast.wire_cost, range(1, facts.run.round + 1)
    ranges = dict[str, list[ByteRange]]()
    for client in facts.forecast.clients:
        least, most = Counter[str](), Counter[str]()
        for stage in client.stages:
            times = sum(number in closed for number in stage.rounds)
            for param, role in stage.permitted.items():
                nbytes = times * wire_cost.upload_bytes(param)
                least[str(param.kind)] += nbytes * (stage.certain[param] is Role.SHARE)
                most[str(param.kind)] += nbytes * (role is Role.SHARE)
        for kind in most:
            ranges.setdefault(kind, []).append((least[kind], most[kind]))
    rounds = max(1, len(closed))
    return {
        kind: (min(low for low, _ in pairs) / rounds, max(high for _, high in pairs) / rounds)
        for kind, pairs in ranges.items()
    }


def _rounds(facts: RunFacts, direction: str) -> Drawing:
    """Return a line chart of the mean bytes per turn by round; `direction` is "up" or "down"."""
    means = list[tuple[int, float]]()
    for record, turns in zip(facts.rounds, facts.turns, strict=True):
        sizes = [t.upload_bytes if direction == "up" else t.download_bytes for t in turns]
        if sizes:
            means.append((record.round, sum(sizes) / len(sizes)))
    size, unit = byte_unit(max(count for _, count in means))
    return line_chart(
        f"{'Upload' if direction == 'up' else 'Download'} by round",
        [Series("mean turn", tuple((number, count / size) for number, count in means))],
        y=unit,
        expected=_forecast_band(facts, direction, size),
        from_zero=True,
    )


def _forecast_band(facts: RunFacts, direction: str, size: float = 1.0) -> Series:
    """Return the forecast of a turn in each closed round, in `size` bytes, over all classes."""
    ranges = [c.uploads if direction == "up" else c.downloads for c in facts.forecast.clients]
    columns = list(zip(*ranges, strict=True))[: facts.run.round]
    lows = [min(low for low, _ in column) / size for column in columns]
    highs = [max(high for _, high in column) / size for column in columns]
    return Series(
        "forecast",
        tuple((n, high) for n, high in enumerate(highs, 1)),
        tuple(zip(lows, highs, strict=True)),
    )
