# SPDX-License-Identifier: Apache-2.0
"""Statistics of a site's data: its check by a study's data dictionary, and the counts of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.data.column_statistics import (
    CellGroup,
    Column,
    CountRule,
    TableStatistics,
    mismatches,
    statistics_from_json,
    table_statistics,
)
from fedplan.data.tables import add_empty_columns, has_json_columns
from fedplan.errors import FedplanError, printable
from fedplan.federation.ledger.egress import (
    STATISTICS,
    Answer,
    Authorization,
    EgressEntry,
    EgressLog,
    content_digest,
    require_complete_account,
)
from fedplan.federation.messages import RequestRefused
from fedplan.naming import allow_imports
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import load_site_table, open_account
from fedplan.sites.policy import Policy, StatisticsPolicySection, read_policy
from fedplan.storage.files import make_folder, safe_folder_name, write_atomic
from fedplan.studies.dictionary import dictionary, statistics_refusal
from fedplan.studies.schema import Study, read_json_object
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message

if TYPE_CHECKING:
    from datasets import Dataset

FOLDER = "statistics"
"""In the state folder: the counts that have left, in a file for each dataset."""
SHOWN_CELLS = 12
"""Names of joined cells that a line of the table lists."""


@dataclass(frozen=True)
class SiteStatistics:
    """Counts of a site's data, and its mismatches by column; print with rich, or call `json`.

    `least`: the least count in words. `units`: of the columns that have one.
    """

    site: str
    statistics: TableStatistics
    mismatches: dict[str, list[str]]
    units: dict[str, str | None]
    least: str

    def json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"site": self.site, "mismatches": self.mismatches, **self.statistics.json()}

    def mismatch_lines(self) -> Iterator[str]:
        """Yield a line for each column that does not match, without any of its values."""
        for name, kinds in self.mismatches.items():
            yield f"{printable(name)}: {', '.join(kinds)}"

    def __rich__(self) -> RenderableType:
        few = f"fewer than {self.least}"
        examples = self.statistics.examples
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for title in ("column", "cells", "rows", ""):
            table.add_column(title, justify="right" if title == "rows" else "left")
        for name, groups in self.statistics.columns.items():
            unit = self.units.get(name)
            heading = Text(printable(f"{name}, {unit}" if unit else name))  # no markup
            for number, group in enumerate(groups):
                count = few if group.count is None else f"{group.count:,}"
                note = f"some of these have {few}" if group.count and len(group.cells) > 1 else ""
                table.add_row("" if number else heading, Text(_cell_text(group)), count, note)
        lines = "".join(f"\n  - {line}" for line in self.mismatch_lines())
        return Group(
            Text(f"{self.site}: {few if examples is None else f'{examples:,} rows'}\n", "bold"),
            table,
            Text(f"\nDifferences from the dictionary:{lines or ' none'}"),
        )


def _cell_text(group: CellGroup) -> str:
    more = len(group.cells) - SHOWN_CELLS
    return printable(", ".join(group.cells[:SHOWN_CELLS])) + (f" and {more} more" * (more > 0))


def site_statistics(site: Site, study: Study) -> SiteStatistics:
    """Check a site's data by the dictionary of a study, and count them as they might leave.

    The mismatches cover every row. Raises FedplanError if the study has no dictionary.
    """
    columns, rule = dictionary(study), CountRule()
    if Path(site.policy).exists():
        rule = (read_policy(Path(site.policy)).statistics or StatisticsPolicySection()).rule
    if study.statistics is None:
        raise FedplanError(statistics_refusal(study))
    with allow_imports(site.allow_packages):
        table = load_site_table(site, study, with_images=False)
    every = table_statistics(table, columns, replace(rule, min_count=1, show_zeros=True, person=""))
    units = {name: section.unit for name, section in study.statistics.columns.items()}
    statistics = _leaving_statistics(site, table, columns, rule)
    return SiteStatistics(site.name, statistics, mismatches(columns, every), units, rule.least)


def _leaving_statistics(
    site: Site, table: Dataset, columns: Mapping[str, Column], rule: CountRule
) -> TableStatistics:
    # One row of a JSON file decides whether there is a column, so that none is absent.
    if not site.reader and has_json_columns(site.data):
        table = add_empty_columns(table, columns)
    return table_statistics(table, columns, rule)


def answer_statistics(
    site: Site, study: Study, policy: Policy, egress: EgressLog, authorization: Authorization
) -> Message:
    """Return the counts that an approved study asks for; they are charged, logged and stored.

    Raises RequestRefused as `release` does, or if a limit of the account would be exceeded.
    """
    # Counted before the charge, and stored after the log has it: what fails between has not left.
    statistics, store = release(site, study, policy)
    answer = pack_message({}, {"client": site.name, STATISTICS: statistics.json()})
    account, request = open_account(site, policy.account_limits), _request_name(study)
    require_complete_account(account, egress)
    questions = json.dumps([study.data.split, _questions(study)])
    account.charge(Answer(STATISTICS, request, questions, 0))
    content = content_digest(answer, account.content_key())
    entry = EgressEntry(
        STATISTICS, site.name, request=request, content=content, other_bytes=answer.nbytes
    )
    egress.append(entry, authorization)
    store()
    return answer


def require_match(site: Site, study: Study, policy: Policy) -> None:
    """Raise RequestRefused if the counts that may leave show a difference from the dictionary."""
    statistics, store = release(site, study, policy)
    store()
    if differences := mismatches(dictionary(study), statistics):
        raise RequestRefused(
            f"the columns {', '.join(differences)} differ from the study's data dictionary: see "
            "`fedplan site statistics`"
        ).with_code("dictionary")


def release(site: Site, study: Study, policy: Policy) -> tuple[TableStatistics, Callable[[], None]]:
    """Return the counts of a study, and a function that stores them before anything leaves.

    The same study has the same counts, whatever has become of the data. Raises RequestRefused if
    the policy has no [statistics], the study does not name the site, or the stored counts are of
    another policy, split or cells.
    """
    if policy.statistics is None:
        raise RequestRefused(
            f"{site.policy} has no [statistics], so no counts of the data leave"
        ).with_code("statistics")
    reason = statistics_refusal(study)
    if not reason and site.name not in study.clients.names:
        reason = f"the study does not name {site.name} in clients.names"
    if reason:
        raise RequestRefused(reason).with_code("statistics")
    file = Path(site.state) / FOLDER / f"{safe_folder_name(site.dataset)}.json"
    rule = policy.statistics.rule
    asked: dict[str, Any] = {"data.split": study.data.split, "policy.statistics": asdict(rule)}
    stored = read_json_object(file) or asked | {"questions": {}, "columns": {}, "differing": []}
    _require_same_question(study, asked, stored, file)
    statistics = _count_new_columns(site, study, rule, stored)

    def store() -> None:
        make_folder(file.parent)
        write_atomic(file, json.dumps(stored, indent=1) + "\n")

    return statistics, store


def _request_name(study: Study) -> str:
    return f"statistics {study.full_digest[:16]}"


def _questions(study: Study) -> dict[str, Any]:
    """Return the cells that a study asks for, by column, as JSON has them."""
    return json.loads(json.dumps({n: asdict(column) for n, column in dictionary(study).items()}))


def _require_same_question(
    study: Study, asked: Mapping[str, Any], stored: Mapping[str, Any], file: Path
) -> None:
    """Raise RequestRefused if a column was counted in other cells, by another rule or split."""
    questions = stored["questions"]
    others = [name for name, value in asked.items() if stored[name] != value]
    others += [
        f"cells of {name!r}"
        for name, question in _questions(study).items()
        if questions.get(name, question) != question
    ]
    if others:
        raise RequestRefused(
            f"{', '.join(others)} differ from those of the counts in {file}, which have left: the "
            "differences could reveal a person; ask as before, or put the policy back"
        ).with_code("other-statistics")


def _count_new_columns(
    site: Site, study: Study, rule: CountRule, stored: dict[str, Any]
) -> TableStatistics:
    """Return a study's counts: the stored ones, and those of new columns, added to `stored`."""
    columns, questions = dictionary(study), _questions(study)
    fresh = {name: column for name, column in columns.items() if name not in stored["questions"]}
    absent = list[str]()
    if fresh:
        table = load_site_table(site, study, with_images=False)
        new = _leaving_statistics(site, table, fresh, rule).json()
        stored.setdefault("examples", new["examples"])
        stored["columns"] |= new["columns"]
        stored["differing"] += new["differing"]
        stored["questions"] |= {name: questions[name] for name in new["columns"]}
        absent = new["absent"]
    counts = {name: stored["columns"][name] for name in columns if name in stored["columns"]}
    differing = [name for name in stored["differing"] if name in counts]
    fields = {"examples": stored["examples"], "columns": counts, "differing": differing}
    return statistics_from_json(columns, {**fields, "absent": absent})
