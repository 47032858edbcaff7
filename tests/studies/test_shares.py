# SPDX-License-Identifier: Apache-2.0
"""Shares: no row is tested on, anywhere, that some client trains on; and odd data are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf
import zoo
from commands import run
from datasets import ClassLabel, Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import LANGUAGE, MOODS, Row, cases, row, seen, study, tokenizer, written

from fedplan.data.tables import DataError, load_table
from fedplan.data.tasks.language import require_attention_mask
from fedplan.federation.ledger.digests import examples_digest
from fedplan.studies.federated_data import FederatedData, compute_split, load_federated_data
from fedplan.studies.schema import ConfigError

ROWS = [*map(row, range(30)), row(3, fold=1), row(3, fold=2), row(7, fold=3), row(9), row(9)]
"""Some are equal in all that a task sees, and differ in their fold; some are equal in all."""
WAYS: dict[str, Row] = {
    "no test": {},
    "no test, one client": {"num_clients": 1, "min_examples": 0},
    "no own test": {"holdout_fraction": 0.0},
    "folds": {"train_filter": {"fold": 1}, "test_filter": {"fold": 2}},
    "folds that overlap": {"test_filter": {"fold": 2}},
    "a test of few": {"test_filter": {"fold": 2}, "max_test_examples": 3},
    "few rows": {"test_filter": {"fold": 2}, "max_examples": 12},
    "to choose on": {"validation_fraction": 0.4, "test_filter": {"fold": 2}},
    "another file": {"test_path": "other.parquet"},
    "another form": {"test_path": "other.csv"},
    "one mood": {"filter": {"mood": ["calm"]}, "test_filter": {"fold": 2}, "min_examples": 0},
    "by site": {
        "partition": "column",
        "partition_column": "site",
        "test_filter": {"fold": 2},
        "holdout_fraction": 0.5,
    },
}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer(tmp_path_factory.mktemp("words"))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    written(ROWS, tmp_path / "t.parquet")
    for form in ("parquet", "csv"):
        written([row(2), row(4), *map(row, range(100, 110))], tmp_path / f"other.{form}")
    return tmp_path


def require_independent_examples(shares: FederatedData) -> None:
    """The law: what is trained on, by whomever, is in no test."""
    trained = set[str]().union(*(seen(rows) for rows in shares.train.values()))
    tests, validations = (
        [*own.values(), *([common] if common else [])]
        for own, common in (
            (shares.client_tests, shares.common_test),
            (shares.client_validations, shares.common_validation),
        )
    )
    chosen = set[str]().union(*map(seen, validations))
    for tested in (*tests, *validations):
        assert not trained & set(seen(tested))
    for tested in tests:
        assert not chosen & set(seen(tested))


@pytest.mark.parametrize(("kind", "way"), cases(WAYS, day=("a test of few", "by site")))
def test_no_row_is_tested_on_that_is_trained_on(
    kind: str, way: str, words: str, files: Path
) -> None:
    data = {"path": "t.parquet", "num_clients": 3, **WAYS[way]}
    if way == "another form" and kind not in ("text-classification", "regression", *LANGUAGE):
        return  # a .csv holds no lists and no pictures
    task = {"max_length": 16}  # so that each text is one block: of longer ones, ends may be equal
    for own in (None, ("north", load_table("t.parquet"))):
        if own:
            sites = {"path": "", "test_path": data.get("test_path", "t.parquet")}
            data = data | (sites if "test_filter" in data or "test_path" in data else {"path": ""})
            task |= {"label": ""} if kind in LANGUAGE else {}
            asked = study(kind, words, task=task, data=data, clients={"names": ["north"]})
        else:
            asked = study(kind, words, task=task, data=data)
        shares = load_federated_data(asked, own)
        require_independent_examples(shares)
        assert (shares.common_test is not None) == bool(
            {"test_filter", "test_path"} & WAYS[way].keys()
        )
        assert (shares.common_test is None) == any(
            "No common test" in note for note in shares.notes
        )
        left = any("are in the common test set too" in note for note in shares.notes)
        assert left == (shares.common_test is not None) or way == "few rows"
        assert sum(map(len, shares.train.values()))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 20), min_size=3, max_size=20),
    st.lists(st.integers(0, 25), min_size=1, max_size=8),
    st.sampled_from([0.0, 0.2, 0.7]),
    st.integers(0, 2**31),
)
def test_any_two_tables_are_kept_apart(
    words: str,
    tmp_path_factory: pytest.TempPathFactory,
    train: list[int],
    test: list[int],
    own_test: float,
    seed: int,
) -> None:
    folder = tmp_path_factory.getbasetemp()
    paths = [
        written([row(n) for n in numbers], folder / f"{name}.jsonl")
        for name, numbers in (("train", train), ("test", test))
    ]
    data = {
        "path": paths[0],
        "test_path": paths[1],
        "holdout_fraction": own_test,
        "num_clients": 2,
        "min_examples": 0,
    }
    asked = study("text-classification", words, data=data).model_copy(update={"seed": seed})
    try:
        shares = load_federated_data(asked, None)
    except DataError as error:
        assert "are in the common test set" in str(error) or "no training example" in str(error)
        return
    require_independent_examples(shares)
    assert shares.common_test is not None and len(shares.common_test) == len(test), (
        "the test stays as it is"
    )
    kept = sum(len(rows) for s in (shares.train, shares.client_tests) for rows in s.values())
    assert kept <= sum(n not in test for n in train)


@pytest.mark.parametrize(
    ("data", "words_said"),
    [
        ({"test_path": "t.parquet"}, "all 35 training rows are in the common test set too"),
        ({"test_filter": {"fold": 9}}, "no row with fold = 9"),
        (
            {"path": "", "test_filter": {"fold": 2}},
            "data.test_filter needs a dataset: set data.test_path",
        ),
        (
            {"filter": {"mood": ["glad"]}},
            "data.filter has mood = 'glad', and no row has that; there are calm",
        ),
        (
            {"num_clients": 12, "max_examples": 24, "holdout_fraction": 0.9},
            "in 100 draws, .* gave each of 12 clients 2 examples",
        ),
    ],
)
def test_a_test_that_cannot_be_is_refused(
    data: Row, words_said: str, words: str, files: Path
) -> None:
    said: Row = {"data": {"path": "t.parquet", "num_clients": 3, **data}}
    if not said["data"]["path"]:
        said["clients"] = {"names": ["north"]}
    with pytest.raises(DataError, match=words_said):
        load_federated_data(study("text-classification", words, **said), None)


def test_a_client_without_rows_to_train_on_is_told(words: str, files: Path) -> None:
    data = {"path": "t.parquet", "num_clients": 30, "holdout_fraction": 0.5, "min_examples": 0}
    shares = load_federated_data(study("text-classification", words, data=data), None)
    assert all(len(rows) for rows in shares.train.values()) and len(shares.train) < 30
    assert shares.client_tests.keys() <= shares.train.keys()
    assert f"{30 - len(shares.train)} clients have no training example" in shares.notes[1]
    with pytest.raises(DataError, match="north has no training example: all are held out"):
        asked = study(
            "text-classification",
            words,
            data={"holdout_fraction": 0.999},
            clients={"names": ["north"]},
        )
        load_federated_data(asked, ("north", load_table("t.parquet")))


def test_marks_tell_rows_apart(words: str, files: Path) -> None:
    asked = study("masked-lm", words, data={"path": "t.parquet", "num_clients": 3})
    one, other = (
        load_federated_data(asked, None),
        load_federated_data(asked.model_copy(update={"seed": 1}), None),
    )
    assert one.digests == {name: examples_digest(rows) for name, rows in one.train.items()}
    assert one.digests == load_federated_data(asked, None).digests != other.digests


def test_names_that_a_column_declares_are_its_labels(words: str, files: Path) -> None:
    table = Dataset.from_list([{n: row(i)[n] for n in ("text", "mood")} for i in range(20)])
    table = table.cast_column("mood", ClassLabel(names=MOODS))
    named = {"privacy": {"unit": "example", "epsilon": 8.0, "examples_per_site": 20}}
    table.save_to_disk("named")
    data = {"path": "named", "num_clients": 2}
    shares = load_federated_data(
        study("text-classification", words, task={"labels": []}, data=data, **named), None
    )
    assert shares.task.labels == tuple(sorted(MOODS))


def play(study_text: str, *changes: str) -> tuple[int, str]:
    Path("study.toml").write_text(study_text)
    return run("run", "study.toml", *(part for each in changes for part in ("--set", each)))


TEXTS = """
name = "texts"
[model]
type = "bert"
config = { vocab_size = 15, hidden_size = 16, num_hidden_layers = 1, num_attention_heads = 2, intermediate_size = 16, max_position_embeddings = 8 }
[task]
kind = "text-classification"
label = "mood"
max_length = 8
tokenizer = "tokenizer"
[data]
path = "rows.csv"
num_clients = 2
[method]
plan = "share()"
[train]
rounds = 1
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    tokenizer(tmp_path)
    rows = [{n: v for n, v in row(i).items() if n != "picture"} for i in range(60)]
    written([{**each, "score": i + 0.5} for i, each in enumerate(rows)], tmp_path / "rows.csv")
    return tmp_path


def test_a_run_without_a_common_test_scores_the_global_model_on_all_tests(folder: Path) -> None:
    code, out = play(TEXTS)
    assert code == 0 and "No common test" in out, out
    metrics = json.loads((folder / "runs/texts/metrics.jsonl").read_text())
    count = sum(each["examples"] for each in metrics["clients"].values())
    assert metrics["global"]["examples"] == count
    assert metrics["global"]["clients"] == len(metrics["clients"])


@pytest.mark.parametrize(
    ("changes", "words_said"),
    [
        (["task.label=score"], "looks like a measurement and not like a class"),
        (["task.label=text"], "different values in 60"),
        (["task.kind=causal-lm"], "sees the tokens that causal-lm asks it to predict"),
        (
            ["task.kind=masked-lm", "model.config.is_decoder=true"],
            "does not see the tokens after a masked token",
        ),
        (["data.path=data/rows"], "data/rows' does not exist: give a"),
        (["data.path=data/rows.csv"], "data/rows.csv' does not exist: give a"),
        (["data.test_path=rows.csv"], "are in the common test set too"),
    ],
)
def test_what_a_person_did_not_mean_is_refused(
    folder: Path, changes: list[str], words_said: str
) -> None:
    code, out = play(TEXTS, *changes)
    assert code == 2 and words_said in " ".join(out.split()), out


def test_a_decoder_sees_the_past_alone() -> None:
    sizes: dict[str, Any] = {**zoo.TEXT, "is_decoder": True}
    require_attention_mask(hf.BertLMHeadModel(hf.BertConfig(**sizes)), "causal-lm")
    require_attention_mask(hf.GPT2LMHeadModel(hf.GPT2Config(**zoo.GPT2)), "causal-lm")
    require_attention_mask(hf.BertForMaskedLM(hf.BertConfig(**zoo.TEXT)), "masked-lm")
    with pytest.raises(DataError, match="BertLMHeadModel sees the tokens"):
        require_attention_mask(hf.BertLMHeadModel(hf.BertConfig(**zoo.TEXT)), "causal-lm")


def test_rows_without_a_value_are_left_out_and_counted(words: str, tmp_path: Path) -> None:
    rows = [
        row(n, **({"text": " "} if n < 3 else {"mood": None} if n < 5 else {})) for n in range(40)
    ]
    data = {"path": written(rows, tmp_path / "rows.parquet"), "num_clients": 2}
    shares = load_federated_data(study("text-classification", words, data=data), None)
    held = (*shares.train.values(), *shares.client_tests.values())
    assert sum(map(len, held)) == 35
    assert (
        "5 of 40 training rows lack a value ('text': 3, 'mood': 2), and are left out."
        in shares.notes
    )
    gone = [{**each, "mood": None} for each in rows]
    data["path"] = written(gone, tmp_path / "gone.parquet")
    with pytest.raises(DataError, match="every training row lacks a value"):
        load_federated_data(study("text-classification", words, data=data), None)


def test_labels_of_one_cell_are_those_of_a_list(words: str, tmp_path: Path) -> None:
    rows = [row(n) for n in range(40)]
    joined = [{**each, "pets": " ; ".join(each["pets"]) or None} for each in rows]
    found = list[FederatedData]()
    for number, (table, task) in enumerate(((rows, {}), (joined, {"label_separator": ";"}))):
        data = {"path": written(table, tmp_path / f"{number}.parquet"), "num_clients": 1}
        found.append(load_federated_data(study("multi-label", words, task=task, data=data), None))
    one, other = ([s.train, s.client_tests] for s in found)
    assert [{n: seen(each) for n, each in s.items()} for s in one] == [
        {n: seen(each) for n, each in s.items()} for s in other
    ]
    assert found[0].task.labels == found[1].task.labels and not any(
        "lack" in n for n in found[1].notes
    )


def test_balanced_weights_are_those_of_scikit_learn(words: str, tmp_path: Path) -> None:
    from sklearn.utils.class_weight import compute_class_weight

    rows = [row(n, mood="calm" if n % 5 else "wild") for n in range(60)]
    data = {"path": written(rows, tmp_path / "rows.parquet"), "num_clients": 2}
    task = {"class_weights": "balanced", "labels": ["calm", "wild"]}
    asked = study("text-classification", words, task=task, data=data)
    split, shares = compute_split(asked), load_federated_data(asked, None)
    trained = [rows[n]["mood"] for each in split.clients.values() for n in each.train]
    expected = compute_class_weight("balanced", classes=np.array(["calm", "wild"]), y=trained)
    assert [weight for _, weight in shares.task.weights] == pytest.approx(expected)
    hidden = {"privacy": {"unit": "client", "epsilon": 8.0}}
    for more, why in (
        (hidden, "hides"),
        ({"data": {}, "clients": {"names": ["north"]}}, "are at the sites"),
    ):
        with pytest.raises(ConfigError, match=why):
            study("text-classification", words, **{"data": data, "task": task, **more})
