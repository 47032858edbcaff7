# SPDX-License-Identifier: Apache-2.0
"""Metrics and warnings of a run by round, from ledger records and the evaluations beside them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from fedplan.federation.ledger.records import Record, RoundRecord, TurnRecord

if TYPE_CHECKING:
    import pandas

Row = dict[str, float]
"""Numbers of one round by name; evaluation metrics are named as `global.accuracy`."""

ScoreLine = Mapping[str, Any]
"""Evaluation metrics of one round, as in the metrics file."""

DOMINANT_SHARE, DOMINANT_RATIO = 0.5, 4
"""A client dominates a round if it has more than this share of the total weight, and more than this
many times the next weight."""
DRIFT_WINDOW, MIN_DRIFT_ROUNDS, DRIFT_JUMP = 5, 3, 5.0
"""Drift jumps if it exceeds this many times the median of the last rounds (the window), of which at
least the minimum must have drift of that kind."""

DriftByKind = Mapping[str, tuple[float, float]]
"""Drift of one round by kind of param, as in `RoundRecord.drift`."""
Drifts = deque[DriftByKind]
"""Drift of the last DRIFT_WINDOW rounds."""


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


def run_failure(rows: Iterable[Row]) -> str:
    """Return why a run with these rows, which has had all its rounds, has no result; else ""."""
    learned = any(row["aggregated"] for row in rows)
    return "" if learned else "no update was aggregated in any round"


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
    product_error and product_error_left (`lora_product_sum.Errors`).
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


def _flatten_scores(scores: ScoreLine, prefix: str = "") -> Row:
    """Return the numbers of nested metrics by dotted names, without `round`."""
    row = Row()
    for key, value in scores.items():
        if isinstance(value, Mapping):
            row |= _flatten_scores(cast("ScoreLine", value), f"{prefix}{key}.")
        elif isinstance(value, int | float) and (prefix or key != "round"):
            row[f"{prefix}{key}"] = value
    return row


def recent_drifts(records: Iterable[Record]) -> Drifts:
    """Return the drift of the last rounds among some records."""
    rounds = (record.drift for record in records if isinstance(record, RoundRecord))
    return Drifts(rounds, maxlen=DRIFT_WINDOW)


def make_warnings(
    record: RoundRecord, turns: Iterable[TurnRecord], earlier: Sequence[DriftByKind]
) -> tuple[str, ...]:
    """Return the warnings of a round as sentences; empty if all is usual.

    Warns of a client with most of the weight, of kinds of params with a jump of drift, of outliers
    of the defence, and of params with too few senders for the defence. `record`, `turns`: the
    ledger's records of the round. `earlier`: drift of the last DRIFT_WINDOW rounds before. The
    sentences are part of the ledger, and an audit recomputes them.
    """
    warnings, counted = list[str](), set(record.aggregated)
    weights = {turn.client: turn.weight for turn in turns if turn.client in counted}
    if len(weights) >= 2:
        ranked = sorted(weights.items(), key=lambda item: (-item[1], item[0]))
        (client, largest), (_, second) = ranked[:2]
        share = largest / sum(weights.values())
        if share > DOMINANT_SHARE and largest > DOMINANT_RATIO * second:
            warnings.append(f"{client} reports {share:.3f} of the round's weight")
    for kind, (drift, _) in sorted(record.drift.items()):
        past = [by_kind[kind][0] for by_kind in earlier if kind in by_kind]
        reference = median(past) if len(past) >= MIN_DRIFT_ROUNDS else 0.0
        if reference and drift > DRIFT_JUMP * reference:
            times = f"{drift / reference:.1f} times"
            warnings.append(f"the drift of {kind} is {times} that of the last rounds")
    if (defence := record.defence) is not None:
        for client, ratio in sorted(defence.distance.items()):
            distance = f"{ratio:.4g} times as far"
            warnings.append(f"{client} lies {distance} from the rule's values as is usual")
        if defence.undefended:
            few = f"{defence.undefended} params came from too few clients"
            warnings.append(f"{few} for the rule to tolerate a malicious client")
    return tuple(warnings)
