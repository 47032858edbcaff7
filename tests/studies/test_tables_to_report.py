# SPDX-License-Identifier: Apache-2.0
"""From an ordinary table to a correct report, by `new study` and `run` alone, at the first try."""

from __future__ import annotations

import csv
import io
import json
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import transformers as hf
from commands import run
from PIL import Image
from seqeval import metrics as seqeval
from sklearn import metrics as sk
from sklearn.calibration import calibration_curve
from tables import WORDS, tokenizer

from fedplan.data.tasks.kinds import task_class
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


def saved(number: int) -> str:
    """A picture in a file of the table's folder, by its path there."""
    Path("scans").mkdir(exist_ok=True)
    (file := Path("scans") / f"{number}.png").write_bytes(picture())
    return str(file)


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
        "text-classification", "class", ('# class_weights = "balanced"', '"recall_macro", "auprc"'),
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
    "images in files": Table(
        lambda: [{"scan": saved(n), "finding": "ab"[n % 2]} for n in range(60)],
        "image-classification", "finding", (), (), "image",
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
FEW = 5
"""With fewer examples of a label, a report has no area under a curve without an interval."""
DAY = ("five classes", "multi-label text", "images in files", "grouped by patient")


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


class ReportTables(HTMLParser):
    """The tables of a report as (last heading, rows of texts), and the titles of its marks."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tables, self.titles = list[tuple[str, list[list[str]]]](), list[tuple[str, str]]()
        self.text, self.heading, self.tag = page, "", ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tag = tag
        if tag == "table":
            self.tables.append((self.heading, []))
        elif tag == "tr":
            self.tables[-1][1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][1][-1].append("")
        elif tag == "h3":
            self.heading = ""

    def handle_endtag(self, tag: str) -> None:
        self.tag = ""

    def handle_data(self, data: str) -> None:
        if self.tag in ("td", "th"):
            self.tables[-1][1][-1][-1] += data
        elif self.tag == "h3":
            self.heading += data
        elif self.tag == "title":
            self.titles.append((self.heading, data))

    def rows(self, heading: str) -> list[dict[str, str]]:
        """The first table after a heading that starts so; a row is by column."""
        found = [rows for above, rows in self.tables if above.startswith(heading)]
        names, *rows = found[0] if found else [[]]
        return [dict(zip(names, row, strict=True)) for row in rows]


class Sheet:
    """Rows of the csv of predictions, as scikit-learn takes them."""

    def __init__(self, kind: str, rows: list[dict[str, str]]) -> None:
        self.kind, self.rows = kind, rows
        self.labels = [name[2:-1] for name in rows[0] if name.startswith("p(")]
        self.examples = len({(row["client"], row["example"]) for row in rows})
        self.shares = np.array([[float(row[f"p({n})"]) for n in self.labels] for row in rows])
        self.truth, self.guess = (
            self._side([r[name] for r in rows]) for name in ("truth", "predicted")
        )
        many = (
            self.truth
            if self.truth.ndim == 2
            else np.arange(len(self.labels)) == self.truth[:, None]
        )
        self.hits = many.astype(int)

    def _side(self, cells: list[str]) -> np.ndarray[Any, Any]:
        if self.kind == "regression":
            return np.array(cells, float)
        if "multi-label" in self.kind:
            return np.array(
                [[label in cell.split("|") for label in self.labels] for cell in cells], int
            )
        return np.array([self.labels.index(cell) for cell in cells])

    def area(self, column: int) -> float | None:
        hits = self.hits[:, column]
        return sk.roc_auc_score(hits, self.shares[:, column]) if 0 < sum(hits) < len(hits) else None

    def metrics(self) -> dict[str, float | None]:
        """All metrics of a task's report."""
        pair, many = (self.truth, self.guess), len(self.truth) > 1
        if self.kind == "regression":
            return {
                "loss": sk.mean_squared_error(*pair),
                "mae": sk.mean_absolute_error(*pair),
                "rmse": sk.root_mean_squared_error(*pair),
                "r2": sk.r2_score(*pair) if many else None,
                "pearson": np.corrcoef(*pair)[0, 1]
                if many and np.ptp(pair, 1).all()
                else 0.0
                if many
                else None,
            }
        areas = [self.area(i) for i in range(len(self.labels))]
        defined = [area for area in areas if area is not None]
        found = {
            "accuracy": sk.accuracy_score(*pair),
            "f1 (macro)": sk.f1_score(*pair, average="macro", zero_division=0),
            "recall (macro)": sk.recall_score(*pair, average="macro", zero_division=0),
        }
        if self.truth.ndim == 2:
            columns = zip(self.hits.T, self.shares.T, strict=True)
            return found | {
                "accuracy (all labels right)": found["accuracy"],
                "f1 (micro)": sk.f1_score(*pair, average="micro", zero_division=0),
                "auroc": np.mean(defined) if defined else None,
                "loss": np.mean([sk.log_loss(hits, p, labels=[0, 1]) for hits, p in columns]),
            }
        found |= {"loss": sk.log_loss(self.truth, self.shares, labels=range(len(self.labels)))}
        if self.kind == "token-classification":
            found["f1 (entities)"] = seqeval.f1_score(*self.sentences(), zero_division=1)
        if len(self.labels) == 2:
            found |= {"auroc": areas[1], "auprc": None}
            if areas[1] is not None:
                found["auprc"] = sk.average_precision_score(self.truth, self.shares[:, 1])
            for name, label in (("sensitivity", 1), ("specificity", 0)):
                known = label in self.truth
                found[name] = sk.recall_score(*pair, pos_label=label) if known else None
        return found

    def clients(self) -> dict[str, Sheet]:
        """The rows of each client."""
        groups = groupby(self.rows, lambda row: row["client"])
        return {client: Sheet(self.kind, list(rows)) for client, rows in groups}

    def primary(self) -> float:
        """The metric that a task is compared by."""
        names = {"regression": "rmse", "token-classification": "f1 (entities)"}
        usual = "f1 (micro)" if self.truth.ndim == 2 else "accuracy"
        return self.metrics()[names.get(self.kind, usual)] or 0.0

    def sentences(self) -> list[list[list[str]]]:
        """The true and the predicted tags of each example."""
        examples = [list(e) for _, e in groupby(self.rows, lambda r: (r["client"], r["example"]))]
        return [[[row[n] for row in rows] for rows in examples] for n in ("truth", "predicted")]

    def classes(self) -> list[dict[str, float | None]]:
        """Precision, recall, f1, AUROC and examples of each label."""
        scores = sk.precision_recall_fscore_support(
            *(self.truth, self.guess), labels=range(len(self.labels)), zero_division=np.nan
        )
        names = ("precision", "recall", "f1", "examples")
        rows = [dict(zip(names, column, strict=True)) for column in zip(*scores, strict=True)]
        many = [FEW <= sum(hits) <= len(hits) - FEW for hits in self.hits.T]
        return [row | {"auroc": self.area(i) if many[i] else None} for i, row in enumerate(rows)]

    def confusion(self) -> list[list[int]]:
        return sk.confusion_matrix(self.truth, self.guess, labels=range(len(self.labels))).tolist()

    def calibration(self) -> list[tuple[float, float]]:
        """Confidence and frequency of each filled bin."""
        sure, right = self.shares.ravel(), self.hits.ravel()
        if self.truth.ndim == 1:
            sure, right = self.shares.max(1), self.shares.argmax(1) == self.truth
            if len(self.labels) == 2:
                sure, right = self.shares[:, 1], self.truth
        frequency, confidence = calibration_curve(right, sure, n_bins=10)
        return list(zip(confidence, frequency, strict=True))

    def roc(self) -> list[tuple[float, float]]:
        false, true, _ = sk.roc_curve(self.truth, self.shares[:, 1])
        return list(zip(false, true, strict=True))


def same(text: str, value: float | None) -> bool:
    """Whether a text of a report is the number, in the digits that it shows."""
    if value is None or np.isnan(value):
        return text == "\N{EN DASH}"
    return float(text.replace(",", "")) == pytest.approx(value, abs=6e-4, rel=6e-4)


def check_test_scores(page: ReportTables, kind: str, rows: list[dict[str, str]]) -> None:
    """Recompute every number of a report's test scores from the csv of predictions."""
    sheets = {
        model: Sheet(kind, [row for row in rows if row["model"] == model])
        for model in ("personal", "global")  # in the order of the report
        if any(row["model"] == model for row in rows)
    }
    first, whole = next(iter(sheets.values())), sheets["global"]
    for model, sheet in sheets.items():
        known = sheet.metrics()
        title = "Personal models on" if model == "personal" else "Global model on"
        heading = next(above for above, _ in page.tables if above.startswith(title))
        assert f"{sheet.examples:,} test examples" in heading
        for row in page.rows(title):
            name, _, of = row["metric"].partition(", ")
            value = known[name]
            if of.startswith("mean of"):
                value = float(np.mean([each.primary() for each in sheet.clients().values()]))
            assert same(row["value"], value), (model, row)
            if " to " in row["95 % interval"]:
                low, high = map(float, row["95 % interval"].split(" to "))
                assert low <= float(row["value"]) <= high
    by_client = first.clients()
    clients = page.rows("Clients") if len(by_client) > 1 else []
    assert [row["client"] for row in clients] == (list(by_client) if len(by_client) > 1 else [])
    for row in clients:
        sheet = by_client[row.pop("client")]
        known = sheet.metrics() | {"examples": sheet.examples}
        if len(sheet.labels) == 2 and sheet.truth.ndim == 1:
            positives = int(sum(sheet.truth))
            known |= {f"of these {sheet.labels[1]!r}": positives}
            if min(positives, len(sheet.truth) - positives) < FEW:
                known |= {"auroc": None, "auprc": None}
        for name, text in row.items():
            assert same(text, known[name]), (name, row)
    marks = {
        heading: [text for above, text in page.titles if above == heading]
        for heading, _ in page.titles
    }
    primary, better = task_class(kind).primary, task_class(kind).higher_is_better
    own = {client: sheet.primary() for client, sheet in by_client.items()}
    worst = (min if better else max)(own.values())
    for heading, values in (
        ("by round", {"global": whole.primary(), "worst client": worst}),
        ("of each client by round", own),
    ):
        shown = dict(text.split(", 1: ") for text in marks[f"{primary.capitalize()} {heading}"])
        assert shown.keys() == values.keys()
        assert all(same(text, values[name]) for name, text in shown.items()), shown
    mean = float(np.mean(list(own.values())))
    assert f"mean of all {len(own)} clients: {mean:.3f}" in page.text
    if kind == "regression":
        return
    classes = page.rows("Classes")
    assert [row.pop("class") for row in classes] == first.labels
    for row, known in zip(classes, first.classes(), strict=True):
        assert all(same(text, known[name]) for name, text in row.items()), (row, known)
    if first.truth.ndim == 1:
        counts = {
            f"{true} as {guess}": first.confusion()[i][j]
            for i, true in enumerate(first.labels)
            for j, guess in enumerate(first.labels)
        }
        shown = dict(text.split(" (")[0].rsplit(": ", 1) for text in marks["Confusion matrix"])
        assert {name: int(count.replace(",", "")) for name, count in shown.items()} == counts
    for heading, name, points in (
        ("Calibration", "model", first.calibration() if len(first.calibration()) > 1 else []),
        (
            f"ROC curve of the label {first.labels[1]!r}",
            "all",
            first.roc() if len(first.labels) == 2 and len(by_client) > 1 else [],
        ),
    ):
        texts = [
            text.removeprefix(f"{name}, ")
            for text in marks.get(heading, [])
            if text.startswith(f"{name}, ")
        ]
        drawn = [tuple(map(float, text.split(": "))) for text in texts]
        assert drawn == [pytest.approx(point, abs=6e-4) for point in points], heading


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in DAY else [pytest.mark.nightly]) for n in TABLES]
)
def test_a_table_becomes_a_report_at_the_first_try(
    name: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    hf_logger = logging.getLogger("transformers")
    monkeypatch.setattr(hf_logger, "handlers", [*hf_logger.handlers, caplog.handler])
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
    assert "LOAD REPORT" not in caplog.text or not table.notes
    for command in (
        ("report", "run", "-o", "report.html"),
        ("evaluate", "run", "--predictions", "predictions.csv"),
    ):
        code, out = run(*command)
        assert code == 0, out
    with Path("predictions.csv").open(encoding="utf-8", newline="") as stream:
        check_test_scores(
            ReportTables(Path("report.html").read_text()), table.kind, list(csv.DictReader(stream))
        )
