# SPDX-License-Identifier: Apache-2.0
"""Histories: how a run went, in numbers, a row for each round that was committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fedplan.federation.record import Record, RoundRecord, TurnRecord
from fedplan.federation.warnings import Drifts

if TYPE_CHECKING:
    import pandas

Row = dict[str, float]
"""The numbers of one round by name, those of its scores as `world.accuracy`."""

Said = Mapping[str, Any]
"""The scores of a round, as they are kept beside the ledger."""


class Metrics(list[Row]):
    """A row for each round: its loss, its bytes, who was counted, and the scores if any."""

    def to_pandas(self) -> pandas.DataFrame:
        """The same as a table, a column for each number."""
        import pandas

        return pandas.DataFrame(list(self))


@dataclass
class Past:
    """What the server remembers of the rounds that were committed.

    `told` are the rows that follow from the ledger alone, `metrics` the same with the scores
    beside them, and `drifts` those of the last rounds.
    """

    told: list[Row]
    metrics: Metrics
    drifts: Drifts

    def add(self, whole: RoundRecord, turns: Sequence[TurnRecord], scores: Said) -> None:
        """Remember one more round."""
        self.told.append(told_row(whole, turns))
        self.metrics.append(row_of(whole, turns, scores))
        self.drifts.append(whole.drift)


def metrics_of(records: Iterable[Record], scored: Iterable[Said]) -> Metrics:
    """The rows that a ledger and the scores beside it make."""
    return with_scores(told_rows(records), scored)


def told_rows(records: Iterable[Record]) -> list[Row]:
    """The rows that follow from a ledger alone."""
    turns, rows = list[TurnRecord](), list[Row]()
    for record in records:
        if isinstance(record, RoundRecord):
            rows.append(told_row(record, turns))
            turns = []
        else:
            turns.append(record)
    return rows


def with_scores(rows: Iterable[Row], scored: Iterable[Said]) -> Metrics:
    """Rows with the scores of their rounds, where there are any."""
    scores = {line["round"]: line for line in scored}
    return Metrics(row | _scores(scores.get(int(row["round"]), {})) for row in rows)


def row_of(whole: RoundRecord, turns: Sequence[TurnRecord], scores: Said) -> Row:
    """One round's row."""
    return told_row(whole, turns) | _scores(scores)


def told_row(whole: RoundRecord, turns: Sequence[TurnRecord]) -> Row:
    """One round's row, without its scores.

    The loss is the mean over the rows of the clients that tell theirs: under a guarantee none does,
    and the row has no loss.
    """
    told = [(turn.loss, turn.weight) for turn in turns if turn.loss is not None]
    weight = sum(weight for _, weight in told)
    mean = {"loss": sum(loss * each for loss, each in told) / weight} if weight else {}
    counts = {"counted": len(whole.counted), "rejected": len(whole.rejected)}
    said = {"round": whole.round, **mean, "up": whole.up, "down": whole.down, **counts}
    if whole.warnings:
        said["warnings"] = len(whole.warnings)
    if whole.products is not None:
        said |= dict(zip(("product_error", "product_error_left"), whole.products, strict=True))
    return said


def _scores(said: Said) -> Row:
    return dict(_numbers("", {k: v for k, v in said.items() if k != "round"}))


def _numbers(name: str, found: object) -> Iterator[tuple[str, float]]:
    if isinstance(found, Mapping):
        for key, each in cast("Mapping[str, object]", found).items():
            yield from _numbers(f"{name}.{key}".lstrip("."), each)
    elif isinstance(found, int | float):
        yield name, found
