# SPDX-License-Identifier: Apache-2.0
"""Statistics of a site's data: its check by a study's data dictionary, and the counts of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fedplan.data.column_statistics import (
    CellGroup,
    CountRule,
    TableStatistics,
    mismatches,
    table_statistics,
)
from fedplan.errors import FedplanError, printable
from fedplan.naming import allow_imports
from fedplan.runners.site import Site
from fedplan.runners.site_runtime import load_site_table
from fedplan.studies.dictionary import dictionary
from fedplan.studies.schema import Study

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
