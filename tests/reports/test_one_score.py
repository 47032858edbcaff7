# SPDX-License-Identifier: Apache-2.0
"""Global and personal scores of a task are shown in one metric, its main one."""

from __future__ import annotations

import re

import pytest

from fedplan.data.metrics import METRICS, score_spread
from fedplan.data.tasks.kinds import TASK_KINDS
from fedplan.federation.ledger.records import RoundRecord
from fedplan.federation.ledger.status import RunStatus
from fedplan.reports.formats import SCORE_LABELS, simulation_line, sites_line
from fedplan.reports.status import score_texts

MEASURED = ("loss", "perplexity", "f1", *METRICS)
"""All that any task measures; each has a value of its own in these rows."""


def row_of(primary: str) -> dict[str, float]:
    """A round in which every score of every kind is told, none like another."""
    counts = {
        "round": 3.0,
        "loss": 9.0,
        "upload_bytes": 0.0,
        "download_bytes": 0.0,
        "aggregated": 2.0,
        "rejected": 0.0,
    }
    scores = {
        f"{kind}.{name}": place + number / 100
        for place, kind in enumerate(("global", "sites.global", "sites.personal"), 1)
        for number, name in enumerate(MEASURED)
    }
    own = score_spread(
        {"a": 7.0 + MEASURED.index(primary) / 100, "b": 7.5 + MEASURED.index(primary) / 100}
    )
    names = {"mean": "", "std": "_std", "worst": "_worst"}
    personal = {f"personal.{primary}{end}": own[name] for name, end in names.items()}
    return {**counts, **scores, **personal}


@pytest.mark.parametrize("kind", TASK_KINDS)
def test_every_line_tells_the_score_that_the_task_is_known_by(kind: str) -> None:
    primary = TASK_KINDS[kind].primary
    assert primary in MEASURED
    row, number = row_of(primary), MEASURED.index(primary)
    world, own = row[f"global.{primary}"], row[f"personal.{primary}"]
    line = simulation_line(row, primary=primary)
    assert f"{world:.3f}" in line and f"{own:.3f}" in line
    whole = RoundRecord(3, "", ("a", "b"), {}, {}, {}, 0, 0)
    sites = sites_line(whole, row, primary=primary)
    told = list(score_texts(RunStatus(primary_metric=primary, scores=row)))
    for place, label in enumerate(SCORE_LABELS.values(), 1):
        assert f"{label.format(primary)} {place + number / 100:.3f}" in sites
        assert f"{label.format(primary)} {place + number / 100:.3f}" in told
    # No score of another name is told in any of them.
    others = {f"{row[f'global.{name}']:.3f}" for name in MEASURED if name != primary}
    assert not others & set(re.findall(r"\d\.\d{3}", f"{line} {sites} {told}"))
    assert (
        f"personal {primary} {own:.3f}, worst client {row[f'personal.{primary}_worst']:.3f}" in told
    )
