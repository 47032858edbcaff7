# SPDX-License-Identifier: Apache-2.0
"""Histories: how a run went, in numbers, a row for each round that was committed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from fedplan.federation.record import Record, RoundRecord, TurnRecord

if TYPE_CHECKING:
    import pandas

Row = dict[str, float]
"""The numbers of one round by name, those of its scores as `world.accuracy`."""


class Metrics(list[Row]):
    """A row for each round: its loss, its bytes, who was counted, and the scores if any."""

    def to_pandas(self) -> pandas.DataFrame:
        """The same as a table, a column for each number."""
        import pandas

        return pandas.DataFrame(list(self))


def metrics_of(records: Iterable[Record], scored: Iterable[Mapping[str, Any]]) -> Metrics:
    """The rows that a ledger and the scores beside it make."""
    scores = {line["round"]: line for line in scored}
    turns, rows = list[TurnRecord](), Metrics()
    for record in records:
        if isinstance(record, RoundRecord):
            rows.append(row_of(record, turns, scores.get(record.round, {})))
            turns = []
        else:
            turns.append(record)
    return rows


def row_of(whole: RoundRecord, turns: Sequence[TurnRecord], scores: Mapping[str, Any]) -> Row:
    """One round's row.

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
    return said | dict(_numbers("", {k: v for k, v in scores.items() if k != "round"}))


def _numbers(name: str, found: object) -> Iterator[tuple[str, float]]:
    if isinstance(found, Mapping):
        for key, each in cast("Mapping[str, object]", found).items():
            yield from _numbers(f"{name}.{key}".lstrip("."), each)
    elif isinstance(found, int | float):
        yield name, found
