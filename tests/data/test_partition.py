# SPDX-License-Identifier: Apache-2.0
"""Tables and their division among clients."""

from __future__ import annotations

import json
import math
import re
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

from fedplan.data import partition as module
from fedplan.data.partition import Partition, partition_examples, training_mask
from fedplan.data.row_digests import example_digests
from fedplan.data.tables import ROW, DataError, filter_rows, label_names, load_table
from fedplan.errors import UnknownModel
from fedplan.models.catalog import is_hub_id, params_of

SHARED = Path(__file__).parents[3] / "shared" / "data"
ROWS = {"text": ["a", "b", "c\nd"], "split": ["train", "test", "train"], "n": [1, 2, 3]}


def shared(path: str) -> str:
    if not (SHARED / path).exists():
        pytest.skip(f"{SHARED / path} is not on this machine")
    return str(SHARED / path)


def numbered(labels: list[str] | list[int]) -> Dataset:
    return Dataset.from_dict({"label": labels, "row": list(range(len(labels)))})


def rows_of(clients: dict[str, Dataset]) -> dict[str, list[int]]:
    return {name: list(table["row"]) for name, table in clients.items()}


def split_holdout(
    table: Dataset, *, fraction: float, seed: int, columns: Sequence[str] = ()
) -> tuple[Dataset, Dataset]:
    mask = training_mask(example_digests(table, columns), fraction=fraction, seed=seed)
    return tuple(table.select(np.flatnonzero(mask == side)) for side in (True, False))


LABELS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=40)
PARTITIONS = st.one_of(
    st.builds(Partition, st.just("iid"), st.integers(1, 8)),
    st.builds(
        Partition,
        st.just("dirichlet"),
        st.integers(1, 6),
        alpha=st.floats(0.05, 100),
        column=st.just("label"),
    ),
    st.builds(
        Partition, st.just("pathological"), st.integers(1, 8), classes_per_client=st.integers(1, 4)
    ),
    st.builds(Partition, st.just("column"), column=st.just("label")),
)


@settings(max_examples=often(60))
@given(LABELS, PARTITIONS, st.integers(0, 2**31))
def test_a_division_has_every_row_once(labels: list[str], partition: Partition, seed: int) -> None:
    table = numbered(labels)
    try:
        clients = partition_examples(table, partition, seed=seed, label="label")
    except DataError as error:
        assert "examples" in str(error) or "labels" in str(error)
        return
    found = rows_of(clients)
    assert sorted(row for rows in found.values() for row in rows) == list(range(len(labels)))
    assert min(map(len, found.values())) >= partition.min_examples
    assert len(found) == (partition.num_clients or len(set(labels)))
    assert rows_of(partition_examples(table, partition, seed=seed, label="label")) == found
    if partition.kind == "pathological":
        held = [set(table["label"]) for table in clients.values()]
        assert all(len(each) <= partition.classes_per_client for each in held)


DOMAINS = st.lists(
    st.tuples(st.sampled_from(["x", "y", "x-0"]), st.sampled_from("abc")), min_size=1
)


def of_domains(pairs: list[tuple[str, str]]) -> Dataset:
    return numbered([label for _, label in pairs]).add_column("domain", [d for d, _ in pairs])


@settings(max_examples=often(60))
@given(DOMAINS, st.integers(2, 4), st.floats(0.05, 100), st.integers(1, 3), st.integers(0, 2**31))
def test_each_value_of_a_column_is_divided_in_itself(
    pairs: list[tuple[str, str]], each: int, alpha: float, least: int, seed: int
) -> None:
    table = of_domains(pairs)
    whole = Partition("column", column="domain", min_examples=least)
    partition = replace(whole, clients_per_value=each, alpha=alpha)
    try:
        wholes = rows_of(partition_examples(table, whole, seed=seed))
        found = rows_of(partition_examples(table, partition, seed=seed, label="label"))
    except DataError as error:
        assert "examples" in str(error)
        return
    assert list(found) == [f"{value}-{i}" for value in wholes for i in range(each)]
    for value, rows in wholes.items():
        shares = [found[f"{value}-{i}"] for i in range(each)]
        assert sorted(row for share in shares for row in share) == rows
        assert all(share == sorted(share) and len(share) >= least for share in shares)
    assert rows_of(partition_examples(table, partition, seed=seed, label="label")) == found
    alone = table.select([i for i, (domain, _) in enumerate(pairs) if domain == "x"])
    if "x" in wholes:
        again = rows_of(partition_examples(alone, partition, seed=seed, label="label"))
        assert again == {name: found[name] for name in again}, "no value changes another's draw"


def test_values_of_a_column_are_drawn_apart_and_by_the_seed() -> None:
    table = of_domains([(domain, label) for domain in "xy" for label in "abcde" * 40])
    partition = Partition("column", column="domain", alpha=0.5, clients_per_value=3)
    first, second = (
        rows_of(partition_examples(table, partition, seed=s, label="label")) for s in (1, 2)
    )
    assert first != second and list(first) == ["x-0", "x-1", "x-2", "y-0", "y-1", "y-2"]
    assert first["y-0"] != [row + 200 for row in first["x-0"]]
    most = rows_of(
        partition_examples(table, replace(partition, num_clients=1), seed=1, label="label")
    )
    assert most == {name: first[name] for name in ("x-0", "x-1", "x-2")}


@pytest.mark.parametrize("values", [[[1], [2]], [{"a": 1}, {"a": 2}], [math.nan, math.nan]])
def test_what_names_no_client_is_told_and_no_row_is_lost(values: list[object]) -> None:
    with pytest.raises(DataError, match=r"column 'kind' has (.* names no client|no value in 2)"):
        partition_examples(
            Dataset.from_dict({"kind": values}), Partition("column", column="kind"), seed=0
        )


@settings(max_examples=often(60))
@given(st.lists(st.integers(0, 9), max_size=30), st.floats(0.01, 0.99), st.integers(0, 2**31))
def test_a_half_and_the_other_are_all(words: list[int], share: float, seed: int) -> None:
    table = numbered(words)
    train, test = split_holdout(table, fraction=share, seed=seed, columns=["label"])
    assert sorted([*train["row"], *test["row"]]) == list(range(len(words)))
    assert not set(train["label"]) & set(test["label"]), "equal rows are on one side"
    backwards = split_holdout(table.select(range(len(words))[::-1]), fraction=share, seed=seed)
    again = split_holdout(table, fraction=share, seed=seed)
    assert [sorted(half["row"]) for half in backwards] == [list(half["row"]) for half in again]


def test_a_half_has_about_its_share() -> None:
    train, test = split_holdout(numbered(list(range(4000))), fraction=0.8, seed=0)
    assert abs(len(train) - 3200) < 100 and len(train) + len(test) == 4000


@pytest.mark.parametrize(
    "partition",
    [
        Partition("iid", 5),
        Partition("dirichlet", 5, alpha=0.5),
        Partition("pathological", 5, classes_per_client=2),
    ],
    ids=lambda partition: partition.kind,
)
def test_another_seed_divides_otherwise(partition: Partition) -> None:
    table = numbered(list("abcdefghij") * 20)
    first, second = (
        rows_of(partition_examples(table, partition, seed=s, label="label")) for s in (1, 2)
    )
    assert first != second
    assert list(first) == ["client-00", "client-01", "client-02", "client-03", "client-04"]


def skew(alpha: float) -> float:
    """The mean share of a client's most frequent label."""
    table = numbered(list("abcdefghij") * 100)
    clients = partition_examples(
        table, Partition("dirichlet", 10, alpha=alpha), seed=0, label="label"
    )
    most = [max(Counter(table["label"]).values()) / len(table) for table in clients.values()]
    return sum(most) / len(most)


def test_a_small_alpha_is_more_skewed() -> None:
    assert skew(0.1) > skew(1.0) > skew(100.0)
    assert skew(100.0) < 0.2


def test_the_largest_values_of_a_column_are_clients() -> None:
    table = numbered(["x"] * 3 + ["y"] * 2 + ["z"] * 2 + ["w"])
    assert list(partition_examples(table, Partition("column", 2, "label"), seed=0)) == ["x", "y"]
    assert list(
        partition_examples(table, Partition("column", column="label", min_examples=2), seed=0)
    ) == list("xyz")
    with pytest.raises(DataError, match=r"has 4 values .* for 5 clients"):
        partition_examples(table, Partition("column", 5, "label"), seed=0)


def test_medical_questions_divide_by_institute() -> None:
    table = load_table(shared("text/medquad_answered.parquet"))
    clients = partition_examples(table, Partition("column", column="collection"), seed=0)
    assert len(clients) == 9 and sum(map(len, clients.values())) == len(table) == 16407
    assert set(clients["9_CDC_QA"]["collection"]) == {"9_CDC_QA"}


def test_every_format_gives_the_same_table(tmp_path: Path) -> None:
    table = Dataset.from_dict(ROWS)
    pyarrow.parquet.write_table(table.data.table, tmp_path / "t.parquet")
    pyarrow.csv.write_csv(table.data.table, tmp_path / "t.csv")
    rows = [dict(zip(ROWS, row, strict=True)) for row in zip(*ROWS.values(), strict=True)]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    np.savez(tmp_path / "t.npz", **{name: np.array(column) for name, column in ROWS.items()})
    table.save_to_disk(str(tmp_path / "saved"))
    for name in ("t.parquet", "t.json", "t.jsonl", "t.npz", "saved"):
        assert load_table(str(tmp_path / name)).to_dict() == ROWS, name
    # a .csv says no types: one row must not change what the others hold
    assert load_table(str(tmp_path / "t.csv")).to_dict() == ROWS | {"n": ["1", "2", "3"]}
    for name in ("t.parquet", "t.csv", "t.json", "t.jsonl"):
        read = load_table(str(tmp_path / name), split="train")
        assert [int(number) for number in read["n"]] == [1, 3]
        assert len(filter_rows(read, {"n": 3})) == 1
        assert example_digests(load_table(str(tmp_path / name))) == example_digests(table)


def test_an_empty_cell_is_a_missing_value(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('text,n\na,1\n"",2\n')
    with pytest.raises(DataError, match=r"column 'text' has no value in 1 of 2"):
        label_names([load_table(str(tmp_path / "t.csv"))], "text")


def test_a_folder_is_its_files_and_a_split_their_names(tmp_path: Path) -> None:
    for name, numbers in (("train-0", [1]), ("train-1", [2]), ("test", [3]), ("trainer", [4])):
        (tmp_path / f"{name}.json").write_text(json.dumps([{"n": n} for n in numbers]))
    assert sorted(load_table(str(tmp_path))["n"]) == [1, 2, 3, 4]
    assert list(load_table(str(tmp_path), split="train")["n"]) == [1, 2]


def test_a_saved_folder_of_splits_asks_for_one(tmp_path: Path) -> None:
    table = Dataset.from_dict(ROWS)
    DatasetDict({"train": table, "dev": table.select([0])}).save_to_disk(str(tmp_path / "d"))
    assert len(load_table(str(tmp_path / "d"), split="dev")) == 1
    for split in ("", "test"):
        with pytest.raises(DataError, match=r"train, dev"):
            load_table(str(tmp_path / "d"), split=split)


def test_arrays_of_a_split_are_columns(tmp_path: Path) -> None:
    pixels = np.arange(2 * 3 * 4, dtype="uint8").reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", x_train=pixels, y_train=np.array([0, 1]), y_test=np.array([1]))
    table = load_table(str(tmp_path / "a.npz"), split="train")
    assert table.column_names == ["x", "y"]
    assert (np.array(table["x"][1]) == pixels[1]).all()
    with pytest.raises(DataError, match=r"different lengths.*y_test.*split"):
        load_table(str(tmp_path / "a.npz"))
    with pytest.raises(DataError, match=r"'_dev'.*x_train"):
        load_table(str(tmp_path / "a.npz"), split="dev")


def test_arrays_of_objects_are_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        load_table(str(tmp_path / "a.npz"))


def test_where_keeps_equal_rows() -> None:
    table = Dataset.from_dict(ROWS)
    assert list(filter_rows(table, {"split": "train", "n": 3})["text"]) == ["c\nd"]
    assert len(filter_rows(table, {})) == 3
    with pytest.raises(DataError, match=r"'trian'.*'test', 'train'"):
        filter_rows(table, {"split": "trian"})
    with pytest.raises(DataError, match=r"column 'splt'.*text, split, n"):
        filter_rows(table, {"splt": "train"})


def test_labels_are_in_order() -> None:
    assert label_names([numbered([10, 9]), numbered([2])], "label") == ["2", "9", "10"]
    assert label_names([Dataset.from_dict({"t": [["O", "B-x"], ["O"]]})], "t") == ["B-x", "O"]
    assert label_names([numbered([1.0, 0.0])], "label") == ["0", "1"], "one row may make it a float"


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0.5, 1.0, 2.0], "has the value 0.5, which looks like a measurement"),
        (["3.25", "1", "2"], "has the value 3.25, which looks like a measurement"),
        (["1", "inf"], "has the value inf, which looks like a measurement"),
        (["nan", "1"], "has the value nan, which looks like a measurement"),
        ([1.0, math.nan], "no value in 1 of 2"),
        ([1.0, None], "no value in 1 of 2"),
        (list(range(100, 140)), "40 different values in 40"),
        ([float(n) for n in range(100, 140)] + [100.0] * 20, "40 different values in 60"),
    ],
)
def test_measurements_are_no_classes(labels: list[object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        label_names([Dataset.from_dict({"label": labels})], "label")


@pytest.mark.parametrize(
    "name", ["org/name", "data/rows", "data/rows.csv", "dta/rows.txt", "rows", "~/rows", "../a/b"]
)
def test_a_mistyped_path_never_reaches_the_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reached(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", reached)
    monkeypatch.setattr(datasets, "load_dataset", reached)
    with pytest.raises(DataError, match=rf"{re.escape(name)}' does not exist.*hub:org/name"):
        load_table(name)
    with pytest.raises(UnknownModel):
        params_of(name)


def test_only_a_name_that_says_so_is_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_hub_id("hub:org/name") and not is_hub_id("org/name")
    asked = list[str]()
    monkeypatch.setattr(datasets, "load_dataset", lambda name, **_: asked.append(name) or [])
    load_table("hub:org/name")
    assert asked == ["org/name"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"kind": "iid"}, "num_clients = 0"),
        ({"kind": "niid", "num_clients": 2}, "'niid'; there are iid, dirichlet"),
        ({"kind": "dirichlet", "num_clients": 2}, "alpha = 0.0"),
        ({"kind": "dirichlet", "num_clients": 2, "alpha": float("nan")}, "alpha = nan"),
        ({"kind": "pathological", "num_clients": 2}, "classes_per_client = 0"),
        ({"kind": "column"}, "column = ''"),
        ({"kind": "iid", "num_clients": 2, "min_examples": -1}, "min_examples = -1"),
        ({"kind": "column", "column": "kind", "clients_per_value": 3}, "alpha = 0.0"),
        ({"kind": "column", "column": "kind", "clients_per_value": 0}, "clients_per_value = 0"),
        (
            {"kind": "iid", "num_clients": 2, "clients_per_value": 2},
            "clients_per_value = 2: it must be 1: only column",
        ),
    ],
)
def test_a_wrong_partition_says_what_it_must_be(settings: dict[str, object], words: str) -> None:
    with pytest.raises(DataError, match=words):
        Partition(**settings)  # type: ignore[arg-type]


def test_what_cannot_be_divided_says_why() -> None:
    table = numbered(list("abcd") * 5)
    for partition, words in (
        (Partition("dirichlet", 9, alpha=0.001), r"alpha = 0.001.*9 clients.*raise alpha"),
        (Partition("iid", 21), "20 examples are too few for 21 clients with 1 each"),
        (Partition("iid", 5, min_examples=5), "20 examples are too few for 5 clients with 5 each"),
        (
            Partition("pathological", 1, classes_per_client=3),
            "4 labels cannot be divided among 1 clients",
        ),
        (
            Partition("pathological", 4, classes_per_client=5),
            "classes_per_client must be at most 4",
        ),
        (
            Partition("pathological", 20, classes_per_client=2),
            "by pathological gave each of 20 clients 1",
        ),
        (Partition("dirichlet", 2, "kind", alpha=1.0), "no column 'kind'; there are label, row"),
        (Partition("column", column="kind"), "no column 'kind'"),
        (
            Partition("column", column="label", clients_per_value=6, alpha=1.0),
            "5 examples with label = a .* 6 cl",
        ),
        (
            Partition("column", column="label", clients_per_value=2, alpha=1e-3, min_examples=2),
            "raise alpha",
        ),
    ):
        with pytest.raises(DataError, match=words):
            partition_examples(table, partition, seed=0, label="label")
    with pytest.raises(DataError, match="needs the label column"):
        partition_examples(table, Partition("dirichlet", 2, alpha=1.0), seed=0)
    with pytest.raises(DataError, match="clients_per_value = 2 needs the label column"):
        partition_examples(
            table, Partition("column", column="label", clients_per_value=2, alpha=1.0), seed=0
        )
    with pytest.raises(DataError, match="no value in 1 of 2"):
        partition_examples(
            Dataset.from_dict({"a": ["x", None]}), Partition("column", column="a"), seed=0
        )
    with pytest.raises(DataError, match="the training fraction is 0"):
        split_holdout(table, fraction=0, seed=0)


def test_as_many_draws_are_tried_as_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_DRAWS", 1)
    table = numbered(list(range(40)))
    assert len(partition_examples(table, Partition("iid", 2), seed=0)) == 2
    with pytest.raises(DataError, match="in 1 draws, no partition of 40 examples"):
        partition_examples(table, Partition("iid", 40), seed=0)


def test_a_row_has_a_client_where_shares_sum_to_less_than_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By rounding, the last bound of a draw may lie below the largest number of a row."""
    largest = 1 - 2.0**-53
    monkeypatch.setattr(module, "uniform_numbers", lambda rows, *_: np.full(len(rows), largest))
    partition = Partition("dirichlet", 7, alpha=1.0, min_examples=0)
    for seed in range(40):
        clients = module.partition_table(numbered(["a"]), partition, seed=seed, label="label")
        assert sum(map(len, clients.values())) == 1, seed


@pytest.mark.parametrize("name", ["none.parquet", "none", "a.txt", "broken.json", "broken.parquet"])
def test_what_is_no_table_is_named(name: str, tmp_path: Path) -> None:
    for broken in ("a.txt", "broken.json", "broken.parquet"):
        (tmp_path / broken).write_text("{")
    with pytest.raises(DataError, match=name):
        load_table(str(tmp_path / name))


def test_rows_are_numbered_in_their_file_their_arrays_or_their_split(tmp_path: Path) -> None:
    np.savez(tmp_path / "rows.npz", x_train=np.arange(4), x_test=np.arange(2))
    saved = {"train": numbered(["a", "b", "c"]), "test": numbered(["d", "e"])}
    DatasetDict(saved).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "rows.csv").write_text("x,split\n1,train\n2,test\n3,test\n")
    rows = {"rows.npz": [1, 2], "saved": [1, 2], "rows.csv": [2, 3]}
    for name, numbers in rows.items():
        assert load_table(str(tmp_path / name), split="test", numbered=True)[ROW][:] == numbers
        assert ROW not in load_table(str(tmp_path / name), split="test").column_names
