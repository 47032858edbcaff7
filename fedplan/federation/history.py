# SPDX-License-Identifier: Apache-2.0
"""Metrics of a run by round, read from the ledger and from the evaluations beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from fedplan.federation.record import Record, RoundRecord, TurnRecord
from fedplan.federation.round_warnings import Drifts

if TYPE_CHECKING:
    import pandas

Row = dict[str, float]
"""Numbers of one round by name; evaluation metrics are named as `global.accuracy`."""

ScoreLine = Mapping[str, Any]
"""Evaluation metrics of one round, as in the metrics file."""


class Metrics(list[Row]):
    """List of a row (numbers by name) for each round; `to_pandas` returns a DataFrame."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return the rows as a DataFrame with a column for each metric."""
        import pandas

        return pandas.DataFrame(list(self))


@dataclass
class History:
    """Metrics of all committed rounds in the server's memory; `add` appends a round.

    `ledger_rows`: a row for each round, from the ledger alone. `metrics`: the same rows with
    evaluation metrics. `drifts`: drift of the last DRIFT_WINDOW rounds, for warnings.
    """

    ledger_rows: list[Row]
    metrics: Metrics
    drifts: Drifts

    def add(self, record: RoundRecord, turns: Sequence[TurnRecord], scores: ScoreLine) -> None:
        """Append one more round."""
        self.ledger_rows.append(ledger_row(record, turns))
        self.metrics.append(round_row(record, turns, scores))
        self.drifts.append(record.drift)


def collect_metrics(records: Iterable[Record], scored: Iterable[ScoreLine]) -> Metrics:
    """Return the rows of all rounds, from the ledger's records and evaluation metrics by round."""
    return join_scores(ledger_rows(records), scored)


def ledger_rows(records: Iterable[Record]) -> list[Row]:
    """Return the rows of all rounds, from records in the ledger's order: turns, then their round.

    Turns after the last round are left out.
    """
    turns, rows = list[TurnRecord](), list[Row]()
    for record in records:
        if isinstance(record, RoundRecord):
            rows.append(ledger_row(record, turns))
            turns = []
        else:
            turns.append(record)
    return rows


def join_scores(rows: Iterable[Row], scored: Iterable[ScoreLine]) -> Metrics:
    """Return rows with the evaluation metrics of their rounds added."""
    scores = {line["round"]: line for line in scored}
    return Metrics(row | _flatten_scores(scores.get(int(row["round"]), {})) for row in rows)


def round_row(record: RoundRecord, turns: Sequence[TurnRecord], scores: ScoreLine) -> Row:
    """Return one round's row with its evaluation metrics."""
    return ledger_row(record, turns) | _flatten_scores(scores)


def ledger_row(record: RoundRecord, turns: Sequence[TurnRecord]) -> Row:
    """Return one round's row without evaluation metrics, from the ledger's records.

    `record` is of the round, `turns` of all clients in the round. The row has round, upload_bytes
    and download_bytes, aggregated and rejected (numbers of clients). Only if present: loss (mean
    over clients, weighted by `weight`), warnings (number), and the errors of LoRA products,
    product_error and product_error_left (`lora_products.Errors`).
    """
    losses = [(turn.loss, turn.weight) for turn in turns if turn.loss is not None]
    weight = sum(weight for _, weight in losses)
    mean = {"loss": sum(loss * each for loss, each in losses) / weight} if weight else {}
    counts = {"aggregated": len(record.aggregated), "rejected": len(record.rejected)}
    traffic = {"upload_bytes": record.upload_bytes, "download_bytes": record.download_bytes}
    row = {"round": record.round, **mean, **traffic, **counts}
    if record.warnings:
        row["warnings"] = len(record.warnings)
    if record.products is not None:
        row |= dict(zip(("product_error", "product_error_left"), record.products, strict=True))
    return row


def _flatten_scores(scores: ScoreLine) -> Row:
    """Return the numbers of nested metrics by dotted names, without `round`."""
    return dict(_walk_numbers("", {k: v for k, v in scores.items() if k != "round"}))


def _walk_numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yield each number in nested mappings with its dotted name."""
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[str, object]", value).items():
            yield from _walk_numbers(f"{name}.{key}".lstrip("."), item)
    elif isinstance(value, int | float):
        yield name, value
