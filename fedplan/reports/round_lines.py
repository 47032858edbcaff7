# SPDX-License-Identifier: Apache-2.0
"""Format a closed round as one line of the progress output."""

from __future__ import annotations

from collections.abc import Mapping

from rich.markup import escape

from fedplan.federation.record import RoundRecord
from fedplan.reports.units import megabytes

HEADING = "round    loss  global  personal ± std  worst client  upload MB  download MB"
"""Global: score of the global model on the common test set, or on the clients' held-out examples.
Personal: mean score of the clients' personal models on their own held-out examples."""

PERSONAL = ("personal.", "sites.spread.personal.")
"""Prefixes of the metrics on how personal scores spread over clients."""

SCORE_LABELS = {
    "global": "global {}",
    "sites.global": "global {} at sites",
    "sites.personal": "personal {} at sites",
}
"""Labels of scores by the prefix of their metric; those at sites are means over their examples."""


def score_note(primary: str, higher: bool | None = None) -> str:
    """Return the sentence that names the metric of all scores, and its direction if given."""
    better = "" if higher is None else f": {'higher' if higher else 'lower'} is better"
    return f"Scores are {primary}{better}."


def simulation_line(row: Mapping[str, float], spent: float | None = None, *, primary: str) -> str:
    """Return the line of a simulated round under HEADING, with rich markup.

    `row` are the round's metrics, `spent` the epsilon spent so far (None: no epsilon), `primary`
    the name of the metric that scores show.
    """
    prefix = next((prefix for prefix in PERSONAL if f"{prefix}{primary}" in row), "")
    mean, std, worst = (row.get(f"{prefix}{primary}{end}", 0.0) for end in ("", "_std", "_worst"))
    personal = f"{mean:.3f} ± {std:.3f}" if prefix else ""
    rejected = int(row["rejected"])
    cells = (
        f"{int(row['round']):5d}",
        f"{row['loss']:6.3f}" if "loss" in row else "     -",
        f"{_score(row, primary, 'global.', 'sites.global.'):>6}",
        f"{personal:>14}  {f'{worst:.3f}' if prefix else '':>12}",
        f"{megabytes(int(row['upload_bytes'])):>9}  {megabytes(int(row['download_bytes'])):>11}",
        f"  [yellow]{rejected} not aggregated[/yellow]" if rejected else "",
        f"  epsilon {spent:.3f}" if spent is not None else "",
    )
    return "  ".join(cells)


def sites_line(record: RoundRecord, row: Mapping[str, float], *, primary: str) -> str:
    """Return the line of a round of real sites, escaped for rich: sizes, scores, rejected sites.

    `record` is the round's ledger record, `row` its metrics, `primary` the name of the metric that
    scores show.
    """
    rejected = ", ".join(f"{name} ({why})" for name, why in record.rejected.items())
    loss = f"  loss {row['loss']:.3f}" if "loss" in row else ""
    scores = "".join(
        f"  {label.format(primary)} {score}"
        for prefix, label in SCORE_LABELS.items()
        if (score := _score(row, primary, f"{prefix}."))
    )
    return escape(
        f"round {record.round:3d}{loss}{scores}  {len(record.aggregated)} aggregated  "
        f"upload {megabytes(record.upload_bytes)} MB  "
        f"download {megabytes(record.download_bytes)} MB"
        + (f"  not aggregated: {rejected}" if rejected else "")
    )


def _score(row: Mapping[str, float], primary: str, *prefixes: str) -> str:
    """Return the score under the first prefix of metrics that has it, as text; empty for none."""
    scores = [row[f"{prefix}{primary}"] for prefix in prefixes if f"{prefix}{primary}" in row]
    return f"{scores[0]:.3f}" if scores else ""
