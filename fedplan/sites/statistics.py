# SPDX-License-Identifier: Apache-2.0
"""Statistics of a site's data: its check by a study's data dictionary, and the counts of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.data.column_statistics import (
    CellGroup,
    CountRule,
    TableStatistics,
    mismatches,
    statistics_from_json,
    table_statistics,
)
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

FOLDER = "statistics"
"""In the state folder: the counts that have left, in a file for each dataset."""
SHOWN_CELLS = 12
"""Names of joined cells that a line of the table lists."""


@dataclass(frozen=True)
class SiteStatistics:
    """Counts of a site's data, and its mismatches by column; print with rich, or call `json`."""

    site: str
    statistics: TableStatistics
    mismatches: dict[str, list[str]]
    units: dict[str, str | None]
    min_count: int

    def json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"site": self.site, "mismatches": self.mismatches, **self.statistics.json()}

    def mismatch_lines(self) -> Iterator[str]:
        """Yield a line for each column that does not match, without any of its values."""
        for name, kinds in self.mismatches.items():
            yield f"{printable(name)}: {', '.join(kinds)}"

    def __rich__(self) -> RenderableType:
        few = f"fewer than {self.min_count}"
        examples = self.statistics.examples
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for title in ("column", "cells", "rows", ""):
            table.add_column(title, justify="right" if title == "rows" else "left")
        for name, groups in self.statistics.columns.items():
            unit = self.units.get(name)
            heading = printable(f"{name}, {unit}" if unit else name)
            for number, group in enumerate(groups):
                count = few if group.count is None else f"{group.count:,}"
                note = f"some of these have {few}" if group.count and len(group.cells) > 1 else ""
                table.add_row("" if number else heading, _cell_text(group), count, note)
        lines = "".join(f"\n  - {line}" for line in self.mismatch_lines())
        return Group(
            Text(f"{self.site}: {few if examples is None else f'{examples:,}'} rows\n", "bold"),
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
        raise FedplanError(
            "the study has no data dictionary: add [statistics.columns.NAME] for each column"
        )
    with allow_imports(site.allow_packages):
        table = load_site_table(site, study, with_images=False)
    every = table_statistics(table, columns, replace(rule, min_count=1, show_zeros=True, person=""))
    units = {name: section.unit for name, section in study.statistics.columns.items()}
    statistics = table_statistics(table, columns, rule)
    return SiteStatistics(site.name, statistics, mismatches(columns, every), units, rule.min_count)


def answer_statistics(
    site: Site, study: Study, policy: Policy, egress: EgressLog, authorization: Authorization
) -> Message:
    """Return the counts that an approved study asks for, after logging them; see `release`."""
    statistics = release(site, study, policy, egress)
    answer = pack_message({}, {"client": site.name, STATISTICS: statistics.json()})
    entry = EgressEntry(
        STATISTICS,
        site.name,
        request=_request_name(study),
        content=content_digest(answer, open_account(site, None).content_key()),
        other_bytes=answer.nbytes,
    )
    egress.append(entry, authorization)
    return answer


def require_match(site: Site, study: Study, policy: Policy, egress: EgressLog) -> None:
    """Raise RequestRefused if the counts that may leave show a difference from the dictionary."""
    if differences := mismatches(dictionary(study), release(site, study, policy, egress)):
        raise RequestRefused(
            f"the columns {', '.join(differences)} differ from the study's data dictionary: see "
            "`fedplan site statistics`"
        ).with_code("dictionary")


def release(site: Site, study: Study, policy: Policy, egress: EgressLog) -> TableStatistics:
    """Return the counts of a study, charged to the account, and stored before they leave.

    The same study has the same counts, whatever has become of the data. Raises RequestRefused if
    the policy has no [statistics], or a column was counted in other cells before.
    """
    if policy.statistics is None:
        raise RequestRefused(
            f"{site.policy} has no [statistics], so no counts of the data leave"
        ).with_code("statistics")
    if reason := statistics_refusal(study):
        raise RequestRefused(reason).with_code("statistics")
    file = Path(site.state) / FOLDER / f"{safe_folder_name(site.dataset)}.json"
    stored = read_json_object(file) or {"split": study.data.split, "questions": {}, "columns": {}}
    stored.setdefault("differing", [])
    _require_same_cells(study, stored, file)
    account = open_account(site, policy.account_limits)
    require_complete_account(account, egress)
    questions = json.dumps([study.data.split, _questions(study)])
    account.charge(Answer(STATISTICS, _request_name(study), questions, 0))
    statistics = _count_new_columns(site, study, policy.statistics.rule, stored)
    make_folder(file.parent)
    write_atomic(file, json.dumps(stored, indent=1) + "\n")
    return statistics


def _request_name(study: Study) -> str:
    return f"statistics {study.full_digest[:16]}"


def _questions(study: Study) -> dict[str, Any]:
    """Return the cells that a study asks for, by column, as JSON has them."""
    return json.loads(json.dumps({n: asdict(column) for n, column in dictionary(study).items()}))


def _require_same_cells(study: Study, stored: Mapping[str, Any], file: Path) -> None:
    """Raise RequestRefused if a column was counted in other cells, or of another split."""
    for name, question in _questions(study).items():
        earlier = stored["questions"].get(name, question)
        if earlier != question or stored["split"] != study.data.split:
            raise RequestRefused(
                f"the column {name!r} was counted in other cells, or of another split, and the "
                f"difference could reveal a person; {file} has all counts that have left"
            ).with_code("other-statistics")


def _count_new_columns(
    site: Site, study: Study, rule: CountRule, stored: dict[str, Any]
) -> TableStatistics:
    """Return a study's counts: the stored ones, and those of new columns, added to `stored`."""
    columns, questions = dictionary(study), _questions(study)
    fresh = {name: column for name, column in columns.items() if name not in stored["questions"]}
    table = load_site_table(site, study, with_images=False)
    new = table_statistics(table, fresh, rule).json()
    stored.setdefault("examples", new["examples"])
    stored["columns"] |= new["columns"]
    stored["differing"] += new["differing"]
    stored["questions"] |= {name: questions[name] for name in new["columns"]}
    counts = {name: stored["columns"][name] for name in columns if name in stored["columns"]}
    differing = [name for name in stored["differing"] if name in counts]
    fields = {"examples": stored["examples"], "columns": counts, "differing": differing}
    fields |= {"absent": new["absent"]}
    return statistics_from_json(columns, fields)
