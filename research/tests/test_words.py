# SPDX-License-Identifier: Apache-2.0
"""Old study words and metric names of committed files are read as today's."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedplan.studies.schema import study_from_dict
from research.study import LAB, variants
from research.words import translate_changes, translate_metric, translate_metrics, translate_study


@pytest.mark.parametrize("file", sorted((LAB / "studies").glob("*.toml")), ids=lambda f: f.stem)
def test_every_study_of_the_lab_is_read_in_todays_words(file: Path) -> None:
    for values in variants(file.stem)[0].values():
        study = translate_study(values)
        study_from_dict(study)
        assert translate_study(study) == study


def test_changes_keep_the_depth_of_their_keys() -> None:
    changes = {
        "train.rate": 0.1,
        "data.train": {"split": "train"},
        "method.settings.rows": 8,
        "stop": {"better": "lower"},
        "seed": 3,
        "method": {"name": "fedit", "inside": {"name": "fedprox", "settings": {"strength": 1.0}}},
    }
    assert translate_changes(changes) == {
        "train.lr": 0.1,
        "data.train_filter": {"split": "train"},
        "method.settings.examples": 8,
        "early_stopping": {"mode": "min"},
        "seed": 3,
        "method": {"name": "fedit", "base_method": {"name": "fedprox", "settings": {"mu": 1.0}}},
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("world.f1", "global.f1"),
        ("personal.mean", "personal.f1"),
        ("personal.worst", "personal.f1_worst"),
        ("sites.own.loss", "sites.personal.loss"),
        ("sites.spread.own.std", "sites.spread.personal.f1_std"),
        ("clients.world*.f1", "clients.world*.f1"),
        ("personal.f1_worst", "personal.f1_worst"),
    ],
)
def test_metrics_have_todays_names(old: str, new: str) -> None:
    assert translate_metric(old, "f1") == new


def test_a_row_of_metrics_has_todays_names() -> None:
    row = {"round": 1, "world": {"f1": 0.5}, "personal": {"mean": 0.4, "worst": 0.1, "count": 3}}
    assert translate_metrics(row, "f1") == {
        "round": 1,
        "global": {"f1": 0.5},
        "personal": {"f1": 0.4, "f1_worst": 0.1, "count": 3},
    }
