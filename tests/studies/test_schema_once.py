# SPDX-License-Identifier: Apache-2.0
"""A default stands in one place: what a study does not say is what Python does not say."""

from __future__ import annotations

import ast
import sys
from dataclasses import MISSING, fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from fedplan.data.partition import PARTITION_KINDS, Partition
from fedplan.data.tables import DataError
from fedplan.data.tasks.definition import Task
from fedplan.data.tasks.kinds import TASK_KINDS, make_task
from fedplan.federation.aggregation.defence import RULES, Defence
from fedplan.federation.evaluation import EvalConfig
from fedplan.federation.participation import Participation, Timeouts
from fedplan.methods.method import Method
from fedplan.models.catalog import TASK_CLASSES
from fedplan.models.dual_encoder import TEMPLATE
from fedplan.privacy.guarantee import Guarantee
from fedplan.secagg.config import AGGREGATION_KINDS, SecAggConfig
from fedplan.studies import schema
from fedplan.studies.federation_sections import (
    AggregationConfig,
    ClientsConfig,
    DefenceConfig,
    EvaluateConfig,
    PrivacyConfig,
    TimeoutsSection,
)
from fedplan.studies.schema import study_from_dict
from fedplan.studies.sections import DataSection, MethodSection, Section, TaskSection, TrainConfig
from fedplan.training.fit import TrainArguments
from fedplan.training.probes import PROBES

VALUES: dict[type[Section], type] = {
    TrainConfig: TrainArguments,
    TimeoutsSection: Timeouts,
    PrivacyConfig: Guarantee,
    DefenceConfig: Defence,
    AggregationConfig: SecAggConfig,
    ClientsConfig: Participation,
    DataSection: Partition,
    TaskSection: Task,
    MethodSection: Method,
    EvaluateConfig: EvalConfig,
}
OTHER = {
    (DataSection, "num_clients"): "none is for Python to say, or all that a column names",
    (DataSection, "min_examples"): "a client of a study has a row more, to be tested on",
    (TrainConfig, "optimizer"): "a name there, and a value here",
    (TrainConfig, "lr_scheduler"): "a name there, and a value here",
    (TrainConfig, "lr_by_part"): "a table there, and pairs here",
    (TaskSection, "class_weights"): "a table there, and pairs here",
    (MethodSection, "probe"): "a name there, and a value here",
    (MethodSection, "compression"): "a text there, and a value here",
    (MethodSection, "loop"): "a name there, and a value here",
    (MethodSection, "client_hooks"): "names there, and values here",
    (MethodSection, "server_optimizer"): "a name there, and a value here",
    (MethodSection, "lora_aggregation"): "a text there, and a value here",
}


def defaults(kind: type) -> dict[str, Any]:
    return {f.name: f.default for f in fields(kind) if f.default is not MISSING}


@pytest.mark.parametrize("section", VALUES)
def test_a_field_of_a_section_has_the_default_of_the_value_it_makes(section: type[Section]) -> None:
    held, compared = defaults(VALUES[section]), list[str]()
    for name, said in section.model_fields.items():
        if name in held and not said.is_required() and (section, name) not in OTHER:
            assert said.default == held[name] and type(said.default) is type(held[name]), name
            compared.append(name)
    assert compared


@pytest.mark.parametrize("section", VALUES)
def test_no_shared_default_is_spelled_in_the_schema(section: type[Section]) -> None:
    """Read from its source: the schema takes it from the value, and says no number of its own."""
    tree = ast.parse(Path(sys.modules[section.__module__].__file__ or "").read_text())
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == section.__name__)
    shared = set(defaults(VALUES[section])) - {name for at, name in OTHER if at is section}
    said = {ast.unparse(n.target): n.value for n in body.body if isinstance(n, ast.AnnAssign)}
    assert not [name for name in shared if isinstance(said.get(name), ast.Constant)]


def test_a_study_that_says_nothing_trains_at_the_pace_that_says_nothing() -> None:
    assert TrainConfig().train_arguments == TrainArguments()
    assert Timeouts(**TimeoutsSection().model_dump()) == Timeouts()
    assert DataSection().min_examples == Partition.min_examples + 1


def test_a_task_has_the_defaults_of_its_class() -> None:
    takes = {
        k: v.default for k, v in signature(make_task).parameters.items() if v.default is not v.empty
    }
    held = defaults(Task)
    assert {k: takes[k] for k in held} == held
    assert Task.template == TEMPLATE


def test_every_task_can_be_loaded_prepared_and_said() -> None:
    assert set(TASK_KINDS) == set(TASK_CLASSES) - {"backbone"}


@pytest.mark.parametrize(
    ("section", "field", "words"),
    [
        ("task", "kind", tuple(TASK_KINDS)),
        ("data", "partition", PARTITION_KINDS),
        ("method", "probe", ("", *PROBES)),
        ("privacy", "unit", ("client", "example")),
        ("defence", "rule", RULES),
        ("aggregation", "kind", AGGREGATION_KINDS),
    ],
)
def test_a_study_says_all_names_there_are_and_no_other(
    section: str, field: str, words: tuple[str, ...]
) -> None:
    said: dict[str, Any] = {
        "model": {"type": "vit"},
        "task": {"kind": "masked-lm"},
        "data": {"path": "rows.parquet", "partition_column": "site"},
        "method": {"plan": "share()"},
        "train": {"steps": 1, "batch_size": 1},
        "privacy": {"unit": "example", "epsilon": 1.0, "examples_per_site": 9},
        "defence": {},
        "aggregation": {},
    }
    for word in words:
        made = study_from_dict(said | {section: said[section] | {field: word}})
        assert getattr(getattr(made, section), field) == word
    with pytest.raises(schema.ConfigError, match=rf"{section}\.{field}: "):
        study_from_dict(said | {section: said[section] | {field: "nothing"}})


@pytest.mark.parametrize("kind", ["image-classification", "image-text"])
def test_the_size_of_pictures_must_be_said(kind: str) -> None:
    """Once 32 in a study and 224 in Python: which is right follows from the model alone."""
    with pytest.raises(DataError, match="image_size = 0: give the side"):
        make_task(kind, columns="x", label="y", labels=["a", "b"])
    made = make_task(kind, columns="x", label="y", labels=["a"], image_size=3)
    table = Dataset.from_dict({"x": [[[[0, 0, 0]] * 2] * 2], "y": ["a"]})
    assert made.image_size == 3 and len(made.prepare(table)) == 1
