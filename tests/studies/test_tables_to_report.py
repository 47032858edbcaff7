# SPDX-License-Identifier: Apache-2.0
"""From an ordinary table to a correct report, by `new study` and `run` alone, at the first try."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import transformers as hf
from commands import run
from PIL import Image
from sklearn import metrics as sk
from tables import WORDS, tokenizer

from fedplan.data.tasks.kinds import task_class
from fedplan.runners.simulation import Simulation
from fedplan.studies.run import read_run_study
from fedplan.studies.schema import read_study

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
DRAW = random.Random(0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of two labels: one of texts, one that tags words, and one of images."""
    folder = tmp_path_factory.mktemp("models")
    words = hf.AutoTokenizer.from_pretrained(tokenizer(folder))
    config = hf.BertConfig(**TINY, vocab_size=len(words), max_position_embeddings=32)
    for name, kind in (
        ("text", hf.BertForSequenceClassification),
        ("tags", hf.BertForTokenClassification),
    ):
        kind(config).save_pretrained(folder / name)
        words.save_pretrained(folder / name)
    vit = hf.ViTConfig(**TINY, image_size=8, patch_size=4)
    hf.ViTForImageClassification(vit).save_pretrained(folder / "image")
    return folder


def text(words: int = 6) -> str:
    return " ".join(DRAW.choices(WORDS, k=words))


def picture() -> bytes:
    made = io.BytesIO()
    Image.frombytes("RGB", (4, 4), DRAW.randbytes(48)).save(made, "PNG")
    return made.getvalue()


def some(labels: list[str]) -> list[str]:
    return [label for label in labels if DRAW.random() < 0.4]


@dataclass(frozen=True)
class Table:
    """Rows as somebody has them, and what a study of these says and a run notes."""

    rows: Callable[[], list[dict[str, Any]]]
    kind: str
    label: str
    says: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    model: str = "text"
    file: str = "table.csv"


def _visits() -> list[dict[str, Any]]:
    """Visits of 25 patients, with one diagnosis each."""
    ill = {number: DRAW.choice(["ill", "well"]) for number in range(25)}
    patients = [DRAW.randrange(25) for _ in range(120)]
    return [{"patient_id": f"P{n}", "note": text(), "diagnosis": ill[n]} for n in patients]


TABLES = {
    "binary": Table(
        lambda: [{"id": n, "text": text(), "label": DRAW.choice(["no", "yes"])} for n in range(80)],
        "text-classification", "label", ('partition = "dirichlet"',),
    ),
    "five classes": Table(
        lambda: [{"review": text(), "stars": DRAW.randint(1, 5)} for _ in range(100)],
        "text-classification", "stars", (),
        ("has a head of 2 outputs, and the task needs 5: the head is made anew",),
    ),
    "imbalanced": Table(
        lambda: [{"text": text(), "class": "rare" if n % 16 == 0 else "usual"} for n in range(160)],
        "text-classification", "class",
    ),
    "float target": Table(
        lambda: [
            {"admitted": f"2024-{1 + n % 12:02}-{1 + n % 28:02}", "note": text(), "days_in_ward": n % 9 + 0.5}
            for n in range(90)
        ],
        "regression", "days_in_ward", (), ("has a head of 2 outputs, and the task needs 1",),
    ),
    "multi-label text": Table(
        lambda: [{"report": text(), "findings": "; ".join(some(["fever", "cough", "pain"]))} for _ in range(90)],
        "multi-label", "findings", ('label_separator = ";"', 'partition = "iid"'),
    ),
    "multi-label images": Table(
        lambda: [{"image": picture(), "findings": some(["mass", "node", "scar"])} for _ in range(60)],
        "image-multi-label", "findings", (), (), "image", "table.parquet",
    ),
    "tokens": Table(
        lambda: [
            {"words": (words := text().split()), "tags": ["B-pet" if w in ("cat", "dog") else "O" for w in words]}
            for _ in range(60)
        ],
        "token-classification", "tags", (), (), "tags", "table.jsonl",
    ),
    "missing values": Table(
        lambda: [
            {"text": text() if n % 11 else "", "label": DRAW.choice("ab") if n % 7 else ""} for n in range(100)
        ],
        "text-classification", "label", (), ("23 of 100 training rows lack a value ('text': 10, 'label': 15)",),
    ),
    "dates": Table(
        lambda: [
            {"date": f"{1 + n % 28}.{1 + n % 12}.2023", "year": 2000 + n % 5, "text": text(),
             "outcome": DRAW.choice(["died", "left"]), "sex": DRAW.choice("fm")}
            for n in range(80)
        ],
        "text-classification", "outcome",
    ),
    "unicode": Table(
        lambda: [{"Befund Text": f"{text()} 🩺", "Beurteilung": DRAW.choice(["günstig", "ungünstig"])} for _ in range(80)],
        "text-classification", "Beurteilung", ('input = ["Befund Text"]', "günstig, ungünstig"),
    ),
    "one class per client": Table(
        lambda: [{"text": text(), "label": "abc"[n % 3], "hospital": ["north", "south", "east"][n % 3]} for n in range(90)],
        "text-classification", "label", ('partition = "column"', 'partition_column = "hospital"'),
    ),
    "tiny": Table(
        lambda: [{"text": f"{text()} {n}", "label": "ab"[n % 2]} for n in range(12)],
        "text-classification", "label", ("num_clients = 2",),
    ),
    "grouped by patient": Table(
        _visits, "text-classification", "diagnosis", ('group = "patient_id"',)
    ),
}  # fmt: skip
DAY = ("five classes", "multi-label text", "grouped by patient")


def write(rows: list[dict[str, Any]], file: Path) -> None:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    elif file.suffix == ".jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        with file.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


def predictions() -> list[dict[str, str]]:
    """What the global model says of each client's test examples, as the csv of predictions."""
    simulation = Simulation(read_run_study(Path("run")), Path("run"))
    task, model, rows = simulation.data.task, simulation.global_model(), list[dict[str, str]]()

    def cell(value: Any) -> str:
        if task.answer_kind == "labels":
            return "|".join(name for name, has in zip(task.labels, value, strict=True) if has)
        return task.labels[value] if task.answer_kind == "class" else str(float(value))

    for client, examples in simulation.data.client_tests.items():
        found = task.predict(model, examples, batch_size=64)
        head = {"client": client} | {f"p({label})": "" for label in task.labels}
        for truth, guess in zip(found.truth, found.predicted, strict=True):
            rows.append({**head, "truth": cell(truth), "predicted": cell(guess)})
    return rows


def recompute(kind: str, rows: list[dict[str, str]]) -> dict[str, float]:
    """The scores of exported predictions, by scikit-learn alone."""
    truth, guess = [row["truth"] for row in rows], [row["predicted"] for row in rows]
    if kind == "regression":
        numbers = [list(map(float, each)) for each in (truth, guess)]
        return {
            "mae": sk.mean_absolute_error(*numbers),
            "rmse": sqrt(sk.mean_squared_error(*numbers)),
        }
    if "multi-label" in kind:
        labels = [name[2:-1] for name in rows[0] if name.startswith("p(")]
        hot = [
            [[label in cell.split("|") for label in labels] for cell in each]
            for each in (truth, guess)
        ]
        return {
            "accuracy": sk.accuracy_score(*hot),
            "f1_micro": sk.f1_score(*hot, average="micro", zero_division=0),
        }
    return {"accuracy": sk.accuracy_score(truth, guess)}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DAY else [pytest.mark.nightly]) for n in TABLES]
)
def test_a_table_becomes_a_report_at_the_first_try(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = TABLES[name]
    DRAW.seed(name)
    write(table.rows(), Path(table.file))
    code, out = run("new", "study", table.file, "--model", str(models / table.model))
    assert code == 0, out
    study, written = read_study(Path("study.toml")), Path("study.toml").read_text()
    assert (study.task.kind, study.task.label) == (table.kind, table.label)
    assert all(words in written for words in table.says), written
    code, out = run("run", "study.toml", "--output", "run", "--set", "train.rounds=1")
    assert code == 0, out
    assert all(words in " ".join(out.split()) for words in table.notes), out
    code, out = run("report", "run", "-o", "report.html")
    assert code == 0, out

    rows = predictions()
    scores = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1])
    by_client = {client: list(each) for client, each in groupby(rows, lambda row: row["client"])}
    assert by_client.keys() == scores["clients"].keys()
    for client, each in by_client.items():
        for metric, value in recompute(table.kind, each).items():
            assert scores["clients"][client][metric] == pytest.approx(value, abs=1e-6), client
    report, primary = Path("report.html").read_text(), task_class(table.kind).primary
    for metric, value in recompute(table.kind, rows).items():
        assert scores["global"][metric] == pytest.approx(value, abs=1e-6)
        assert metric != primary or f"{value:.3f}" in report
