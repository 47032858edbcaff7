# SPDX-License-Identifier: Apache-2.0
"""Statistics of a study's sites before training: request, check and sum of their counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from fedplan.data.column_statistics import (
    Column,
    TableStatistics,
    mismatches,
    pool_statistics,
    statistics_from_json,
)
from fedplan.errors import FedplanError, printable
from fedplan.federation.ledger.faults import APPROVAL
from fedplan.federation.participation import Timeouts
from fedplan.runners.flower.rpc import STATISTICS_REQUEST, SiteRpc
from fedplan.runners.flower.superlink import SuperLink, flower_runs
from fedplan.studies.dictionary import dictionary, statistics_refusal
from fedplan.studies.schema import Study
from fedplan.studies.section import ConfigError
from fedplan.tensors.serialization import pack_message


@dataclass(frozen=True)
class FederationStatistics:
    """Counts by site, and `missing`: the reason for each site without any."""

    study: str
    columns: dict[str, Column]
    sites: dict[str, TableStatistics]
    missing: dict[str, str]

    @property
    def mismatches(self) -> dict[str, dict[str, list[str]]]:
        """Differences from the dictionary by site and column, as far as the counts show any."""
        return {name: mismatches(self.columns, each) for name, each in self.sites.items()}

    @property
    def total(self) -> TableStatistics:
        """The sums over all sites."""
        return pool_statistics(self.columns, self.sites.values())

    @property
    def not_counted(self) -> dict[str, list[str]]:
        """The sites with too few people, or without the column, by column of the total."""
        return {
            column: [
                name
                for name, each in self.sites.items()
                if any(group.count is None for group in each.columns.get(column, ()))
                or column in each.absent
            ]
            for column in self.columns
        }

    def json(self) -> dict[str, Any]:
        """Return all counts as plain values."""
        return {
            "study": self.study,
            "total": {**self.total.json(), "not_counted": self.not_counted},
            "sites": {name: each.json() for name, each in self.sites.items()},
            "mismatches": self.mismatches,
            "missing": self.missing,
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for a person: each site, then the total of each column."""
        for name, each in self.sites.items():
            faults = (f"{c}: {', '.join(kinds)}" for c, kinds in self.mismatches[name].items())
            rows = "too few to count" if each.examples is None else f"{each.examples:,} rows"
            yield printable(f"{name}: {rows}; differences: {'; '.join(faults) or 'none'}")
        yield from (f"{name}: no counts: {reason}" for name, reason in self.missing.items())
        for column, groups in self.total.columns.items():
            cells = (f"{' + '.join(group.cells)} {group.count:,}" for group in groups)
            yield printable(f"{column}: {'; '.join(cells)}")


def collect_statistics(
    grid: Grid | None, study: Study, renew_grid: Callable[[], Grid] | None = None
) -> FederationStatistics:
    """Ask the sites of a study for their counts, and wait for answers and approvals.

    `grid`, `renew_grid`: as of SiteRpc. A site that refuses is not waited for, any other for
    `timeouts.sites`. Raises ConfigError for a study without statistics.
    """
    if reason := statistics_refusal(study):
        raise ConfigError(reason)
    columns, timeouts = dictionary(study), Timeouts(**study.timeouts.model_dump())
    request = pack_message({}, {"study": study.model_dump(mode="json")})
    rpc = SiteRpc(grid, study.clients.names, timeouts, request, STATISTICS_REQUEST)
    rpc.renew_grid, deadline = renew_grid, time.monotonic() + timeouts.sites

    def is_awaited(name: str) -> bool:
        reason = rpc.refusals.get(name)
        late = time.monotonic() > deadline
        return name not in rpc.sites and (APPROVAL in reason if reason else not late)

    rpc.poll_nodes()
    while any(map(is_awaited, rpc.names)):
        time.sleep(timeouts.poll_interval)
        rpc.poll_nodes()
    sites = dict[str, TableStatistics]()
    missing = {name: rpc.refusals.get(name, "not connected") for name in rpc.names}
    for name in rpc.names:
        if name not in rpc.sites:
            continue
        try:
            sites[name] = statistics_from_json(columns, rpc.sites[name].statistics)
            del missing[name]
        except FedplanError as error:
            missing[name] = str(error)
    return FederationStatistics(study.full_digest, columns, sites, missing)


def statistics_on_superlink(link: SuperLink, study: Study) -> FederationStatistics:
    """Ask the sites that are connected to the SuperLink `link`; see `collect_statistics`."""
    with flower_runs(link) as renew_grid:
        return collect_statistics(None, study, renew_grid)
