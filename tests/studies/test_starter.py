# SPDX-License-Identifier: Apache-2.0
"""From a table to a study that runs: what `new study` finds, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import transformers as hf
from commands import run
from datasets import Dataset, DatasetDict
from tables import row, tokenizer, written

from fedplan.data.schema_inference import infer_schema
from fedplan.data.tables import split_names
from fedplan.errors import FedplanError
from fedplan.studies.schema import read_study
from fedplan.studies.starter import StudyOptions, new_study

TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tiny models with what reads their input, and rows of all columns."""
    folder = tmp_path_factory.mktemp("starter")
    words = hf.AutoTokenizer.from_pretrained(tokenizer(folder))
    size = {"vocab_size": len(words), "max_position_embeddings": 32}
    hf.BertModel(hf.BertConfig(**TINY, **size)).save_pretrained(folder / "bert")
    words.save_pretrained(folder / "bert")
    config = hf.GPT2Config(n_embd=16, n_layer=1, n_head=2, n_positions=32, vocab_size=len(words))
    hf.GPT2LMHeadModel(config).save_pretrained(folder / "gpt")
    words.save_pretrained(folder / "gpt")
    hf.ViTModel(hf.ViTConfig(**TINY, image_size=8, patch_size=4)).save_pretrained(folder / "vit")
    return folder


def texts(count: int = 60) -> list[dict[str, object]]:
    """Rows as people have them: a review, its mood, the ward it is of."""
    rows = [row(number) for number in range(count)]
    return [
        {"review": f"{r['text']} {n}", "mood": r["mood"], "ward": r["site"]}
        for n, r in enumerate(rows)
    ]


def test_a_csv_becomes_a_study_that_runs_and_verifies(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written(texts(), Path("reviews.csv"))
    code, out = run("new", "study", "reviews.csv", "--model", str(place / "bert"))
    assert code == 0, out
    for word in (
        "60 training examples",
        "input   review",
        "label   mood: 3 values",
        "clients by the column ward",
    ):
        assert word in out
    text = Path("study.toml").read_text()
    assert text.count("#") > 8 and 'path = "reviews.csv"' in text
    code, out = run("data", "study.toml")
    assert code == 0 and "3 clients" in out, out
    code, out = run("run", "study.toml", "--output", "out", "--set", "train.rounds=1")
    assert code == 0, out
    assert run("verify", "out")[0] == 0


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_the_same_is_found_in_every_form(place: Path, tmp_path: Path, ending: str) -> None:
    file = written(texts(), tmp_path / f"rows.{ending}")
    new_study(file, str(place / "bert"), tmp_path / "study.toml")
    study = read_study(tmp_path / "study.toml")
    assert (study.task.kind, study.task.input, study.task.label) == (
        *("text-classification", "review", "mood"),
    )
    assert (study.data.partition, study.data.partition_column) == ("column", "ward")


def test_splits_pictures_numbers_conversations_and_plain_texts(place: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    arrays = {
        f"image_{s}": draw.integers(0, 255, (30, 8, 8), dtype=np.uint8) for s in ("train", "test")
    }
    labels = {f"digit_{s}": draw.integers(0, 3, 30) for s in ("train", "test")}
    np.savez(tmp_path / "digits.npz", **arrays, **labels)
    new_study(str(tmp_path / "digits.npz"), str(place / "vit"), tmp_path / "a.toml")
    found = read_study(tmp_path / "a.toml")
    assert (found.task.kind, found.task.image_size) == ("image-classification", 8)
    assert (found.data.split, found.data.test_split) == ("train", "test")

    rows = [
        {"text": f"{r['text']} {n}", "score": 0.5 + n} for n, r in enumerate(map(row, range(40)))
    ]
    new_study(written(rows, tmp_path / "n.jsonl"), str(place / "bert"), tmp_path / "b.toml")
    assert read_study(tmp_path / "b.toml").task.kind == "regression"

    rows = [{"prompt": "a cat", "response": f"the dog {n}"} for n in range(40)]
    new_study(written(rows, tmp_path / "c.jsonl"), str(place / "gpt"), tmp_path / "c.toml")
    found = read_study(tmp_path / "c.toml").task
    assert (found.kind, found.input) == ("instruction", "prompt response")

    rows = [{"text": f"the cat sat on a mat {n}"} for n in range(40)]
    new_study(written(rows, tmp_path / "t.jsonl"), str(place / "gpt"), tmp_path / "d.toml")
    assert read_study(tmp_path / "d.toml").task.kind == "causal-lm"


def test_a_saved_dataset_and_a_folder_of_files_have_their_splits(tmp_path: Path) -> None:
    table = Dataset.from_list(
        [{"text": f"cat {n} sat on the mat", "label": n % 2} for n in range(20)]
    )
    DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "saved"))
    found = infer_schema(str(tmp_path / "saved"))
    assert (found.train, found.test, found.label_column(["text"])) == ("train", "test", "label")
    folder = tmp_path / "files"
    folder.mkdir()
    for name in ("train-0", "validation"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, table.to_list())))
    assert split_names(str(folder)) == ["train", "validation"]


def test_of_very_many_users_those_with_most_rows_are_taken(place: Path, tmp_path: Path) -> None:
    rows = [
        {"text": f"the cat sat on a mat {n}", "label": n % 2, "user": f"u{n % 300}"}
        for n in range(900)
    ]
    new_study(written(rows, tmp_path / "rows.jsonl"), str(place / "bert"), tmp_path / "study.toml")
    found = read_study(tmp_path / "study.toml").data
    assert (found.partition, found.partition_column, found.num_clients) == ("column", "user", 100)


def test_what_is_said_goes_before_what_is_found(place: Path, tmp_path: Path) -> None:
    file = written(texts(), tmp_path / "rows.csv")
    said = StudyOptions(label="ward", client="mood", method="fedper")
    new_study(file, str(place / "bert"), tmp_path / "study.toml", said)
    found = read_study(tmp_path / "study.toml")
    assert (found.task.label, found.data.partition_column, found.method.name) == (
        "ward",
        "mood",
        "fedper",
    )
    new_study(
        file,
        str(place / "bert"),
        tmp_path / "b.toml",
        StudyOptions(task="causal-lm", client="ward"),
    )


@pytest.mark.parametrize(
    ("change", "said", "words"),
    [
        ({}, {"input": "reveiw"}, ["no column 'reveiw'", "review, mood, ward"]),
        ({}, {"label": "moods"}, ["no column 'moods'"]),
        ({}, {"label": "review"}, ["'review' has 60 different values", "do not look like classes"]),
        ({}, {"method": "fedperr"}, ["no method 'fedperr'", "did you mean fedper?"]),
        ({}, {"task": "text-clasification"}, ["did you mean text-classification?"]),
        ({"mood": None}, {"label": "mood"}, ["'mood'", "in any of its first 60", "name another"]),
    ],
)
def test_what_does_not_fit_is_refused_and_nothing_is_written(
    place: Path, tmp_path: Path, change: dict[str, None], said: dict[str, str], words: list[str]
) -> None:
    file = written([{**each, **change} for each in texts()], tmp_path / "rows.jsonl")
    with pytest.raises(FedplanError) as refused:
        new_study(
            file,
            str(place / "bert"),
            tmp_path / "study.toml",
            StudyOptions(label="mood", **said) if "label" not in said else StudyOptions(**said),
        )
    for word in words:
        assert word in str(refused.value)
    assert not (tmp_path / "study.toml").exists()


def rows_with(**columns: list[object]) -> list[dict[str, object]]:
    """Forty reviews with further columns, whose values come in turn."""
    return [
        {"review": f"{row(n)['text']} {n}", **{name: v[n % len(v)] for name, v in columns.items()}}
        for n in range(40)
    ]


def test_unknown_outcomes_unequal_classes_and_lost_rows_are_told(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NA and a question mark are no outcomes: the study says how to leave them out, and does it."""
    monkeypatch.chdir(tmp_path)
    outcomes = ["alive"] * 17 + ["NA", "?", "died", ""]
    rows = [
        {
            "review": f"cat {n}",
            "outcome": outcomes[n % 21],
            "ward": "abc"[n % 3] if n % 10 else "",
        }
        for n in range(210)
    ]
    written(rows, tmp_path / "rows.csv")
    code, out = run("new", "study", "rows.csv", "--model", str(place / "bert"))
    assert code == 0 and "caution '?', 'NA': a class of its own here" in out, out
    assert "caution 85% of rows have one label" in out
    assert "30 of 210 are left out" in out and "at 3 clients" in out
    text = Path("study.toml").read_text()
    Path("study.toml").write_text(text.replace("# filter", "filter"))
    assert "from left to right: alive, died\n" in run("data", "study.toml")[1]


def test_a_label_that_may_be_one_of_several_is_asked_for(place: Path, tmp_path: Path) -> None:
    rows = rows_with(**{"sex": ["f", "m"], "own ward": ["a", "b", "c"], "born": ["2020-01-02"]})
    file = written(rows, tmp_path / "rows.csv")
    with pytest.raises(FedplanError) as asked:
        new_study(file, str(place / "bert"), tmp_path / "study.toml")
    assert "sex (class, 2 values), own ward (class, 3 values)" in str(asked.value)
    assert str(asked.value).endswith("\n  --label sex\n  --label 'own ward'")
    new_study(file, str(place / "bert"), tmp_path / "study.toml", StudyOptions(label="own ward"))
    assert read_study(tmp_path / "study.toml").task.label == "own ward"


@pytest.mark.parametrize(
    ("columns", "label", "kind"),
    [
        ({"date": ["2024-01-02", "2024-02-03"], "los": [1.5, 2.25, 7.0]}, "los", "regression"),
        ({"visit": ["3.4.2021", "5.6.2022 10:30"], "year": [2021, 2022], "mood": ["a", "b"]}, "mood", "text-classification"),
        ({"target": [0.5, 1.5], "sex": ["f", "m"]}, "target", "regression"),
        ({"patient_id": ["p", "q", "r"], "case_no": [1, 2], "mood": ["a", "b"]}, "mood", "text-classification"),
        ({"tags": ["a|b", "a", "b", "c|a", None], "sex": ["f", "m"]}, "tags", "multi-label"),
        ({"age": list(range(40)), "mood": ["a", "b"]}, "mood", "text-classification"),
        ({"note": ["good, but long", "bad, short", "good, short"]}, "note", "text-classification"),
    ],
)  # fmt: skip
def test_which_column_is_the_label(
    columns: dict[str, list[object]], label: str, kind: str, place: Path, tmp_path: Path
) -> None:
    file = written(rows_with(**columns), tmp_path / "rows.parquet")
    new_study(file, str(place / "bert"), tmp_path / "study.toml")
    study = read_study(tmp_path / "study.toml")
    assert (study.task.label, study.task.kind) == (label, kind)
    assert study.task.label_separator == ("|" if label == "tags" else "")
    assert study.data.group == ("patient_id" if "patient_id" in columns else "")
