# SPDX-License-Identifier: Apache-2.0
"""The tables of a run's test predictions are those that scikit-learn makes of the same rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn import metrics
from typer.testing import CliRunner

from fedplan.cli import app
from fedplan.data.evaluation import evaluate_predictions, youden_threshold
from fedplan.data.metrics import Metric, Predictions
from fedplan.data.tasks.kinds import make_task
from fedplan.federation.server import EVALUATION
from fedplan.reports.pages.run_report import report_page
from fedplan.reports.pages.test_scores import (
    _class_table,
    _figures,
    _site_table,
    evaluation_lines,
    metric_rows,
    metric_title,
)
from fedplan.runners.simulation import Simulation
from fedplan.studies.evaluation import evaluate_run, predict_all
from fedplan.studies.federation_sections import PrivacyConfig
from fedplan.studies.schema import ConfigError, study_from_dict

theirs: Any = metrics
VIT = {
    **{"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "intermediate_size": 16},
}


def scans(file: Path, labels: Sequence[Any]) -> None:
    """Images that are brighter the further their label is in the list; three hospitals."""
    draw, rows = np.random.default_rng(0), list[dict[str, Any]]()
    for number in range(180):
        place = int(draw.integers(len(labels)))
        pixels = draw.integers(0, 120, (8, 8)) + 40 * place
        stream = io.BytesIO()
        Image.fromarray(pixels.astype(np.uint8)).save(stream, "PNG")
        rows.append(
            {
                "image": stream.getvalue(),
                "finding": labels[place],
                "hospital": ["north", "south", "east"][number % 3],
                "patient": number // 2,
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), file)


def study(file: Path, **task: Any) -> dict[str, Any]:
    return {
        "name": "clinic",
        "model": {"type": "vit", "config": VIT},
        "task": {
            **{"kind": "image-classification", "input": "image", "label": "finding"},
            **{"image_size": 8, **task},
        },
        "data": {
            **{"path": str(file), "partition": "column", "partition_column": "hospital"},
            **{"num_clients": 3, "holdout_fraction": 0.4, "validation_fraction": 0.2},
            **{"group": "patient"},
        },
        "method": {"plan": "chain(share(), keep(head))"},
        "train": {"rounds": 2, "batch_size": 8, "lr": 1e-2},
        "evaluate": {"metrics": ["brier", "auprc"]},
    }


def test_a_runs_test_scores_are_those_of_scikit_learn(tmp_path: Path) -> None:
    scans(tmp_path / "scans.parquet", ["healthy", "ill"])
    fields = study(tmp_path / "scans.parquet")
    run = Simulation(study_from_dict(fields), tmp_path / "run").run()
    tables = json.loads((tmp_path / "run" / EVALUATION).read_text())
    evaluated = evaluate_run(tmp_path / "run")
    assert json.loads(json.dumps(evaluated.tables())) == tables
    assert [(each["model"], each["on"]) for each in tables["sets"]] == [
        ("personal", "clients"),
        ("global", "clients"),
    ]
    arguments = ["evaluate", str(tmp_path / "run"), "--predictions", str(tmp_path / "p.csv")]
    printed = CliRunner().invoke(app, arguments)
    assert printed.exit_code == 0 and "Personal models on the test examples" in printed.output
    with (tmp_path / "p.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    source = pq.read_table(tmp_path / "scans.parquet").to_pylist()
    for row in rows:
        origin = source[int(row["row"]) - 1]
        assert (origin["hospital"], origin["finding"]) == (row["client"], row["truth"])
    for entry in tables["sets"]:
        own = [row for row in rows if row["model"] == entry["model"]]
        truth, guess = ([row[side] for row in own] for side in ("truth", "predicted"))
        ill = np.array([float(row["p(ill)"]) for row in own])
        hits = np.array(truth) == "ill"
        chosen = ill >= entry["threshold"]
        expected = {
            "accuracy": theirs.accuracy_score(truth, guess),
            "f1": theirs.f1_score(truth, guess, average="macro"),
            "auroc": theirs.roc_auc_score(hits, ill),
            "auprc": theirs.average_precision_score(hits, ill),
            "brier": theirs.brier_score_loss(hits, ill),
            "sensitivity": theirs.recall_score(hits, chosen),
            "specificity": theirs.recall_score(~hits, ~chosen),
        }
        for name, value in expected.items():
            metric = entry["metrics"][name]
            assert metric["value"] == pytest.approx(value, abs=1e-12), name
            assert metric["low"] <= value <= metric["high"]
        assert entry["confusion"] == theirs.confusion_matrix(truth, guess).tolist()
        columns = theirs.precision_recall_fscore_support(truth, guess, zero_division=0)
        for name, column in zip(("precision", "recall", "f1", "support"), columns, strict=True):
            assert [each[name] or 0 for each in entry["classes"]] == pytest.approx(column.tolist())
        assert entry["chosen_on"] == "validation" and entry["groups"] < entry["examples"]
        assert (
            entry["examples"]
            == len(own)
            == sum(each["examples"] for each in entry["clients"].values())
        )
    last = run.metrics[-1]
    for name, client in tables["sets"][0]["clients"].items():
        assert client["metrics"]["accuracy"]["value"] == last[f"clients.{name}.accuracy"]
        assert client["metrics"]["auroc"]["value"] == last[f"clients.{name}.auroc"]
    html = report_page([tmp_path / "run"]).html()
    for text in ("Test scores", "Confusion matrix", "Calibration", "ROC curve", "95 % interval"):
        assert text in html
    assert any("accuracy" in line for line in evaluation_lines(tables))
    one = evaluate_run(tmp_path / "run", "north")
    assert {client for _, client in one.test} == {"north"}
    with pytest.raises(ConfigError, match="there is no client 'nord'"):
        evaluate_run(tmp_path / "run", "nord")
    hidden = run.study.model_copy(update={"privacy": PrivacyConfig.model_construct()})
    values = run.federation.global_values()
    args = (run.data, run.federation.model, run.federation.agreement, 2, values)
    assert predict_all(hidden, *args, run.federation.personal_values) is None


TABLES = {"primary": "accuracy", "answer_kind": "class", "labels": ["no", "yes"]}
"""The names that the rows of an evaluation are told with."""


def test_a_fraction_of_few_examples_has_a_wide_interval_and_rare_labels_no_area() -> None:
    """Of 14 positives none is found: Wilson's bounds, a calibration by P(yes), no bare AUROC."""
    truth = np.array([1] * 14 + [0] * 26)
    ill = np.linspace(0.01, 0.39, 40)
    made = Predictions(
        truth, np.zeros(40, int), np.stack([1 - ill, ill], 1), np.zeros(40), np.ones(40, int)
    )
    task = make_task("text-classification", columns="x", label="y", labels=["no", "yes"])
    entry = {"model": "personal", "on": "clients", **evaluate_predictions(task, made)}
    sensitivity = entry["metrics"]["sensitivity"]
    bounds = [round(sensitivity[name], 4) for name in ("value", "low", "high")]
    assert bounds == [0.0, 0.0, 0.2153], (
        "as statsmodels' proportion_confint(0, 14, method='wilson')"
    )
    assert [count for count, *_ in entry["calibration"]] == [10, 10, 10, 10] + [0] * 6
    assert entry["calibration"][0][2] == 1.0 and entry["calibration"][3][2] == 0.0
    halves = {"a": made.select(np.arange(0, 40, 2)), "b": made.select(np.arange(11, 40))}
    entry["clients"] = {
        name: evaluate_predictions(task, part, intervals=False) for name, part in halves.items()
    }
    rows = metric_rows(entry, TABLES)
    means = [each["metrics"]["accuracy"]["value"] for each in entry["clients"].values()]
    assert rows[0] == ("accuracy, mean of 2 clients", f"{sum(means) / 2:.3f}", "")
    assert rows[1][:2] == ("accuracy, all examples", "0.650") and "f1 (macro)" in dict(
        row[:2] for row in rows
    )
    *_, table, note = _site_table(entry, TABLES)
    told = dict(zip(table.values["columns"], table.values["rows"][1], strict=True))
    assert told["of these 'yes'"] == "3" and told["auroc"] == "\N{EN DASH}"
    assert "fewer than 5 examples" in note.values["text"]
    labels = {**TABLES, "answer_kind": "labels"}
    assert metric_title("accuracy", labels) == "accuracy (all labels right)"


@pytest.mark.parametrize("positives", [4, 5, 35, 36])
def test_few_examples_of_either_label_have_no_area_and_no_interval_of_it(positives: int) -> None:
    truth = np.array([1] * positives + [0] * (40 - positives))
    well = np.random.default_rng(0).random(40)
    made = Predictions(
        truth, (well > 0.5).astype(int), np.stack([1 - well, well], 1), well, np.ones(40, int)
    )
    task = make_task("text-classification", columns="x", label="y", labels=["well", "ill"])
    named = {**TABLES, "labels": list(task.labels)}
    whole = evaluate_predictions(task, made)
    entry = {"model": "personal", "on": "clients", **whole, "clients": {"a": whole, "b": whole}}
    few = positives in (4, 36)
    told = {title: between for title, _, between in metric_rows(entry, named)}
    between = told["auroc, positive label 'well'"], told["sensitivity, positive label 'well'"]
    assert (between[0] == "none: fewer than 5 examples with or without a label") == few
    assert "none" not in between[1] and ("low" in whole["metrics"]["auroc"]) != few
    for blocks in (_class_table(entry), _site_table(entry, named)):
        _, table, note = blocks
        at = table.values["columns"].index("auroc")
        assert all((row[at] == "\N{EN DASH}") == few for row in table.values["rows"])
        assert ("fewer than 5 examples with or without" in note.values["text"]) == few
    *_, roc = _figures(entry, named)
    assert ("Without 2 clients" in roc.caption) == few


def test_a_metric_that_is_no_fraction_of_examples_has_the_interval_of_resamples() -> None:
    values = np.random.default_rng(0).random(40)
    made = Predictions(values, values + 0.1, None, values, np.ones(40, int))
    task = make_task("regression", columns="x", label="y")
    percent = Metric("accuracy", lambda truth, guess: 100 * float(np.mean(guess)))
    told = evaluate_predictions(replace(task, extra_metrics=(percent,)), made)["metrics"]
    assert told["accuracy"]["low"] < told["accuracy"]["value"] < told["accuracy"]["high"]


def test_an_interval_draws_whole_groups_and_a_threshold_is_chosen_on_validation() -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 2, 60)
    ill = np.clip(0.2 * truth + draw.random(60) * 0.5, 0, 1)
    made = Predictions(
        truth,
        (ill > 0.5).astype(int),
        np.stack([1 - ill, ill], 1),
        np.zeros(60),
        np.ones(60, dtype=int),
    )
    task = make_task("text-classification", columns="x", label="y", labels=["no", "yes"])
    wide = evaluate_predictions(task, made, groups=[str(i // 10) for i in range(60)])
    few = evaluate_predictions(task, made, groups=[str(i // 15) for i in range(60)])["metrics"]
    assert wide["groups"] == 6 and "low" in wide["metrics"]["accuracy"]
    assert all("low" not in metric for metric in few.values()), "of four groups"
    told = metric_rows({"metrics": few}, TABLES)
    assert told[0][2] == "none: fewer than 5 groups"
    threshold = youden_threshold(made)
    best = evaluate_predictions(task, made, threshold=threshold)["metrics"]
    default = evaluate_predictions(task, made)["metrics"]
    sums = [
        sum(each[n]["value"] for n in ("sensitivity", "specificity")) for each in (best, default)
    ]
    assert sums[0] > sums[1]
    alone = made.select(np.flatnonzero(truth == 1))
    one_class = evaluate_predictions(task, alone)
    assert youden_threshold(alone) is None and "auroc" not in one_class["metrics"]
    assert "roc" not in one_class and one_class["classes"][0]["recall"] is None
