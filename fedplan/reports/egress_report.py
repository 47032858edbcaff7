# SPDX-License-Identifier: Apache-2.0
"""The egress report of a site: all messages that left it, by run, and each dataset's account."""

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
from fedplan.federation.ledger.egress import (
    AGREEMENT,
    DELTA,
    REPLIES,
    SCORES,
    UNMASKING,
    UPDATE,
    agreement_folders,
    bytes_by_part,
    read_agreement,
    read_egress,
    read_replies,
)
from fedplan.privacy.accounting.budget import Budget, read_budget_unit
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.storage.append_log import DamagedLog


@dataclass(frozen=True)
class SiteRecord:
    """The messages that left a site in one run of a study; print with rich, or call `json`.

    `study` is the study's digest, `run` the run's id; each may be "". `agreement` (the settings
    that the site accepted before round 1) is empty if the site accepted none; then all messages are
    refusals. `entries` are the lines of the site's egress log, one per message; equal refusals
    share a line with a "count".
    """

    study: str
    run: str
    agreement: dict[str, Any]
    entries: list[dict[str, Any]]

    def json(self) -> dict[str, Any]:
        """Return the record as plain values, with the bytes of each part."""
        about = {"study": self.study, "run": self.run, "agreement": self.agreement}
        return {**about, "entries": self.entries, "parts": bytes_by_part(self.entries)}

    @property
    def width(self) -> int:
        """The width of the table in characters of a terminal."""
        return 62 + 11 * len(bytes_by_part(self.entries))

    def __rich__(self) -> RenderableType:
        agreement, parts, headers = (
            self.agreement,
            self._sum("upload_bytes"),
            self._sum("other_bytes"),
        )
        approvers = sorted({line["approver"] for line in self.entries if line["approver"]})
        servers = sorted({line["server"][:12] for line in self.entries if line["server"]})
        approvals = f"approved by {', '.join(approvers)}" if approvers else "not approved"
        approvals += f"; server {', '.join(servers)}" if servers else ""
        study = f"study {self.study[:12]}" if self.study else "no study"
        heading, lines = (
            "no study was accepted",
            [f"{study}, run {self.run or 'without id'}; {approvals}"],
        )
        if agreement:
            heading = f"{agreement['site']} in {agreement['experiment']}"
            plan, fingerprint = agreement["plan"], agreement["fingerprint"]
            lines.append(f"accepted plan {plan} ({fingerprint}), model {agreement['model']}")
            lines.append(f"limits of this site: {format_limits(agreement)}")
        return Group(
            Text(heading, style="bold"),
            *map(Text, lines),
            self._table(),
            Text(
                f"{parts + headers} bytes left this site: {parts} bytes of model parts and "
                f"{headers} bytes of headers. Parts without a column were not uploaded."
            ),
            *map(Text, self._masking_note()),
        )

    def _sum(self, field: str) -> int:
        """Return the sum of a field over entries, each counted as often as its message was sent."""
        return sum(line["count"] * line[field] for line in self.entries)

    def _masking_note(self) -> Iterator[str]:
        """Yield a sentence on the rounds whose masked sums this site helped to unmask.

        Yields nothing if the site sent no masked update.
        """
        unmasked = {x["round"]: x["clients"] for x in self.entries if x["kind"] == UNMASKING}
        masked = {x["round"] for x in self.entries if x["kind"] == UPDATE and x.get("clients")}
        rounds_by_sites = dict[str, list[int]]()
        for number, sites in sorted(unmasked.items()):
            rounds_by_sites.setdefault(", ".join(sites), []).append(number)
        sums = "; ".join(f"rounds {_round_range(n)}: {s}" for s, n in rounds_by_sites.items())
        others = sorted(masked - unmasked.keys())
        rest = f" Not unmasked by this site: rounds {_round_range(others)}." if others else ""
        if masked:
            yield (
                "Secure aggregation: uploads were masked, so the server sees only their sums. "
                f"Sums that this site helped to unmask: {sums or 'none'}.{rest}"
            )

    def _table(self) -> Table:
        """Return a table with a row per entry, and a row of sums.

        Columns: time, round, message, uploaded bytes of each part of the model, other uploaded
        bytes ("headers"), bytes of the request ("download"). A second reply of the same kind to the
        same request is marked "again".
        """
        totals, earlier = bytes_by_part(self.entries), set[tuple[str, str]]()
        table = Table(box=None, pad_edge=False)
        for name in ("time", "round", "message", *totals, "headers", "download"):
            table.add_column(name, justify="left" if name in ("time", "message") else "right")
        for line in self.entries:
            number = str(line["round"]) if line["round"] else ""
            repeated = (line["request"], line["kind"]) in earlier
            earlier.add((line["request"], line["kind"]))
            message = f"{line['kind']}{' again' if repeated and number else ''} {line['code']}"
            message += f" ({line['count']} times)" if line["count"] > 1 else ""
            sizes = (str(line["parts"].get(part, "")) for part in totals)
            other = (str(line["other_bytes"]), str(line["download_bytes"]))
            table.add_row(line["time"][:19], number, message.strip(), *sizes, *other)
        table.add_section()
        other = (str(self._sum(field)) for field in ("other_bytes", "download_bytes"))
        table.add_row("", "", "total", *map(str, totals.values()), *other, style="bold")
        return table


@dataclass(frozen=True)
class DatasetAccount:
    """The account of one dataset of a site over all studies: replies, bytes and spent epsilon.

    `folder` is the dataset's folder below `account` in the site's state folder; nothing is written
    there. Print with rich, or call `json`.
    """

    folder: Path

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """The lines of the account, one per reply of the site that used the dataset.

        Raises DamagedLog if the hash chain is broken or a line has other fields than a site
        writes.
        """
        replies = read_replies(self.folder)
        for number, line in enumerate(replies, 1):
            if not _has_fields(line, REPLY_FIELDS):
                raise DamagedLog(f"line {number} of {self.folder / REPLIES} was changed")
        return replies

    @property
    def updates_noised(self) -> dict[str, bool]:
        """Whether noise was added to each update, by the id of its request."""
        return {x["request"]: x["protected"] for x in self.entries if x["kind"] == UPDATE}

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
        """Return the account as JSON values; "epsilon_spent" is None if some reply has no noise.

        "updates" and "layer_scores" are numbers of replies with different content.
        """
        lines = self.entries
        kinds = {"updates": UPDATE, "layer_scores": SCORES}
        distinct = {n: {x["content"] for x in lines if x["kind"] == k} for n, k in kinds.items()}
        budget = self._budget
        return {
            "dataset": self.folder.name,
            **{name: len(contents) for name, contents in distinct.items()},
            "bytes": sum(line["bytes"] for line in lines),
            "epsilon_spent": budget.epsilon_spent()
            if all(line["protected"] for line in lines)
            else None,
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
            f"epsilon {account['epsilon_spent']:.4f} at delta {DELTA:g}, "
            f"{account['charges']} charges"
            if account["epsilon_spent"] is not None
            else "not all of it protected by noise"
        )
        return Text(
            f"Dataset {account['dataset']}, all studies: {account['updates']} updates, "
            f"{account['layer_scores']} sets of layer scores, {account['bytes']} bytes of "
            f"values; {privacy}."
        )


def read_egress_report(state_folder: Path) -> list[SiteRecord | DatasetAccount]:
    """Read a site's state folder: the SiteRecord of each run, then each dataset's DatasetAccount.

    Raises DamagedLog if the hash chain of the egress log is broken or a line or an agreement was
    changed, and FedplanError if the agreement of a run is missing.
    """
    groups = dict[tuple[str, str], list[dict[str, Any]]]()
    for number, line in enumerate(read_egress(state_folder), 1):
        if not _has_fields(line, ENTRY_FIELDS) or not _has_numbers(line.get("parts"), int):
            raise DamagedLog(
                f"line {number} of the egress record in {state_folder} was changed: {line!s:.60}"
            )
        groups.setdefault((line["study"], line["run"]), []).append(line)
    agreements = dict[tuple[str, str], dict[str, Any]]()
    for folder in agreement_folders(state_folder):
        agreement, fields = read_agreement(folder), AGREEMENT_FIELDS
        if not (_has_fields(agreement, fields) and _has_numbers(agreement.get("limits"), float)):
            raise DamagedLog(f"{folder}: the file of the agreement was changed")
        agreements[agreement["experiment"], str(agreement.get("run", ""))] = agreement
    report = list[SiteRecord | DatasetAccount]()
    for (study, run), lines in groups.items():
        experiments = [line["experiment"] for line in lines if line["experiment"]]
        agreement = agreements.get((experiments[0], run), {}) if experiments else {}
        if not agreement and any(not line["code"] for line in lines):
            raise FedplanError(
                f"{state_folder} has no agreement of the run {run or 'without id'}: restore its "
                f"{AGREEMENT} from a copy"
            )
        report.append(SiteRecord(study, run, agreement, lines))
    accounts = sorted(state_folder.glob(f"account/*/{REPLIES}"))
    return [*report, *(DatasetAccount(file.parent) for file in accounts)]


AGREEMENT_FIELDS: dict[str, type] = dict.fromkeys(
    ("site", "experiment", "plan", "fingerprint", "model"), str
)
REPLY_FIELDS: dict[str, type] = {
    **dict.fromkeys(("request", "kind", "content"), str),
    **{"bytes": int, "protected": bool},
}
ENTRY_FIELDS: dict[str, type] = {
    **dict.fromkeys(("kind", "time", "request", "run", "study", "experiment"), str),
    **dict.fromkeys(("code", "server", "approver"), str),
    **dict.fromkeys(("round", "upload_bytes", "other_bytes", "download_bytes", "count"), int),
}
"""The types of the fields in agreements, in a dataset's account and in the egress log."""


def _round_range(numbers: list[int]) -> str:
    """Return sorted rounds in short: `3`, `3, 4`, or first to last of more than two."""
    return f"{numbers[0]} to {numbers[-1]}" if len(numbers) > 2 else ", ".join(map(str, numbers))


def format_limits(agreement: Mapping[str, Any]) -> str:
    """Return the limits of a site in an agreement as `name value, ...`; "none" if all are 0."""
    limits = agreement["limits"]
    omitted = "" if limits.get("epsilon") else "delta"  # a delta alone limits nothing
    texts = [f"{name} {limit:g}" for name, limit in limits.items() if limit and name != omitted]
    return ", ".join(texts) or "none"


def _has_fields(value: Any, types: Mapping[str, type]) -> bool:
    """Whether a value is a dict that has all these fields with exactly these types."""
    return type(value) is dict and all(type(value.get(name)) is t for name, t in types.items())


def _has_numbers(value: Any, number: type) -> bool:
    """Whether a value is a dict whose values are all of type int or `number`."""
    if type(value) is not dict:
        return False
    return all(type(each) in (int, number) for each in cast("dict[str, object]", value).values())
