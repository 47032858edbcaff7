# SPDX-License-Identifier: Apache-2.0
"""Neighbours: two tables that differ in one row, or in one client, differ in nothing else."""

from __future__ import annotations

import re
from collections import Counter
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import STUDY, run
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import KINDS, LANGUAGE, MOODS, SITES, Row, cases, held, row, study, tokenizer, written

from fedplan.data.partition import (
    Partition,
    partition_examples,
)
from fedplan.data.row_digests import example_digests, make_unique, uniform_numbers
from fedplan.data.tables import DataError, load_table
from fedplan.language.predicates import Turn
from fedplan.language.resolution import resolve
from fedplan.privacy.dpsgd.per_example import (
    ClippedSum,
    Objective,
    add_clipped_one_by_one,
    trained_tensors,
)
from fedplan.storage.append_log import read_json_lines
from fedplan.studies.experiment import build_experiment
from fedplan.studies.federated_data import FederatedData, load_federated_data
from fedplan.studies.schema import Study

EXAMPLE = {"unit": "example", "epsilon": 8.0, "examples_per_site": 40}
CLIENT = {"unit": "client", "epsilon": 8.0}
BY_MOOD = {"partition_column": "mood", "filter": {"mood": MOODS}}
BY_SITE = {
    "partition": "column",
    "partition_column": "site",
    "num_clients": 3,
    "filter": {"site": SITES},
}
WAYS: dict[str, dict[str, Any]] = {
    "iid": {"partition": "iid", "num_clients": 3},
    "iid, half": {"partition": "iid", "num_clients": 2, "holdout_fraction": 0.5},
    "iid, no own test": {"partition": "iid", "num_clients": 5, "holdout_fraction": 0.0},
    "dirichlet": {
        "partition": "dirichlet",
        "alpha": 0.3,
        "num_clients": 3,
        "partition_column": "mood",
    },
    "dirichlet, many": {
        "partition": "dirichlet",
        "alpha": 0.1,
        "num_clients": 5,
        "partition_column": "site",
    },
    "pathological": {
        "partition": "pathological",
        "classes_per_client": 2,
        "num_clients": 4,
        **BY_MOOD,
    },
    "column": BY_SITE,
    "column, each": {**BY_SITE, "clients_per_value": 2, "alpha": 0.5},
    "train": {"partition": "iid", "num_clients": 2, "train_filter": {"fold": 1}},
    "only": {"partition": "iid", "num_clients": 2, "filter": {"mood": ["calm", "wild"]}},
    "test": {
        "partition": "iid",
        "num_clients": 2,
        "train_filter": {"fold": 1},
        "test_filter": {"fold": 2},
    },
    "test, limit": {
        "partition": "iid",
        "num_clients": 2,
        "test_filter": {"fold": 2},
        "max_test_examples": 3,
    },
}
ROWS = [*map(row, range(20)), row(3), row(3), row(7), row(8, text="cat " * 40, fold=1)]
"""Some are there twice or three times, and one is much longer than the others."""
GONE = (3, 23)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tokenizer(tmp_path_factory.mktemp("words"))


def differ(one: FederatedData, other: FederatedData) -> int:
    """How many units are in one and not in the other, over all clients, trained and tested on."""
    assert list(one.train) == list(other.train), "the clients are the same"
    assert one.task == other.task
    count = 0
    for side, again in ((one.train, other.train), (one.client_tests, other.client_tests)):
        for name in side | again:
            first, second = (held(s[name]) if name in s else Counter() for s in (side, again))
            count += (first - second).total() + (second - first).total()
    return count


def pair(
    asked: Study, file: Path, rows: list[Row], gone: int
) -> tuple[FederatedData, FederatedData]:
    """The shares of a table, and of the same without one row."""
    shares = list[FederatedData]()
    for some in (rows, [*rows[:gone], *rows[gone + 1 :]]):
        written(some, file)
        shares.append(load_federated_data(asked, None))
    return shares[0], shares[1]


@pytest.mark.parametrize(("kind", "way"), cases(WAYS, day=("dirichlet", "column, each")))
def test_one_row_less_is_one_unit_less(kind: str, way: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    asked = study(kind, words, data={"path": str(file), **WAYS[way]}, privacy=EXAMPLE)
    odd = {
        "token-classification": "cannot be partitioned by values such as",
        "multi-label": "cannot be partitioned by values such as",
        "regression": "clients_per_value = 2 needs the label column",
    }
    if kind in odd and way == "column, each":
        written(ROWS, file)
        with pytest.raises(DataError, match=odd[kind]):
            load_federated_data(asked, None)
        return
    for gone in GONE:
        one, other = pair(asked, file, ROWS, gone)
        tested = "test_filter" in WAYS[way] and ROWS[gone]["fold"] == 2
        if not tested:
            assert differ(one, other) <= 1, f"row {gone}"
            assert (
                (one.common_test is None)
                == (other.common_test is None)
                == ("test_filter" not in WAYS[way])
            )
            assert one.common_test is None or held(one.common_test) == held(other.common_test)
        if way in ("iid", "column", "dirichlet"):
            total = sum(len(rows) for s in (one.train, one.client_tests) for rows in s.values())
            assert total == len(ROWS), "a row is one unit, and none is lost"
            assert differ(one, other) == 1


def bare(kind: str) -> Row:
    """A language model of sites has no label: sites would have to say all of them."""
    return {"task": {"label": ""}} if kind in LANGUAGE else {}


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_lacks_one_row_and_trains_on_one_less(kind: str, words: str, tmp_path: Path) -> None:
    names = {"names": ["north", "south"]}
    for more in (
        {},
        {"holdout_fraction": 0.5},
        {"train_filter": {"fold": 1}, "holdout_fraction": 0.0},
    ):
        asked = study(kind, words, **bare(kind), data=more, clients=names, privacy=EXAMPLE)
        for gone in GONE:
            shares = list[FederatedData]()
            for some in (ROWS, [*ROWS[:gone], *ROWS[gone + 1 :]]):
                table = load_table(written(some, tmp_path / "t.parquet"))
                shares.append(load_federated_data(asked, ("north", table)))
            assert differ(*shares) <= 1


@pytest.mark.parametrize("way", ["train", "split", "test"])
def test_the_only_row_of_a_filter_is_one_unit(way: str, words: str, tmp_path: Path) -> None:
    """Without it no row is left to train on, and that is no error, which would tell."""
    rows = [{**row, "split": f"{row['fold']}"} for row in ROWS if row["fold"] != 1]
    last = next({**row, "split": "1"} for row in ROWS if row["fold"] == 1)
    said: Row = {"train_filter": {"fold": 1}} if way == "train" else {"split": "1"}
    if way == "test":
        seen = {"text", "mood"}
        rows = [row for row in rows if any(row[name] != last[name] for name in seen)]
        said = {"test_path": written(rows, tmp_path / "test.parquet")}
    file = tmp_path / "t.parquet"
    said |= {"path": str(file), "partition": "iid", "num_clients": 2, "holdout_fraction": 0.0}
    asked = study("text-classification", words, data=said, privacy=EXAMPLE)
    assert differ(*pair(asked, file, [*rows, last], len(rows))) == 1


TABLES = st.lists(st.integers(0, 12), min_size=1, max_size=16)
DRAWN = st.one_of(
    st.builds(dict, partition=st.just("iid"), num_clients=st.integers(1, 6)),
    st.builds(
        dict,
        partition=st.just("dirichlet"),
        num_clients=st.integers(1, 6),
        alpha=st.sampled_from([1e-3, 0.1, 1.0, 100.0]),
    ),
    st.builds(
        dict,
        partition=st.just("pathological"),
        num_clients=st.integers(3, 6),
        classes_per_client=st.integers(1, 3),
    ),
    st.just(BY_SITE),
    st.builds(lambda each: {**BY_SITE, "clients_per_value": each, "alpha": 0.5}, st.integers(2, 3)),
)


@settings(max_examples=25)
@given(TABLES, DRAWN, st.data(), st.integers(0, 2**31), st.sampled_from([0.0, 0.2, 0.7]))
def test_any_row_of_any_table_is_one_unit(
    words: str,
    tmp_path_factory: pytest.TempPathFactory,
    numbers: list[int],
    way: dict[str, Any],
    data: st.DataObject,
    seed: int,
    own_test: float,
) -> None:
    file = tmp_path_factory.getbasetemp() / "any.jsonl"
    said = {"path": str(file), **way, "holdout_fraction": own_test}
    asked = study("text-classification", words, data=said, privacy=EXAMPLE)
    asked = asked.model_copy(update={"seed": seed})
    gone = data.draw(st.integers(0, len(numbers) - 1))
    rows = [row(number) for number in numbers]
    if len(rows) == 1:
        rows.append(row(99))  # a file without a line has no columns either
    assert differ(*pair(asked, file, rows, gone)) == 1


ODD: dict[str, Row] = {
    "a fraction among whole numbers": {"fold": 1.5},
    "a number that is much larger": {"fold": 2**40},
    "a column that no other row has": {"note": "x"},
    "a value that no other row has": {"site": "nowhere at all"},
    "a longer text": {"text": "hen egg " * 50},
    "a text that says a number": {"text": "7"},
    "an id": {"name": "0017"},
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("form", [".csv", ".jsonl", ".parquet", ".npz"])
def test_one_odd_row_changes_no_other(form: str, odd: str, words: str, tmp_path: Path) -> None:
    """What a file says of all rows, types above all, must not follow from one of them."""
    rows = [{**row(n), "text": f"cat {n}", "name": f"{n}"} for n in range(12)]
    for each in rows:
        del each["picture"], each["words"], each["tags"], each["pets"]
    if form == ".npz" and "note" in ODD[odd]:
        rows = [{**each, "note": ""} for each in rows]  # arrays are as long as the table
    strange = {**rows[5], **ODD[odd]}
    file = tmp_path / f"t{form}"
    for kind in ("text-classification", "causal-lm"):
        asked = study(kind, words, data={"path": str(file), "num_clients": 3}, privacy=EXAMPLE)
        assert differ(*pair(asked, file, [*rows, strange], len(rows))) == 1


@pytest.mark.parametrize(
    "way", [way for way, said in WAYS.items() if not {"train_filter", "test_filter"} & said.keys()]
)
def test_a_client_that_is_gone_changes_no_other(way: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    said = {"path": str(file), **WAYS[way]}
    asked = study("text-classification", words, data=said, clients=names(said), privacy=CLIENT)
    rows = [each for each in ROWS if way != "only" or each["mood"] != "sad"]
    table = load_table(written(rows, file))
    whole = load_federated_data(asked, None)
    part = {"partition": "kind", "num_clients": "num_clients", "partition_column": "column"}
    part |= {n: n for n in ("alpha", "classes_per_client", "clients_per_value")}
    partition = Partition(**{field: said[name] for name, field in part.items() if name in said})
    public = SITES if said["partition"] == "column" else MOODS
    places = partition_examples(table, partition, seed=0, label="mood", known_values=public)
    for name, own in list(places.items())[:3]:
        lost = set(example_digests(own))
        marks = example_digests(table)
        written([each for each, mark in zip(rows, marks, strict=True) if mark not in lost], file)
        again = load_federated_data(asked, None)
        assert list(again.train) == list(whole.train)
        assert not len(again.train[name]) and name not in again.client_tests
        for other in places.keys() - {name}:
            assert held(again.train[other]) == held(whole.train[other])


def names(said: Row) -> Row:
    """To hide clients that a column makes, a study names them."""
    each = said.get("clients_per_value", 1)
    every = SITES if each == 1 else [f"{site}-{i}" for site in SITES for i in range(each)]
    return {"names": every} if said.get("partition") == "column" else {}


@pytest.mark.parametrize("privacy", [EXAMPLE, CLIENT], ids=lambda said: said["unit"])
@pytest.mark.parametrize(
    ("task", "data", "words_said"),
    [
        (
            {"labels": []},
            {"partition": "iid", "num_clients": 2},
            r"'mood'.*list all of them in task.labels",
        ),
        (
            {},
            {"max_examples": 9, "num_clients": 2},
            r"data.max_examples .*select rows by a value of their own",
        ),
        (
            {},
            {
                "partition": "column",
                "partition_column": "site",
                "num_clients": 6,
                "clients_per_value": 2,
                "alpha": 0.5,
            },
            r"'site'.*filter = \{ site = ",
        ),
        (
            {},
            {**BY_SITE, "num_clients": 2},
            r"3 known values, but the partition has 2 clients.*set num_clients = 3",
        ),
        (
            {},
            {
                "partition": "pathological",
                "classes_per_client": 2,
                "num_clients": 4,
                "partition_column": "site",
            },
            r"'site'.*data.filter",
        ),
    ],
)
def test_what_would_follow_from_all_rows_is_refused(
    privacy: Row, task: Row, data: Row, words_said: str, words: str, tmp_path: Path
) -> None:
    file = written(ROWS, tmp_path / "t.parquet")
    kind, said = "text-classification", {"path": file, **data}
    named = names(said) if privacy["unit"] == "client" else {}
    asked = study(kind, words, task=task, data=said, clients=named, privacy=privacy)
    with pytest.raises(DataError, match=words_said):
        load_federated_data(asked, None)
    open_too = (
        {"partition": "column", "partition_column": "site", "num_clients": 3}
        if "clients_per_value" in said
        else {}
    )
    load_federated_data(
        study(kind, words, task=task, data=said | {"min_examples": 1} | open_too), None
    )


MODELS: dict[str, Row] = {
    "causal-lm": {
        "type": "gpt2",
        "config": {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 15, "n_positions": 8}
        | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
        | {"bos_token_id": 2, "eos_token_id": 3},
    },
    "masked-lm": {"type": "bert", "config": {"vocab_size": 15, "max_position_embeddings": 8}},
    "text-classification": {
        "type": "bert",
        "config": {"vocab_size": 15, "max_position_embeddings": 8},
    },
    "image-classification": {"type": "vit", "config": {"image_size": 4, "patch_size": 2}},
}
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
STILL = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


def clipped(asked: Study, table: Dataset) -> tuple[torch.Tensor, float]:
    """The sum of clipped gradients over all rows of a site, and the clip that is charged."""
    experiment = build_experiment(asked, ("north", table))
    roles = resolve(experiment.agreement.method.plan, experiment.agreement.params, Turn())
    rows = experiment.data.train["north"]
    subject = Objective(
        experiment.model, trained_tensors(experiment.model, roles), rows, experiment.data.task.loss
    )
    guarantee = experiment.agreement.guarantee
    assert guarantee is not None
    found = ClippedSum(subject.tensors, guarantee.clipping_norm)
    experiment.model.eval()
    add_clipped_one_by_one(subject, torch.arange(len(rows)), found)
    totals = [found.sums[name].flatten() for name in sorted(found.sums)]
    return torch.cat(totals), guarantee.clipping_norm


@pytest.mark.parametrize("kind", MODELS)
def test_one_row_moves_a_clipped_sum_by_one_clip(kind: str, words: str, tmp_path: Path) -> None:
    model = MODELS[kind]
    if model["type"] != "gpt2":
        sizes = {**SMALL, **STILL, "intermediate_size": 16}
        model = {**model, "config": {**model["config"], **sizes}}
    names = {"names": ["north"]}
    asked = study(kind, words, **bare(kind), model=model, clients=names, privacy=EXAMPLE)
    far, clip = 0.0, inf
    for gone in (0, 3, 23):
        sums = list[torch.Tensor]()
        for some in (ROWS, [*ROWS[:gone], *ROWS[gone + 1 :]]):
            total, clip = clipped(asked, load_table(written(some, tmp_path / "t.parquet")))
            sums.append(total)
        far = max(far, float((sums[0] - sums[1]).norm()))
    assert 0 < far <= clip * (1 + 1e-4)


@pytest.mark.parametrize("vote", [False, True], ids=["", "vote"])
@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_client_without_rows_takes_part(here: Path, unit: str, vote: bool) -> None:
    """Who has no rows may not be told either: its turns are as those of others."""
    said = STUDY.replace('partition = "dirichlet"\nalpha = 0.5\nnum_clients = 3', EMPTY)
    named = 'names = ["0", "1", "7"]' if unit == "client" else ""
    said = said.replace("dropout_fraction = 0.1", named).replace(
        "rounds = 3", "rounds = 1\nsteps = 1"
    )
    said += f'[privacy]\nunit = "{unit}"\nepsilon = 50.0\nexamples_per_site = 20\n'
    if vote:
        said = re.sub('plan = ".*"', 'name = "safl"\nsettings = { k = 1 }', said)
        said += "vote_noise_multiplier = 2.0\nvote_every = 2\n"
    Path("study.toml").write_text(said)
    code, out = run("run", "study.toml")
    assert code == 0 and "not aggregated" not in out, out
    lines = [
        line for line in read_json_lines(here / "runs/tiny/ledger.jsonl") if "changed" not in line
    ]
    assert {line["client"] for line in lines} == {"0", "1", "7"}
    assert len({len(line["roles"]) for line in lines}) == 1


EMPTY = 'partition = "column"\npartition_column = "digit"\nnum_clients = 3\nfilter = { digit = [0, 1, 7] }'


def test_equal_rows_are_told_apart_and_chances_are_even() -> None:
    marks = make_unique(example_digests(Dataset.from_dict({"a": [1] * 4000})))
    assert len(set(marks)) == 4000
    found = uniform_numbers(marks, "purpose", 3)
    assert found.min() >= 0 and found.max() < 1 and abs(found.mean() - 0.5) < 0.02
    assert (found != uniform_numbers(marks, "purpose", 4)).all()
    assert make_unique([b"x"] * 3)[:2] == make_unique([b"x"] * 2)
