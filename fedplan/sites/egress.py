# SPDX-License-Identifier: Apache-2.0
"""All messages that left a site, by run; each dataset's account; and an audit of both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement
from fedplan.federation.ledger.egress import (
    AGREEMENT,
    DELTA,
    EGRESS_LOG,
    REPLIES,
    SCORES,
    STATISTICS,
    UNMASKING,
    UPDATE,
    agreement_folders,
    bytes_by_part,
    read_agreement,
    read_egress,
    read_replies,
    unaccounted_answers,
)
from fedplan.language.plan import Role
from fedplan.language.resolution import params_with_roles
from fedplan.naming import allow_imports
from fedplan.privacy.accounting.budget import Budget, read_budget_unit
from fedplan.privacy.guard import CHARGES_FILE
from fedplan.sites.approvals import (
    APPROVALS_FILE,
    APPROVED,
    REFUSED,
    STARTED,
    WITHDRAWN,
    signed_statement,
)
from fedplan.sites.inbox import Inbox
from fedplan.sites.signatures import is_signed
from fedplan.storage.append_log import AppendLog, DamagedLog, head_file
from fedplan.studies.run import read_run_agreement, read_run_study


@dataclass(frozen=True)
class SiteRecord:
    """The messages that left a site in one run of a study; print with rich, or call `json`.

    `agreement` is empty if the site accepted none: all messages are refusals. `entries` are the
    lines of the egress log; equal refusals share a line with a "count".
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
        parts, headers = self._sum("upload_bytes"), self._sum("other_bytes")
        approvers = sorted({line["approver"] for line in self.entries if line["approver"]})
        servers = sorted({line["server"][:12] for line in self.entries if line["server"]})
        approvals = f"approved by {', '.join(approvers)}" if approvers else "not approved"
        approvals += f"; server {', '.join(servers)}" if servers else ""
        study = f"study {self.study[:12]}" if self.study else "no study"
        counts = any(line["kind"] == STATISTICS for line in self.entries)
        heading = "statistics, before training" if counts else "no study was accepted"
        lines = [f"{study}, run {self.run or 'without id'}; {approvals}"]
        if agreement := self.agreement:
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
        return sum(line["count"] * line[field] for line in self.entries)

    def _masking_note(self) -> Iterator[str]:
        """Yield a sentence on the rounds whose masked sums this site helped to unmask."""
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
    """The account of one dataset of a site over all studies; print with rich, or call `json`."""

    folder: Path

    @cached_property
    def entries(self) -> list[dict[str, Any]]:
        """The lines of the account, one per reply; DamagedLog if one was changed."""
        replies = read_replies(self.folder)
        for number, line in enumerate(replies, 1):
            if not _has_fields(line, REPLY_FIELDS):
                raise DamagedLog(f"line {number} of {self.folder / REPLIES} was changed")
        return replies

    def json(self) -> dict[str, Any]:
        """Return the account as JSON values; "epsilon_spent" is None if some reply has no noise."""
        lines, file = self.entries, self.folder / CHARGES_FILE
        budget = Budget(file, delta=DELTA, unit=read_budget_unit(file))
        protected = all(line["protected"] for line in lines)
        return {
            "dataset": self.folder.name,
            "updates": len({x["content"] for x in lines if x["kind"] == UPDATE}),
            "layer_scores": len({x["content"] for x in lines if x["kind"] == SCORES}),
            "statistics": len({x["content"] for x in lines if x["kind"] == STATISTICS}),
            "bytes": sum(line["bytes"] for line in lines),
            "epsilon_spent": budget.epsilon_spent() if protected else None,
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
            f"{account['layer_scores']} sets of layer scores, {account['statistics']} sets of "
            f"counts, {account['bytes']} bytes of values; {privacy}."
        )


def read_egress_report(state_folder: Path) -> list[SiteRecord | DatasetAccount]:
    """Read all runs and datasets of a site; DamagedLog or FedplanError if a file is not intact."""
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
        if not agreement and any(not line["code"] and line["kind"] != STATISTICS for line in lines):
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
    return type(value) is dict and all(type(value.get(name)) is t for name, t in types.items())


def _has_numbers(value: Any, number: type) -> bool:
    if type(value) is not dict:
        return False
    return all(type(each) in (int, number) for each in cast("dict[str, object]", value).values())


DECISION_FIELDS = ("decision", "time", "study", "name", "approver", "run")
"""Text fields that every entry of the approvals file has."""


@dataclass(frozen=True)
class RunEgress:
    """All answers that left a site in one run, and an audit of the answers by the site's records.

    `decisions` are those about the run's study, `folder` the run's, None if deleted, and
    `approved_studies` the digests of all studies ever approved.
    """

    record: SiteRecord
    decisions: tuple[dict[str, Any], ...]
    state_folder: Path
    folder: Path | None
    accounts: tuple[DatasetAccount, ...] = ()
    approved_studies: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """The study's name, or "no study" if the site agreed to none, and sent it no counts."""
        named = (entry["name"] for entry in self.decisions if self.statistics)
        return str(self.record.agreement.get("experiment") or next(named, "no study"))

    @cached_property
    def updates(self) -> list[dict[str, Any]]:
        """The log entries of updates: answers with values of the model."""
        return [entry for entry in self.record.entries if entry["kind"] == UPDATE]

    @cached_property
    def statistics(self) -> list[dict[str, Any]]:
        """The log entries of counts of columns."""
        return [entry for entry in self.record.entries if entry["kind"] == STATISTICS]

    @property
    def agreement(self) -> Agreement | None:
        """The agreement of the run, from the study in the inbox; None if it cannot be read."""
        return None if isinstance(self._agreement_or_error, str) else self._agreement_or_error

    @cached_property
    def _agreement_or_error(self) -> Agreement | str:
        """The run's agreement, or why it cannot be read; runs no code that the study names."""
        if self.folder is None:
            return f"{self.state_folder} has no folder of the run"
        try:
            study = Inbox(self.state_folder).read_offer(self.record.study).study
            return read_run_agreement(self.folder, study)
        except FedplanError as error:
            return str(error)

    def faults(self) -> Iterator[str]:
        """Yield a sentence for each fault of the run; nothing if the audit finds none."""
        yield from self.unapproved()
        if not (self.updates or self.statistics):
            return
        folders, record = [account.folder for account in self.accounts], self.record
        for entry, problem in unaccounted_answers(record.entries, folders, [record.agreement]):
            yield f"{self.name}, round {entry['round']}: {problem}"
        if not self.updates:
            return
        if self.agreement is None:
            yield (
                f"{self.name}: it cannot be checked which parts the plan shares: "
                f"{self._agreement_or_error}"
            )
            return
        try:
            with allow_imports(()):
                study_digest = read_run_study(self.folder).full_digest if self.folder else ""
        except FedplanError:
            study_digest = ""
        if study_digest not in self.approved_studies:
            yield f"{self.name}: the study in the run's folder was not approved at this site"
        plan, params = self.agreement.method.plan, self.agreement.params
        if self.record.agreement["plan"] != plan.text:
            yield f"{self.name}: the run's folder has another plan than the approved study"
        shared = {str(param.kind) for param in params_with_roles(plan, params, Role.SHARE)}
        for part in bytes_by_part(self.record.entries):
            if part not in shared:
                yield f"{self.name}: values of {part} left, but the plan does not share it"

    def unapproved(self) -> Iterator[str]:
        """Yield a sentence for each update, or counts, that left without a valid approval."""
        for answer in (*self.updates, *self.statistics):
            earlier = (entry for entry in self.decisions if entry["time"] <= answer["time"])
            if not self._is_approved(answer, earlier):
                which = f"round {answer['round']}: an update" if answer["round"] else "counts"
                yield (
                    f"{self.name}, {which} left, approved by {answer['approver'] or 'nobody'} "
                    f"according to the log, but {APPROVALS_FILE} had no such approval at that time"
                )

    def _is_approved(self, answer: Mapping[str, Any], earlier: Iterable[dict[str, Any]]) -> bool:
        """Whether the approvers of an answer had approved the study, of an update for its run.

        `read_standing` cannot tell: it judges by the policy, which may have changed since.
        """
        names, started = set(answer["approver"].split(", ")), False
        approvals, standing, attempt = set[str](), set[str](), 0
        for entry in earlier:
            decision = entry["decision"]
            if decision == APPROVED and self._counts(entry, attempt, answer):
                approvals.add(entry["approver"])
                standing.add(entry["approver"])
            elif decision == STARTED and approvals:  # it uses them up: another run needs others
                enough = entry.get("signatures", 1) in range(len(names) + 1)
                started = entry["run"] == self.record.run and names <= approvals and enough
            elif decision in (REFUSED, WITHDRAWN):
                started, standing = False, set[str]()
            if decision in (STARTED, REFUSED, WITHDRAWN):
                approvals, attempt = set[str](), attempt + 1
        return started if answer["kind"] == UPDATE else names <= standing

    def _counts(self, entry: dict[str, Any], attempt: int, answer: Mapping[str, Any]) -> bool:
        """Whether an approval had not ended, and has the signature of its key, if it has a key.

        The key is as the file names it: only the policy says whose it is, and who must sign.
        """
        if (ends := str(entry.get("ends", ""))) and ends < answer["time"][:10]:
            return False
        if not (key := str(entry.get("key", ""))):
            return True
        statement = signed_statement(entry, attempt)
        at_site = entry.get("site") == self.record.agreement.get("site", entry.get("site"))
        return at_site and is_signed(statement, str(entry.get("signature")), key)


def is_site_state(folder: Path) -> bool:
    """Whether a folder is the state folder of a site: it has an egress log."""
    return (folder / EGRESS_LOG).exists() or head_file(folder / EGRESS_LOG).exists()


def read_decisions(state_folder: Path) -> list[dict[str, Any]]:
    """Return the entries of a site's approvals; DamagedLog if one is not as it was written."""
    file = state_folder / APPROVALS_FILE
    entries = AppendLog(file, chained=True).read()
    for number, entry in enumerate(entries, 1):
        missing = [name for name in DECISION_FIELDS if not isinstance(entry.get(name), str)]
        if missing:
            raise DamagedLog(f"line {number} of {file} has no {missing[0]}: it was changed")
    return entries
