# SPDX-License-Identifier: Apache-2.0
"""What a sweep is asked for: values that are told apart, and a folder's name for each run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sweeps import small_study

from fedplan.errors import FedplanError
from fedplan.studies.schema import ConfigError
from fedplan.sweeps.trials import (
    Setting,
    make_trials,
    parse_seeds,
    parse_setting,
    parse_settings,
    read_base_study,
    split_values,
)


@given(st.lists(st.text(st.characters(codec="ascii", exclude_characters="\\\"'")), min_size=1))
def test_a_quoted_text_is_one_value_whatever_stands_in_it(texts: list[str]) -> None:
    assert split_values(",".join(f"'{text}'" for text in texts)) == [f"'{text}'" for text in texts]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("method.name=fedavg,fedper", ("fedavg", "fedper")),
        ("train.lr=0.1, 0.01", (0.1, 0.01)),
        ("task.labels=[0, 1],[1, 2]", ([0, 1], [1, 2])),
        ("method.plan=share(),chain(share(), keep(head))", ("share()", "chain(share(), keep(head))")),
        ('method={name="fedavg"},{name="safl",settings={k=2}}', ({"name": "fedavg"}, {"name": "safl", "settings": {"k": 2}})),
        ('task.input="a,b"', ("a,b",)),
    ],
)  # fmt: skip
def test_commas_in_quotes_and_brackets_do_not_split(text: str, values: tuple[object, ...]) -> None:
    assert parse_setting(text).values == values


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("method.name", "section.field=value"),
        ("method.name=", "a value is empty"),
        ("method.name=fedavg,,fedper", "a value is empty"),
        ("method.name=fedavg,fedavg", "'fedavg' twice"),
        ("method.plan=share(,keep(head)", "not closed"),
        ("seed=0,1", "--seeds"),
    ],
)
def test_a_wrong_setting_is_named_with_its_remedy(text: str, words: str) -> None:
    with pytest.raises(FedplanError, match=re.escape(words)):
        parse_setting(text)


def test_a_field_is_set_once() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr is set twice"):
        parse_settings(["train.lr=0.1", "train.lr=0.2"])


@pytest.mark.parametrize("said", ["0", "-1", "a", "1,1", "1,b", "99999999"])
def test_seeds_that_are_none_are_refused(said: str) -> None:
    with pytest.raises(ConfigError, match="--seeds"):
        parse_seeds(said, 0)


def test_every_run_has_a_name_of_its_own_that_tells_its_settings(tmp_path: Path) -> None:
    ground = read_base_study(small_study(tmp_path))
    plans = (
        "share()",
        "chain(share(), keep(head))",
        "chain(share(), keep((head)))",
        "keep(" * 3 + "head" + ")" * 3,
    )
    varied = [
        Setting("method", tuple({"plan": plan} for plan in plans)),
        Setting("train.lr", (0.1, 0.2)),
    ]
    trials = make_trials(ground, varied, (0, 1))
    names = [trial.name for trial in trials]
    assert len(set(names)) == len(names) == 16
    assert all(
        re.fullmatch(r"[\w.=,+-]{1,120}", name) and name.endswith(("seed=0", "seed=1"))
        for name in names
    )
    assert [t.study.seed for t in trials] == [0] * 8 + [1] * 8  # seed by seed
    assert {t.study.train.lr for t in trials if "lr=0.2" in t.name} == {0.2}
    long = make_trials(
        ground, [Setting("name", ("a" * 60,)), Setting("task.input", ("b" * 90, "b" * 91))], (0,)
    )
    assert len({t.name for t in long}) == 2 and all(len(t.name) <= 120 for t in long)


def test_a_setting_that_does_not_fit_is_named_by_its_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.rounds=0,seed=0.*\n.*train\.rounds"):
        make_trials(
            read_base_study(small_study(tmp_path)), parse_settings(["train.rounds=2,0"]), (0,)
        )


def test_paths_start_from_the_file(tmp_path: Path) -> None:
    (trial,) = make_trials(read_base_study(small_study(tmp_path)), (), (4,))
    assert trial.study.data.path == str(tmp_path / "digits.npz")
    assert trial.study.seed == 4 and json.loads(trial.study.model_dump_json())["seed"] == 4
