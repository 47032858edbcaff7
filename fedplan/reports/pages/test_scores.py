# SPDX-License-Identifier: Apache-2.0
"""The section of a report on test scores: metrics, classes, sites, and curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedplan.data.evaluation import MIN_EXAMPLES
from fedplan.reports.evaluation import (
    interval_text,
    metric_rows,
    metric_title,
    number,
    set_title,
    threshold_text,
)
from fedplan.reports.figures.charts import Series, line_chart
from fedplan.reports.figures.grids import matrix_chart
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import WIDTHS, PageBlock, PageFigure, PageSection, block
from fedplan.studies.evaluation import absence_reason, read_evaluation

MAX_CLASSES, MAX_MATRIX, MAX_SITES, MAX_CURVES = 40, 20, 40, 6
"""The most classes in a table and in a confusion matrix, sites in a table, and curves of sites."""
FEW_EXAMPLES = (
    f"; no area under a curve for fewer than {MIN_EXAMPLES} examples with or without a label"
)
SMALL_MATRIX = 6
"""The most classes of a confusion matrix that takes half the width of the page."""


def test_scores_section(facts: RunFacts) -> PageSection:
    """Return the section with the tables of a run's evaluation, or why it has none."""
    tables = read_evaluation(facts.run.folder)
    if not tables.get("sets"):
        reason = absence_reason(facts.run.study)
        return PageSection("Test scores", (f"This run has no tables: {reason}.",) if reason else ())
    first: Mapping[str, Any] = tables["sets"][0]
    intro: list[str | PageBlock] = [
        f"After round {tables['round']}. {interval_text(tables)}: they tell what another test set "
        "of this size might show, not another training."
    ]
    for entry in tables["sets"]:
        intro.append(block("heading", text=set_title(entry)))
        rows = metric_rows(entry, tables)
        intro.append(
            block("table", columns=("metric", "value", "95 % interval"), rows=rows, numbers=2)
        )
        intro += [text] if (text := threshold_text(entry, tables["labels"])) else []
    after = [*_class_table(first), *_site_table(first, tables)]
    return PageSection("Test scores", tuple(intro), tuple(_figures(first, tables)), tuple(after))


def _class_table(entry: Mapping[str, Any]) -> Iterator[PageBlock]:
    """Yield the table of classes, those with most test examples first if there are too many."""
    classes: list[dict[str, Any]] = entry.get("classes", [])
    if not classes:
        return
    total = sum(map(sum, entry["confusion"])) if "confusion" in entry else entry["examples"]
    text = "Classes"
    if len(classes) > MAX_CLASSES:
        text = f"The {MAX_CLASSES} most frequent of {len(classes)} classes"
        classes = sorted(classes, key=lambda each: -each["support"])[:MAX_CLASSES]
    yield block("heading", text=text)
    columns = ("precision", "recall", "f1", "auroc")
    few = [min(n := each["support"], total - n) < MIN_EXAMPLES for each in classes]
    rows = [
        (
            each["label"],
            f"{each['support']:,}",
            *(number(None if name == "auroc" and hide else each[name]) for name in columns),
        )
        for each, hide in zip(classes, few, strict=True)
    ]
    yield block("table", columns=("class", "examples", *columns), rows=rows, numbers=5)
    text = f"{set_title(entry)}. AUROC: one class against the rest{FEW_EXAMPLES * any(few)}."
    if entry.get("threshold", 0.5) != 0.5:
        text += " Precision, recall and f1 are at a probability of 0.5, not at the threshold above."
    yield block("note", text=text)


def _positives(client: Mapping[str, Any], labels: Sequence[str]) -> int | None:
    """Return how many test examples of a client have the second of two labels; else None."""
    binary = len(labels) == 2 and "threshold" in client
    return int(client["classes"][1]["support"]) if binary and "classes" in client else None


def _has_few(client: Mapping[str, Any], labels: Sequence[str]) -> bool:
    """Return whether a client has few test examples of one of two labels."""
    if _positives(client, labels) is None:
        return False
    return min(each["support"] for each in client["classes"]) < MIN_EXAMPLES


def _site_table(entry: Mapping[str, Any], tables: Mapping[str, Any]) -> Iterator[PageBlock]:
    """Yield the table of clients; those with fewest examples are left out if there are too many."""
    clients: dict[str, dict[str, Any]] = entry.get("clients", {})
    if len(clients) < 2:
        return
    text = "Clients"
    if len(clients) > MAX_SITES:
        text = f"The {MAX_SITES} of {len(clients)} clients with most test examples"
        order = sorted(clients, key=lambda name: -clients[name]["examples"])
        clients = {name: clients[name] for name in order[:MAX_SITES]}
    names = dict.fromkeys(name for each in clients.values() for name in each["metrics"])
    order = sorted(names, key=lambda name: name != tables["primary"])
    positives = {name: _positives(each, tables["labels"]) for name, each in clients.items()}
    few = {name for name, each in clients.items() if _has_few(each, tables["labels"])}
    binary = None not in positives.values()
    rows = list[tuple[str, ...]]()
    for client, each in clients.items():
        metrics = {name: each["metrics"].get(name, {}).get("value") for name in order}
        metrics |= dict.fromkeys({"auroc", "auprc"} & names.keys() if client in few else ())
        counts = (each["examples"], *((positives[client],) if binary else ()))
        rows.append((client, *(f"{count:,}" for count in counts), *map(number, metrics.values())))
    yield block("heading", text=text)
    of_label = (f"of these {tables['labels'][1]!r}",) if binary else ()
    columns = ("client", "examples", *of_label, *(metric_title(name, tables) for name in order))
    yield block("table", columns=columns, rows=rows, numbers=len(columns) - 1)
    note = f"A dash: not defined for the client's examples{FEW_EXAMPLES * bool(few)}."
    yield block("note", text=f"{set_title(entry)}. {note}")


def _figures(entry: Mapping[str, Any], tables: Mapping[str, Any]) -> Iterator[PageFigure]:
    """Yield the confusion matrix, the calibration curve, and the ROC curves of two labels."""
    labels, caption = tables["labels"], f"{set_title(entry)}."
    if entry.get("confusion") and len(labels) <= MAX_MATRIX:
        wide, narrow = (
            matrix_chart("Confusion matrix", labels, entry["confusion"], width=width)
            for width in WIDTHS
        )
        text = (
            "Rows: true class; columns: predicted class; framed: right. The shade is the share of "
            f"the row. {caption}"
        )
        small = len(labels) <= SMALL_MATRIX
        yield PageFigure("confusion", *((narrow, None) if small else (wide, narrow)), text)
    bins = [(x, y) for _, x, y in entry.get("calibration", []) if x is not None]
    binary = "threshold" in entry
    if len(bins) > 1:
        drawn = line_chart(
            "Calibration",
            [Series("model", tuple(bins))],
            x="predicted probability",
            y=f"fraction of {labels[1]!r}" if binary else "fraction that is right",
            expected=Series("ideal", ((0.0, 0.0), (1.0, 1.0))),
            whole=False,
            from_zero=True,
        )
        whose = "the predicted class"
        if binary or tables["answer_kind"] == "labels":
            whose = f"the label {labels[1]!r}" if binary else "each label"
        counts = ", ".join(f"{count:,}" for count, x, _ in entry["calibration"] if x is not None)
        text = (
            f"Predictions in ten bins by the probability of {whose}; a point is a bin, and from "
            f"the left they hold {counts}. Below the dashed line the probability is too high. "
            f"{caption}"
        )
        yield PageFigure("calibration", drawn, caption=text)
    curves = {"all": entry.get("roc")} if len(entry.get("clients", {})) != 1 else {}
    clients: Mapping[str, Any] = entry.get("clients", {})
    positives = {name: _positives(each, labels) or 0 for name, each in clients.items()}
    sites = {n: each.get("roc") for n, each in clients.items() if not _has_few(each, labels)}
    order = sorted(sites, key=lambda name: -clients[name]["examples"])[: MAX_CURVES - 1]
    curves |= {f"{name} ({positives[name]})": sites[name] for name in sites if name in order}
    series = [Series(name, tuple(map(tuple, points))) for name, points in curves.items() if points]
    if series:
        drawn = line_chart(
            f"ROC curve of the label {labels[1]!r}",
            series,
            x="false positive rate",
            y="true positive rate",
            expected=Series("chance", ((0.0, 0.0), (1.0, 1.0))),
            whole=False,
            from_zero=True,
            size=(480, 320),
        )
        some = f"In brackets: test examples of a client with the label {labels[1]!r}. " * bool(
            order
        )
        if len(sites) > len(order):
            some = f"The {len(order)} clients with most test examples. {some}"
        if few := len(clients) - len(sites):
            some += f"Without {few} clients that have fewer than {MIN_EXAMPLES} of either label. "
        yield PageFigure("roc", drawn, caption=f"{some}{caption}")
