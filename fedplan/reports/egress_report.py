# SPDX-License-Identifier: Apache-2.0
"""The egress report of a site: every message that left it, by run, and each dataset's account."""

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
from fedplan.federation.egress_log import (
    AGREEMENT,
    SCORES,
    UNMASKING,
    UPDATE,
    agreement_folders,
    bytes_by_part,
    read_agreement,
    read_egress,
)
from fedplan.privacy.accounting.budget import Budget, read_budget_unit
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.storage.chain import BrokenChain


@dataclass(frozen=True)
class SiteRecord:
    """The messages that left a site in one run of a study, and the agreement that it accepted.

    `agreement` is empty if the site accepted none: then all messages are refusals. `entries` are
    the lines of the site's egress record.
    """

    study: str
    run: str
    agreement: dict[str, Any]
    entries: list[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        """Return the record as plain values, with the bytes of each part."""
        about = {"study": self.study, "run": self.run, "agreed": self.agreement}
        return {**about, "lines": self.entries, "parts": bytes_by_part(self.entries)}

    @property
    def width(self) -> int:
        """The width of the table in characters of a terminal."""
        return 62 + 11 * len(bytes_by_part(self.entries))

    def __rich__(self) -> RenderableType:
        parts, headers = _sum(self.entries, "up"), _sum(self.entries, "other_bytes")
        return Group(
            *self._heading(),
            self._table(),
            Text(
                f"{parts + headers} bytes left this site: {parts} bytes of model parts and "
                f"{headers} bytes of headers. Parts without a column were not uploaded."
            ),
            *self._masking_note(),
        )

    def _masking_note(self) -> list[Text]:
        """Return the rounds whose sums this site helped to unmask; empty without masked uploads."""
        unmasked = {x["round"]: x["among"] for x in self.entries if x["kind"] == UNMASKING}
        masked = [x["round"] for x in self.entries if x["kind"] == UPDATE and x.get("among")]
        if not masked:
            return []
        rounds_by_sites = dict[str, list[int]]()
        for number, sites in sorted(unmasked.items()):
            rounds_by_sites.setdefault(", ".join(sites), []).append(number)
        sums = "; ".join(f"rounds {_round_range(n)}: {s}" for s, n in rounds_by_sites.items())
        others = sorted(set(masked) - unmasked.keys())
        rest = f" Not unmasked by this site: rounds {_round_range(others)}." if others else ""
        return [
            Text(
                "Secure aggregation: uploads were masked, so the server sees only their sums. "
                f"Sums that this site helped to unmask: {sums or 'none'}.{rest}"
            )
        ]

    def _heading(self) -> list[Text]:
        """Return the site, study, run, approvals, plan and limits, a line each."""
        study = f"study {self.study[:12]}" if self.study else "no study"
        about = Text(f"{study}, run {self.run or 'without id'}; {self._approvals()}")
        agreement = self.agreement
        if not agreement:
            return [Text("no study was accepted", style="bold"), about]
        plan, fingerprint = agreement["plan"], agreement["fingerprint"]
        return [
            Text(f"{agreement['site']} in {agreement['experiment']}", style="bold"),
            about,
            Text(f"accepted plan {plan} ({fingerprint}), model {agreement['model']}"),
            Text(f"limits of this site: {format_limits(agreement)}"),
        ]

    def _approvals(self) -> str:
        """Return the approvers of the messages, and the digests of the servers' keys."""
        approvers = sorted({line["approver"] for line in self.entries if line["approver"]})
        servers = sorted({line["server"][:12] for line in self.entries if line["server"]})
        by = f"approved by {', '.join(approvers)}" if approvers else "not approved"
        return f"{by}; server {', '.join(servers)}" if servers else by

    def _table(self) -> Table:
        """Return a table with a row per message: bytes of each part, headers and download."""
        totals, resent = bytes_by_part(self.entries), _resent(self.entries)
        table = Table(box=None, pad_edge=False)
        for name in ("time", "round", "message", *totals, "headers", "download"):
            table.add_column(name, justify="left" if name in ("time", "message") else "right")
        for line, repeated in zip(self.entries, resent, strict=True):
            number = str(line["round"]) if line["round"] else ""
            message = f"{line['kind']}{' again' if repeated and number else ''} {line['code']}"
            message += f" ({line['times']} times)" if line["times"] > 1 else ""
            sizes = (str(line["parts"].get(part, "")) for part in totals)
            other = (str(line["other_bytes"]), str(line["down"]))
            table.add_row(line["time"][:19], number, message.strip(), *sizes, *other)
        table.add_section()
        other = (str(_sum(self.entries, field)) for field in ("other_bytes", "down"))
        table.add_row("", "", "total", *map(str, totals.values()), *other, style="bold")
        return table


@dataclass(frozen=True)
class DatasetAccount:
    """The account of one dataset of a site over all studies: answers, bytes and spent epsilon."""

    folder: Path

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """The account's lines; raises BrokenChain if a line has other fields than a site writes."""
        answers = read_answers(self.folder)
        for number, line in enumerate(answers, 1):
            if not _has_fields(line, ANSWER_FIELDS):
                raise BrokenChain(f"line {number} of {self.folder / ANSWERS} was changed")
        return answers

    @property
    def updates_noised(self) -> dict[str, bool]:
        """Whether noise was added to each update, by the id of its request."""
        return {x["request"]: x["hidden"] for x in self.entries if x["answer"] == UPDATE}

    @cached_property
    def charged_requests(self) -> set[str]:
        """The ids of requests whose noise was charged to the privacy budget."""
        return {charge.name for charge in self._budget.charges}

    @property
    def _budget(self) -> Budget:
        """The privacy budget with the charges on disk."""
        file = self.folder / CHARGES_FILE
        return Budget(file, delta=DELTA, unit=read_budget_unit(file))

    def json(self) -> dict[str, Any]:
        """Return the account as plain values; epsilon is None if some answer has no noise."""
        lines = self.entries
        kinds = {"turns": UPDATE, "polls": SCORES}
        distinct = {n: {x["content"] for x in lines if x["answer"] == k} for n, k in kinds.items()}
        budget = self._budget
        return {
            "account": self.folder.name,
            **{name: len(contents) for name, contents in distinct.items()},
            "bytes": sum(line["bytes"] for line in lines),
            "epsilon": budget.epsilon_spent() if all(line["hidden"] for line in lines) else None,
            "delta": DELTA,
            "charges": len(budget.charges),
        }

    @property
    def width(self) -> int:
        """The width of the text in characters of a terminal."""
        return 80

    def __rich__(self) -> RenderableType:
        account = self.json()
        privacy = (
            f"epsilon {account['epsilon']:.4f} at delta {DELTA:g}, {account['charges']} charges"
            if account["epsilon"] is not None
            else "not all of it protected by noise"
        )
        return Text(
            f"Dataset {account['account']}, all studies: {account['turns']} updates, "
            f"{account['polls']} layer polls, {account['bytes']} bytes of values; {privacy}."
        )


def read_egress_report(state_folder: Path) -> list[SiteRecord | DatasetAccount]:
    """Return the records of a site's state folder by study and run, then its datasets' accounts.

    Raises BrokenChain if the hash chain of the record is broken or a line was changed, and
    FedplanError if the agreement of a run is missing.
    """
    accounts = sorted(state_folder.glob(f"account/*/{ANSWERS}"))
    return [*_records(state_folder), *(DatasetAccount(file.parent) for file in accounts)]


AGREEMENT_FIELDS: dict[str, type] = dict.fromkeys(
    ("site", "experiment", "plan", "fingerprint", "model"), str
)
ANSWER_FIELDS: dict[str, type] = {
    **dict.fromkeys(("request", "answer", "content"), str),
    "bytes": int,
    "hidden": bool,
}
COUNT_FIELDS: dict[str, type] = dict.fromkeys(("round", "up", "other_bytes", "down", "times"), int)
TEXT_FIELDS: dict[str, type] = dict.fromkeys(
    ("kind", "time", "request", "run", "study", "experiment", "code", "server", "approver"), str
)


def _records(state_folder: Path) -> Iterator[SiteRecord]:
    """Yield the egress record of a site by study and run; raises as `read_egress_report`."""
    groups = dict[tuple[str, str], list[dict[str, Any]]]()
    for number, line in enumerate(read_egress(state_folder), 1):
        if not _has_fields(line, TEXT_FIELDS | COUNT_FIELDS) or not _has_numbers(
            line.get("parts"), int
        ):
            raise BrokenChain(
                f"line {number} of the egress record in {state_folder} was changed: {line!s:.60}"
            )
        groups.setdefault((line["study"], line["run"]), []).append(line)
    agreements = _agreements(state_folder)
    for (study, run), lines in groups.items():
        experiments = [line["experiment"] for line in lines if line["experiment"]]
        agreement = agreements.get((experiments[0], run), {}) if experiments else {}
        if not agreement and any(not line["code"] for line in lines):
            raise FedplanError(
                f"{state_folder} has no agreement of the run {run or 'without id'}: restore its "
                f"{AGREEMENT} from a copy"
            )
        yield SiteRecord(study, run, agreement, lines)


def _agreements(state_folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the agreements in a site's state folder by experiment and run id.

    Raises BrokenChain if a file has other fields than a site writes.
    """
    agreements = dict[tuple[str, str], dict[str, Any]]()
    for folder in agreement_folders(state_folder):
        agreement = read_agreement(folder)
        if not (
            _has_fields(agreement, AGREEMENT_FIELDS)
            and _has_numbers(agreement.get("limits"), float)
        ):
            raise BrokenChain(f"{folder}: the file of the agreement was changed")
        agreements[agreement["experiment"], str(agreement.get("run", ""))] = agreement
    return agreements


def _round_range(numbers: list[int]) -> str:
    """Return sorted rounds in short: `3`, `3, 4`, or first to last of more than two."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))


def format_limits(agreement: Mapping[str, Any]) -> str:
    """Return a site's own limits as `name value, ...`, or "none"; a limit of 0 is no limit."""
    limits = agreement["limits"]
    omitted = "" if limits.get("epsilon") else "delta"  # a delta alone limits nothing
    texts = [f"{name} {limit:g}" for name, limit in limits.items() if limit and name != omitted]
    return ", ".join(texts) or "none"


def _sum(lines: list[dict[str, Any]], field: str) -> int:
    """Return the sum of a field over lines, each counted as often as its message was sent."""
    return sum(line["times"] * line[field] for line in lines)


def _resent(lines: list[dict[str, Any]]) -> list[bool]:
    """Return for each line whether an earlier line has the same kind of answer to its request."""
    earlier, resent = set[tuple[str, str]](), list[bool]()
    for line in lines:
        key = line["request"], line["kind"]
        resent.append(key in earlier)
        earlier.add(key)
    return resent


def _has_fields(value: Any, types: Mapping[str, type]) -> bool:
    """Whether a value is a dict that has all these fields with exactly these types."""
    return type(value) is dict and all(type(value.get(name)) is t for name, t in types.items())


def _has_numbers(value: Any, number: type) -> bool:
    """Whether a value is a dict whose values are all of type int or `number`."""
    if type(value) is not dict:
        return False
    return all(type(each) in (int, number) for each in cast("dict[str, object]", value).values())
