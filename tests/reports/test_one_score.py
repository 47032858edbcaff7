# SPDX-License-Identifier: Apache-2.0
"""One score for each task, in one unit: the world's and the clients' are told in the same."""

from __future__ import annotations

import re

import pytest

from fedplan.data.metrics import METRICS, spread
from fedplan.data.tasks import TASK_KINDS
from fedplan.federation.record import RoundRecord
from fedplan.federation.states import RunStatus
from fedplan.reports.lines import line_of, line_of_sites
from fedplan.reports.status import told_scores

MEASURED = ("loss", "perplexity", "f1", *METRICS)
"""All that any task measures; each has a value of its own in these rows."""


def row_of(primary: str) -> dict[str, float]:
    """A round in which every score of every kind is told, none like another."""
    counts = {"round": 3.0, "loss": 9.0, "up": 0.0, "down": 0.0, "counted": 2.0, "rejected": 0.0}
    scores = {
        f"{kind}.{name}": place + number / 100
        for place, kind in enumerate(("world", "sites.world", "sites.own"), 1)
        for number, name in enumerate(MEASURED)
    }
    own = spread(
        {"a": 7.0 + MEASURED.index(primary) / 100, "b": 7.5 + MEASURED.index(primary) / 100}
    )
    return {**counts, **scores, **{f"personal.{k}": v for k, v in own.items()}}


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_every_line_tells_the_score_that_the_task_is_known_by(kind: str) -> None:
    primary = TASK_KINDS[kind].primary
    assert primary in MEASURED
    row, number = row_of(primary), MEASURED.index(primary)
    world, own = row[f"world.{primary}"], row["personal.mean"]
    line = line_of(row, primary=primary)
    assert f"{world:.3f}" in line and f"{own:.3f}" in line
    whole = RoundRecord(3, "", ("a", "b"), {}, {}, {}, 0, 0)
    sites = line_of_sites(whole, row, primary=primary)
    told = list(told_scores(RunStatus(primary=primary, scores=row)))
    for place, kind_of in enumerate(("world", "sites.world", "sites.own"), 1):
        assert f"{kind_of} {primary} {place + number / 100:.3f}" in sites
        assert f"{kind_of} {primary} {place + number / 100:.3f}" in told
    # No score of another name is told in any of them.
    others = {f"{row[f'world.{name}']:.3f}" for name in MEASURED if name != primary}
    assert not others & set(re.findall(r"\d\.\d{3}", f"{line} {sites} {told}"))
    assert f"own {primary} {own:.3f}, worst {row['personal.worst']:.3f}" in told
