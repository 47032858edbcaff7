# SPDX-License-Identifier: Apache-2.0
"""Rows of a run's test scores, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

UNDEFINED = "\N{EN DASH}"
"""The text of a number that is not defined."""


def number(value: float | None) -> str:
    """Return a score as text with three decimals, or four digits from 10."""
    if value is None:
        return UNDEFINED
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def set_title(entry: Mapping[str, Any]) -> str:
    """Return which model a set of scores is of, and on which examples."""
    model = "Personal models" if entry["model"] == "personal" else "Global model"
    groups = f" in {entry['groups']:,} groups" if "groups" in entry else ""
    count = entry["examples"]
    examples = f"{count:,} test {'example' if count == 1 else 'examples'}{groups}"
    if entry["on"] == "common":
        return f"{model} on the common test set, {examples}"
    clients = len(entry["clients"])
    return f"{model} on the test examples of {clients} clients together, {examples}"


def metric_rows(entry: Mapping[str, Any], primary: str) -> list[tuple[str, str, str]]:
    """Return (name, value, 95 % interval) of each metric of a set; the primary one is first."""
    metrics: Mapping[str, Mapping[str, float | None]] = entry["metrics"]
    names = sorted(metrics, key=lambda name: name != primary)
    rows = list[tuple[str, str, str]]()
    for name in names:
        metric = metrics[name]
        has_interval = metric.get("low") is not None and metric.get("high") is not None
        between = f"{number(metric['low'])} to {number(metric['high'])}" if has_interval else ""
        rows.append((name, number(metric["value"]), between))
    return rows


def threshold_text(entry: Mapping[str, Any], labels: list[str]) -> str:
    """Return a sentence on the threshold of two labels; "" if there is none."""
    if "threshold" not in entry:
        return ""
    chosen = (
        "chosen on validation examples (Youden)"
        if entry["chosen_on"] == "validation"
        else "the default, since there is no validation set"
    )
    return (
        f"Sensitivity and specificity are for the label {labels[1]!r} from a probability of "
        f"{number(entry['threshold'])}, {chosen}."
    )


def evaluation_lines(tables: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a terminal for the tables of a run's evaluation."""
    yield f"After round {tables['round']}; in brackets 95 % bootstrap intervals"
    for entry in tables["sets"]:
        yield ""
        yield set_title(entry)
        for name, value, between in metric_rows(entry, tables["primary"]):
            yield f"  {name:20} {value:>8}" + (f"  ({between})" if between else "")
        if text := threshold_text(entry, tables["labels"]):
            yield f"  {text}"
