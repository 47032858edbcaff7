# SPDX-License-Identifier: Apache-2.0
"""Egress: what a site's own record says, as a person reads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.federation.account import ANSWERS, DELTA, read_answers
from fedplan.federation.egress import (
    AGREEMENT,
    SCORES,
    UNMASKING,
    UPDATE,
    agreements_in,
    by_part,
    read_agreement,
    read_egress,
)
from fedplan.privacy.accounting.budget import Budget, unit_in
from fedplan.privacy.guard import CHARGES
from fedplan.storage.chain import BrokenChain


@dataclass(frozen=True)
class SiteRecord:
    """What one site agreed to in one run of a study, and all that has left it there.

    Where it has agreed to nothing, all that left are refusals.
    """

    study: str
    run: str
    agreed: dict[str, Any]
    lines: list[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        told = {"study": self.study, "run": self.run, "agreed": self.agreed}
        return {**told, "lines": self.lines, "parts": by_part(self.lines)}

    @property
    def width(self) -> int:
        """The columns of a terminal that its table takes."""
        return 62 + 11 * len(by_part(self.lines))

    def __rich__(self) -> RenderableType:
        up, said = (_sum(self.lines, what) for what in ("up", "said"))
        return Group(
            *self._heading(),
            self._table(),
            Text(
                f"{up + said} bytes have left: {up} of the model's parts, {said} of headers and "
                f"words. What no column names has not left."
            ),
            *self._masked(),
        )

    def _masked(self) -> list[Text]:
        """What left under masks, and whose sums this site has helped to open."""
        opened = {x["round"]: x["among"] for x in self.lines if x["kind"] == UNMASKING}
        masked = [x["round"] for x in self.lines if x["kind"] == UPDATE and x.get("among")]
        if not masked:
            return []
        crowds = dict[str, list[int]]()
        for number, sites in sorted(opened.items()):
            crowds.setdefault(", ".join(sites), []).append(number)
        told = "; ".join(f"rounds {_stretch(n)}: {sites}" for sites, n in crowds.items())
        left = sorted(set(masked) - opened.keys())
        closed = f" Not opened by this site: rounds {_stretch(left)}." if left else ""
        return [
            Text(
                "The parts left under masks: of their values the server learns sums alone. This "
                f"site has helped to open the sums of {told or 'nobody'}.{closed}"
            )
        ]

    def _heading(self) -> list[Text]:
        study = f"study {self.study[:12]}" if self.study else "no study"
        of = Text(f"{study}, run {self.run or 'of no id'}; {self._words()}")
        agreed = self.agreed
        if not agreed:
            return [Text("nothing was agreed to", style="bold"), of]
        return [
            Text(f"{agreed['site']} in {agreed['experiment']}", style="bold"),
            of,
            Text(f"agreed to {agreed['plan']} ({agreed['fingerprint']}), model {agreed['model']}"),
            Text(f"limits: {limits_said(agreed)}"),
        ]

    def _words(self) -> str:
        """By whose word it left, and to which server."""
        approvers = sorted({line["approver"] for line in self.lines if line["approver"]})
        servers = sorted({line["server"][:12] for line in self.lines if line["server"]})
        by = f"approved by {', '.join(approvers)}" if approvers else "approved by nobody"
        return f"{by}; server {', '.join(servers)}" if servers else by

    def _table(self) -> Table:
        parts, again = list(by_part(self.lines)), _again(self.lines)
        table = Table(box=None, pad_edge=False)
        for name in ("time", "round", "answer", *parts, "words", "down"):
            table.add_column(name, justify="left" if name in ("time", "answer") else "right")
        for line, repeated in zip(self.lines, again, strict=True):
            number = str(line["round"]) if line["round"] else ""
            answer = f"{line['kind']}{' again' if repeated and number else ''} {line['code']}"
            answer += f" ({line['times']} times)" if line["times"] > 1 else ""
            sent = (str(line["parts"].get(part, "")) for part in parts)
            told = (str(line["said"]), str(line["down"]))
            table.add_row(line["time"][:19], number, answer.strip(), *sent, *told)
        totals = by_part(self.lines)
        counts = (str(_sum(self.lines, what)) for what in ("said", "down"))
        table.add_section()
        sums = (str(totals[part]) for part in parts)
        table.add_row("", "", "all", *sums, *counts, style="bold")
        return table


@dataclass(frozen=True)
class Balance:
    """What a site has let out of one dataset, over all studies."""

    folder: Path

    @cached_property
    def lines(self) -> list[dict[str, Any]]:
        """Its lines, each of them what a site writes."""
        found = read_answers(self.folder)
        for number, line in enumerate(found, 1):
            if not _fits(line, ANSWERED):
                raise BrokenChain(f"line {number} of {self.folder / ANSWERS} was changed")
        return found

    @property
    def answered(self) -> dict[str, bool]:
        """The updates that were answered from it by their requests, and whether noise hides each.

        A poll may have been answered under the same request: it is no update.
        """
        return {x["request"]: x["hidden"] for x in self.lines if x["answer"] == UPDATE}

    @cached_property
    def charged(self) -> set[str]:
        """The requests whose noise was charged."""
        return {each.about for each in self._spent.charges}

    @property
    def _spent(self) -> Budget:
        file = self.folder / CHARGES
        return Budget(file, delta=DELTA, unit=unit_in(file))

    def json(self) -> dict[str, Any]:
        """It as plain values."""
        lines = self.lines
        kinds = {"turns": UPDATE, "polls": SCORES}
        distinct = {n: {x["content"] for x in lines if x["answer"] == k} for n, k in kinds.items()}
        spent = self._spent
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


def told_of(home: Path) -> list[SiteRecord | Balance]:
    """What left a home by study and run, from a chain that is proved, and each of its accounts."""
    found: list[SiteRecord | Balance] = list(_records(home))
    return found + [Balance(file.parent) for file in sorted(home.glob(f"account/*/{ANSWERS}"))]


AGREED: dict[str, type] = dict.fromkeys(("site", "experiment", "plan", "fingerprint", "model"), str)
ANSWERED: dict[str, type] = {
    **dict.fromkeys(("request", "answer", "content"), str),
    "bytes": int,
    "hidden": bool,
}
COUNTS: dict[str, type] = dict.fromkeys(("round", "up", "said", "down", "times"), int)
WORDS: dict[str, type] = dict.fromkeys(
    ("kind", "time", "request", "run", "study", "experiment", "code", "server", "approver"), str
)


def _records(home: Path) -> Iterator[SiteRecord]:
    groups = dict[tuple[str, str], list[dict[str, Any]]]()
    for number, line in enumerate(read_egress(home), 1):
        if not _fits(line, WORDS | COUNTS) or not _counts(line.get("parts"), int):
            raise BrokenChain(f"line {number} of the record in {home} was changed: {line!s:.60}")
        groups.setdefault((line["study"], line["run"]), []).append(line)
    agreed = _agreements(home)
    for (study, run), lines in groups.items():
        experiments = [line["experiment"] for line in lines if line["experiment"]]
        held = agreed.get((experiments[0], run), {}) if experiments else {}
        if not held and any(not line["code"] for line in lines):
            raise FedplanError(
                f"{home} does not say what it agreed to in the run {run or 'of no id'}: put a copy "
                f"of its {AGREEMENT} back"
            )
        yield SiteRecord(study, run, held, lines)


def _agreements(home: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """What a home's runs agreed to, by experiment and run; each file holds what a site writes."""
    found = dict[tuple[str, str], dict[str, Any]]()
    for folder in agreements_in(home):
        agreed = read_agreement(folder)
        if not (_fits(agreed, AGREED) and _counts(agreed.get("limits"), float)):
            raise BrokenChain(f"{folder} does not hold what a site agreed to: its file was changed")
        found[agreed["experiment"], str(agreed.get("run", ""))] = agreed
    return found


def _stretch(numbers: list[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))


def limits_said(agreed: Mapping[str, Any]) -> str:
    """A site's own limits in words."""
    said = agreed["limits"]
    left = "" if said.get("epsilon") else "delta"  # a delta is of an epsilon
    return ", ".join(f"{w} {count:g}" for w, count in said.items() if count and w != left) or "none"


def _sum(lines: list[dict[str, Any]], what: str) -> int:
    return sum(line["times"] * line[what] for line in lines)


def _again(lines: list[dict[str, Any]]) -> list[bool]:
    """Of each line whether the same answer to the same request has left before it."""
    seen, found = set[tuple[str, str]](), list[bool]()
    for line in lines:
        asked = line["request"], line["kind"]
        found.append(asked in seen)
        seen.add(asked)
    return found


def _fits(said: Any, kinds: Mapping[str, type]) -> bool:
    return type(said) is dict and all(type(said.get(name)) is kind for name, kind in kinds.items())


def _counts(said: Any, most: type) -> bool:
    if type(said) is not dict:
        return False
    return all(type(each) in (int, most) for each in cast("dict[str, object]", said).values())
