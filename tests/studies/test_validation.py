# SPDX-License-Identifier: Apache-2.0
"""Groups are kept on one side of every split, and what chooses sees validation examples only."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from typing import Any

import pytest

from fedplan.data.partition import Partition, partition_table
from fedplan.data.tables import DataError, load_table
from fedplan.studies.federated_data import compute_split
from fedplan.studies.schema import ConfigError, Study, study_from_dict

KINDS = {
    "iid": {},
    "dirichlet": {"alpha": 0.5},
    "column": {"partition_column": "ward", "num_clients": 0},
    "column, divided": {"partition_column": "ward", "clients_per_value": 2, "alpha": 1.0},
}


@pytest.fixture
def visits(tmp_path: Path) -> list[dict[str, str]]:
    """Visits of 40 patients at two wards, each patient with a few; a few visits name none."""
    draw, rows = random.Random(0), list[dict[str, str]]()
    for number in range(160):
        patient = draw.randrange(40)
        rows.append({
            "patient_id": f"P{patient}" if number % 20 else "",
            "ward": draw.choice("ab"),
            "text": f"visit {number}",
            "label": draw.choice(["ill", "well"]),
            "part": "test" if patient == 3 and number % 2 else "train",
        })  # fmt: skip
    with (tmp_path / "visits.csv").open("w") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return rows


def study(path: Path, *, more: dict[str, Any] | None = None, **data: Any) -> Study:
    usual = {"path": str(path / "visits.csv"), "num_clients": 4, "group": "patient_id"}
    return study_from_dict({
        "model": {"type": "bert"},
        "task": {"kind": "text-classification", "label": "label", "labels": ["ill", "well"]},
        "data": {**usual, "validation_fraction": 0.3, **data},
        "method": {"plan": "share()"},
        **(more or {}),
    })  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_patient_is_on_one_side_and_at_one_client(
    kind: str, visits: list[dict[str, str]], tmp_path: Path
) -> None:
    partition, *divided = kind.split(", ")
    num_clients = 2 if divided else 4
    asked = study(tmp_path, partition=partition, **{"num_clients": num_clients, **KINDS[kind]})
    split = compute_split(asked)
    table = load_table(str(tmp_path / "visits.csv"))
    sides, clients = dict[str, set[str]](), dict[str, set[str]]()
    for client, rows in split.clients.items():
        for side, numbers in rows._asdict().items():
            for number in numbers:
                patient = table[number]["patient_id"] or f"nobody {number}"
                key = f"{patient} {table[number]['ward'] if partition == 'column' else ''}"
                sides.setdefault(patient, set()).add(side)
                clients.setdefault(key, set()).add(client)
    assert sum(len(part) for rows in split.clients.values() for part in rows) == len(visits)
    assert all(len(side) == 1 for side in sides.values())
    assert all(len(names) == 1 for names in clients.values())
    assert set().union(*sides.values()) == {"train", "validation", "test"}


def test_patients_of_the_common_test_are_not_trained_on(
    visits: list[dict[str, str]], tmp_path: Path
) -> None:
    split = compute_split(study(tmp_path, test_filter={"part": "test"}))
    left = sum(len(part) for rows in split.clients.values() for part in rows)
    assert left == sum(row["patient_id"] != "P3" for row in visits)
    assert split.common_test_size < sum(row["patient_id"] == "P3" for row in visits)


def test_a_patient_of_several_labels_cannot_be_dealt_by_labels(
    visits: list[dict[str, str]], tmp_path: Path
) -> None:
    table = load_table(str(tmp_path / "visits.csv"))
    partition = Partition("pathological", 4, classes_per_client=1)
    with pytest.raises(DataError, match="cannot keep it at one client; use dirichlet"):
        partition_table(table, partition, seed=0, label="label", group="patient_id")


HIDDEN = {"privacy": {"unit": "client", "epsilon": 8.0}}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "name public examples by data.validation_split"),
        ({"validation_fraction": 0.0, "partition": "dirichlet", "alpha": 1.0}, "use data.partition"),
        ({"validation_fraction": 1.0}, "less than 1"),
    ],
)  # fmt: skip
def test_what_privacy_excludes_is_refused(data: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        study(tmp_path, more=HIDDEN, **data)


def test_a_study_without_these_fields_keeps_its_digest(tmp_path: Path) -> None:
    plain = study(tmp_path, group="", validation_fraction=0.0)
    assert "group" not in plain.model_dump_json(exclude_defaults=True)
    assert plain.digest != study(tmp_path, validation_fraction=0.0).digest
    assert plain.digest == "a62cefd298e7e933160d0af1ca24e5a1", "as before there were such fields"
