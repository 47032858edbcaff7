# SPDX-License-Identifier: Apache-2.0
"""Test scores of a run: lines for the terminal; metrics, classes, sites and curves of a report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import fsum
from typing import Any

from fedplan.data.evaluation import MIN_EXAMPLES
from fedplan.reports.figures.charts import Series, line_chart
from fedplan.reports.figures.grids import matrix_chart
from fedplan.reports.pages.facts import RunFacts
from fedplan.reports.pages.page import WIDTHS, PageBlock, PageFigure, PageSection, block
from fedplan.studies.evaluation import absence_reason, read_evaluation
from fedplan.studies.run_scores import score_text, untrained_note

UNDEFINED = "\N{EN DASH}"
"""The text of a number that is not defined."""
MAX_CLASSES, MAX_MATRIX, MAX_SITES, MAX_CURVES = 40, 20, 40, 6
"""The most classes in a table and in a confusion matrix, sites in a table, and curves of sites."""
FEW_EXAMPLES = (
    f"; no area under a curve for fewer than {MIN_EXAMPLES} examples with or without a label"
)
SMALL_MATRIX = 6
"""The most classes of a confusion matrix that takes half the width of the page."""


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
