# SPDX-License-Identifier: Apache-2.0
"""Lines: a closed round as a person reads it while a run goes on, in one line."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape

from fedplan.federation.record import RoundRecord
from fedplan.reports.units import megabytes

HEADING = "round    loss  world   own ± spread   worst   MB up  MB down"
"""World: its score on the common test, or on rows of clients. Own: each client's model on its own
rows, mean and worst."""

OWN = ("personal.", "sites.spread.own.")
"""What the names begin with of numbers that tell how clients' own scores lie."""

SITES = ("sites.world", "sites.own")
"""The scores of sites: each is the mean over the rows that they hold out."""


def unit(primary: str, higher: bool | None = None) -> str:
    """What all scores of a run are told in, the world's and the clients'."""
    better = "" if higher is None else f": {'higher' if higher else 'lower'} is better"
    return f"Scores are {primary}{better}."


def line_of(row: Mapping[str, float], spent: float | None = None, *, primary: str) -> str:
    """A round of a simulation under the heading, by its numbers; scores are the task's own."""
    kind = next((kind for kind in OWN if f"{kind}mean" in row), "")
    mean, std, worst = (row.get(f"{kind}{word}", 0.0) for word in ("mean", "std", "worst"))
    own = f"{mean:.3f} ± {std:.3f}  {worst:.3f}" if kind else " " * 20
    rejected = int(row["rejected"])
    words = (
        f"{int(row['round']):5d}",
        f"{row['loss']:6.3f}" if "loss" in row else "     -",
        _score(row, primary, "world.", "sites.world."),
        own,
        f"{megabytes(int(row['up'])):>6}  {megabytes(int(row['down'])):>7}",
        f"  [yellow]{rejected} not counted[/yellow]" if rejected else "",
        f"  epsilon {spent:.3f}" if spent is not None else "",
    )
    return "  ".join(words)


def line_of_sites(whole: RoundRecord, row: Mapping[str, float], *, primary: str) -> str:
    """A round of real sites, with those that were not counted and why."""
    missing = ", ".join(f"{name} ({why})" for name, why in whole.rejected.items())
    loss = f"  loss {row['loss']:.3f}" if "loss" in row else ""
    told = ((kind, _score(row, primary, f"{kind}.").strip()) for kind in ("world", *SITES))
    scores = "".join(f"  {kind} {primary} {score}" for kind, score in told if score)
    return escape(
        f"round {whole.round:3d}{loss}{scores}  {len(whole.counted)} counted  "
        f"{megabytes(whole.up)} MB up  {megabytes(whole.down)} MB down"
        + (f"  not counted: {missing}" if missing else "")
    )


def _score(row: Mapping[str, float], primary: str, *kinds: str) -> str:
    """The one score that a task is known by, of the first kind that has it."""
    found = [row[f"{kind}{primary}"] for kind in kinds if f"{kind}{primary}" in row]
    return f"{found[0]:5.3f}" if found else "     "
