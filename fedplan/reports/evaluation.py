# SPDX-License-Identifier: Apache-2.0
"""Rows of a run's test scores, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import fsum
from typing import Any

from fedplan.studies.run_scores import score_text, untrained_note

UNDEFINED = "\N{EN DASH}"
"""The text of a number that is not defined."""


def number(value: float | None) -> str:
    """Return a score as text, or a dash if it is not defined."""
    return UNDEFINED if value is None else score_text(value)


def set_title(entry: Mapping[str, Any]) -> str:
    """Return which model a set of scores is of, and on which examples."""
    model = "Personal models" if entry["model"] == "personal" else "Global model"
    groups = f" in {entry['groups']:,} groups" if "groups" in entry else ""
    count = entry["examples"]
    examples = f"{count:,} test {'example' if count == 1 else 'examples'}{groups}"
    examples += untrained_note(entry.get("untrained", ""))
    if entry["on"] == "common":
        return f"{model} on the common test set, {examples}"
    clients = len(entry["clients"])
    whose = "one client" if clients == 1 else f"{clients} clients together"
    return f"{model} on the test examples of {whose}, {examples}"


def metric_title(name: str, tables: Mapping[str, Any]) -> str:
    """Return the name of a metric with what it averages: `f1 (macro)`."""
    if name == "accuracy" and tables["answer_kind"] == "labels":
        return "accuracy (all labels right)"
    if name == "f1":
        return f"f1 ({tables.get('f1_average', 'macro')})"
    score, _, average = name.partition("_")
    return f"{score} ({average})" if average in ("macro", "micro", "weighted") else name


def _positive_label(name: str, tables: Mapping[str, Any]) -> str:
    """Return the end of a metric's title that names the positive one of two labels."""
    binary = tables["answer_kind"] == "class" and len(tables["labels"]) == 2
    of_label = binary and name in ("auroc", "auprc", "sensitivity", "specificity")
    return f", positive label {tables['labels'][1]!r}" if of_label else ""


def metric_rows(entry: Mapping[str, Any], tables: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value, 95 % interval) of each metric of a set; the primary one is first.

    `tables` are of the whole evaluation. Of several clients the primary metric stands there twice:
    its mean over clients, and of all their examples together.
    """
    metrics: Mapping[str, Mapping[str, Any]] = entry["metrics"]
    primary, rows = tables["primary"], list[tuple[str, str, str]]()
    of_clients = [each["metrics"].get(primary, {}) for each in entry.get("clients", {}).values()]
    values = [value for each in of_clients if (value := each.get("value")) is not None]
    several = len(of_clients) > 1
    if several and len(values) == len(of_clients):
        title = f"{metric_title(primary, tables)}, mean of {len(values)} clients"
        rows.append((title, number(fsum(values) / len(values)), ""))
    for name in sorted(metrics, key=lambda name: name != primary):
        metric, together = metrics[name], ", all examples" if several and name == primary else ""
        low, high = metric.get("low"), metric.get("high")
        between = "" if low is None or high is None else f"{number(low)} to {number(high)}"
        if between and low == high:
            between = "unknown: equal in all resamples"
        if "no_interval" in metric:
            between = f"none: {metric['no_interval']}"
        title = metric_title(name, tables) + _positive_label(name, tables) + together
        rows.append((title, number(metric["value"]), between))
    return rows


def interval_text(tables: Mapping[str, Any]) -> str:
    """Return a sentence on how the intervals of an evaluation are made."""
    units = "groups" if any("groups" in entry for entry in tables["sets"]) else "examples"
    fractions = "" if units == "groups" else ", by Wilson for fractions of examples"
    return f"Intervals are 95 % bootstrap intervals, drawn by {units}{fractions}"


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
    yield f"After round {tables['round']}. {interval_text(tables)}."
    for entry in tables["sets"]:
        yield ""
        yield set_title(entry)
        rows = metric_rows(entry, tables)
        width = max(20, *(len(name) for name, *_ in rows))
        for name, value, between in rows:
            yield f"  {name:{width}} {value:>8}" + (f"  ({between})" if between else "")
        if text := threshold_text(entry, tables["labels"]):
            yield f"  {text}"
