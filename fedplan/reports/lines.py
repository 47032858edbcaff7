# SPDX-License-Identifier: Apache-2.0
"""Lines: a closed round as a person reads it while a run goes on, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape

from fedplan.federation.record import RoundRecord
from fedplan.reports.units import megabytes

HEADING = "round    loss  world   own ± spread   worst   MB up  MB down"
"""World: the score on the common test. Own: each client's model on its own rows, mean and worst."""

KNOWN_BY = ("perplexity", "rmse", "f1_micro", "accuracy")
"""Of each kind of task, the score that it is known by; a line has no task."""

OWN = ("personal.mean", "personal.std", "personal.worst")


def line_of(row: Mapping[str, float], spent: float | None = None) -> str:
    """A round of a simulation under the heading, by its numbers."""
    mean, std, worst = (row.get(name) for name in OWN)
    own = f"{mean:.3f} ± {std:.3f}  {worst:.3f}" if mean is not None else " " * 20
    rejected = int(row["rejected"])
    words = (
        f"{int(row['round']):5d}",
        f"{row['loss']:6.3f}" if "loss" in row else "     -",
        _score(row),
        own,
        f"{megabytes(int(row['up'])):>6}  {megabytes(int(row['down'])):>7}",
        f"  [yellow]{rejected} not counted[/yellow]" if rejected else "",
        f"  epsilon {spent:.3f}" if spent is not None else "",
    )
    return "  ".join(words)


def line_of_sites(whole: RoundRecord, row: Mapping[str, float]) -> str:
    """A round of real sites, with those that were not counted and why."""
    missing = ", ".join(f"{name} ({why})" for name, why in whole.rejected.items())
    loss = f"  loss {row['loss']:.3f}" if "loss" in row else ""
    return escape(
        f"round {whole.round:3d}{loss}  {len(whole.counted)} counted  "
        f"{megabytes(whole.up)} MB up  {megabytes(whole.down)} MB down"
        + (f"  not counted: {missing}" if missing else "")
    )


def _score(row: Mapping[str, float]) -> str:
    """The one score that a task is known by."""
    found = [row[f"world.{name}"] for name in KNOWN_BY if f"world.{name}" in row]
    return f"{found[0]:5.3f}" if found else "     "
