# SPDX-License-Identifier: Apache-2.0
"""Egress: what a site's own record says, as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.federation.account import ANSWERS, DELTA, read_answers
from fedplan.federation.egress import by_part, read_agreement, read_egress, records_in
from fedplan.privacy.accounting.budget import Budget
from fedplan.privacy.guard import CHARGES


@dataclass(frozen=True)
class SiteRecord:
    """What one site agreed to in one experiment, and all that has left it."""

    folder: Path
    agreed: dict[str, Any]
    lines: list[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        return {"agreed": self.agreed, "lines": self.lines, "parts": by_part(self.lines)}

    @property
    def width(self) -> int:
        """The columns of a terminal that its table takes."""
        return 40 + 11 * len(by_part(self.lines))

    def __rich__(self) -> RenderableType:
        agreed, limits = self.agreed, self.agreed["limits"]
        up, said = (sum(line[what] for line in self.lines) for what in ("up", "said"))
        set_ = ", ".join(f"{what} {count}" for what, count in limits.items() if count) or "none"
        return Group(
            Text(f"{agreed['site']} in {agreed['experiment']}", style="bold"),
            Text(f"agreed to {agreed['plan']} ({agreed['fingerprint']}), model {agreed['model']}"),
            Text(f"limits: {set_}"),
            self._table(),
            Text(
                f"{up + said} bytes have left: {up} of the model's parts, {said} of headers and "
                f"words. What no column names has not left."
            ),
        )

    def _table(self) -> Table:
        parts = list(by_part(self.lines))
        table = Table(box=None, pad_edge=False)
        for name in ("round", "answer", *parts, "words", "down"):
            table.add_column(name, justify="left" if name == "answer" else "right")
        for line in self.lines:
            number = str(line["round"]) if line["round"] else ""
            answer = f"{line['answer']}{' again' if line['again'] and number else ''}"
            sent = (str(line["parts"].get(part, "")) for part in parts)
            table.add_row(number, answer, *sent, str(line["said"]), str(line["down"]))
        totals = by_part(self.lines)
        said = str(sum(line["said"] for line in self.lines))
        down = str(sum(line["down"] for line in self.lines))
        table.add_section()
        table.add_row("", "all", *(str(totals[part]) for part in parts), said, down, style="bold")
        return table


@dataclass(frozen=True)
class Balance:
    """What a site has let out of one dataset, over all studies."""

    folder: Path

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        lines = read_answers(self.folder)
        kinds = {"turns": "update", "polls": "scores"}
        distinct = {n: {x["content"] for x in lines if x["answer"] == k} for n, k in kinds.items()}
        spent = Budget(self.folder / CHARGES, delta=DELTA, unit="example")
        return {
            "account": self.folder.name,
            **{name: len(found) for name, found in distinct.items()},
            "bytes": sum(line["bytes"] for line in lines),
            "epsilon": spent.spent() if all(line["hidden"] for line in lines) else None,
            "delta": DELTA,
            "charges": len(spent.charges),
        }

    @property
    def width(self) -> int:
        """The columns of a terminal that it takes."""
        return 80

    def __rich__(self) -> RenderableType:
        said = self.json()
        hidden = (
            f"epsilon {said['epsilon']:.4f} at delta {DELTA:g}, {said['charges']} charges"
            if said["epsilon"] is not None
            else "some of it hidden by no noise"
        )
        return Text(
            f"Of {said['account']}, in all studies: {said['turns']} turns, {said['polls']} polls, "
            f"{said['bytes']} bytes of values; {hidden}."
        )


def told_of(folder: Path) -> list[SiteRecord | Balance]:
    """The record of each experiment under a folder, and each account of all of them."""
    found: list[SiteRecord | Balance] = [_record(each) for each in records_in(folder)]
    found += [Balance(file.parent) for file in sorted(folder.glob(f"account/*/{ANSWERS}"))]
    if not found:
        raise FedplanError(f"{folder} is no site's home: nothing in it says what has left")
    return found


AGREED: dict[str, type] = dict.fromkeys(("site", "experiment", "plan", "fingerprint", "model"), str)
COUNTS: dict[str, type] = dict.fromkeys(("round", "up", "said", "down"), int)
SENT = {"answer": str, "again": bool, **COUNTS}


def _record(folder: Path) -> SiteRecord:
    """The record of one experiment, if each of its files holds what a site writes there."""
    agreed, lines = read_agreement(folder), read_egress(folder)
    sound = _fits(agreed, AGREED) and _counts(agreed.get("limits"), float)
    if not sound:
        raise FedplanError(f"{folder} does not hold what a site agreed to: its file was changed")
    for number, line in enumerate(lines, 1):
        if not _fits(line, SENT) or not _counts(line.get("parts"), int):
            raise FedplanError(f"line {number} of the record in {folder} was changed: {line!s:.60}")
    return SiteRecord(folder, agreed, lines)


def _fits(said: Any, kinds: Mapping[str, type]) -> bool:
    return type(said) is dict and all(type(said.get(name)) is kind for name, kind in kinds.items())


def _counts(said: Any, most: type) -> bool:
    if type(said) is not dict:
        return False
    return all(type(each) in (int, most) for each in cast("dict[str, object]", said).values())
