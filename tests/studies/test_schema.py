# SPDX-License-Identifier: Apache-2.0
"""Study files: valid, or an error that names the field."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from often import often

from fedplan.language.parts import named
from fedplan.language.plan import chain, hold
from fedplan.methods import average_separately, by_residual
from fedplan.studies.experiment import make_method
from fedplan.studies.schema import ConfigError, Study, read_study, study_from_dict

MINIMAL: dict[str, Any] = {
    "model": {"type": "vit"},
    "task": {"kind": "image-classification", "label": "y"},
    "data": {"path": "rows.parquet"},
    "method": {"name": "fedavg"},
}
SCHEMA = Draft202012Validator(
    json.loads((Path(__file__).parents[2] / "docs/reference/study.schema.json").read_text())
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**12),
    st.floats(),
    st.sampled_from(["", "iid", "dirichlet", "adamw", "x", "0.5"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
FIELDS = sorted(
    {
        (section, field)
        for section, held in Study.model_fields.items()
        for field in getattr(held.annotation, "model_fields", {})
    }
)


@st.composite
def studies(draw: st.DrawFn) -> dict[str, Any]:
    said: dict[str, Any] = {k: dict(v) for k, v in MINIMAL.items()}
    for section, field in draw(st.lists(st.sampled_from(FIELDS), max_size=4)):
        said.setdefault(section, {})[field] = draw(VALUES)
    for section in draw(st.lists(st.sampled_from([*said, "extra", "seed", "train"]), max_size=1)):
        said[section] = draw(VALUES)
    return said


@settings(max_examples=often(5000))
@given(studies())
@example({**MINIMAL, "train": {"lr_by_part": {"\r0": 0}}})
def test_any_values_are_a_study_or_an_error_that_names_the_field(said: dict[str, Any]) -> None:
    try:
        study = study_from_dict(said)
    except ConfigError as error:
        named = [line for line in str(error).splitlines()[1:] if line[:4].strip()]
        assert named
        for line in named:
            assert line.strip().split(":")[0].split(".")[0] in [*said, *Study.model_fields, "study"]
    else:
        assert study_from_dict(study.model_dump()) == study
        # fedplan.simulate alone sets from_python, so the schema of files has no such field.
        text = json.dumps(said)
        SCHEMA.validate(json.loads(text, object_hook=_without_from_python))


def _without_from_python(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "from_python"}


@pytest.mark.parametrize(("section", "field"), [("task", "kind"), ("train", "optimizer")])
def test_a_name_that_is_needed_is_not_left_empty(section: str, field: str) -> None:
    said = {**MINIMAL, section: {**MINIMAL.get(section, {}), field: ""}}
    with pytest.raises(ConfigError, match=rf"{section}.{field}: .*there is no \w+ ''"):
        study_from_dict(said)


@settings(max_examples=often(500))
@given(st.text(max_size=60))
def test_any_file_is_a_study_or_an_error(text: str) -> None:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        file = Path(folder) / "study.toml"
        file.write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(ConfigError):
            read_study(file)


def test_overrides_are_laid_over(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        '[model]\ntype = "vit"\n[task]\nkind = "image-classification"\n[data]\npath = "x"\n'
        '[method]\nname = "fedavg"\n'
    )
    study = read_study(file, ["train.rounds=3", "name=mine", "method.phases.frozen=2", "seed=7"])
    assert (study.train.rounds, study.name, study.seed) == (3, "mine", 7)
    assert study.method.phases == {"frozen": 2}
    for wrong, words in (
        ("train.rounds", "section.field=value"),
        ("train.rounds.x=1", "train.rounds"),
        ("train.round=1", "train.round"),
        ("train.rounds=many", "train.rounds"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_study(file, [wrong])


def test_the_method_is_a_name_or_a_plan_or_both() -> None:
    with pytest.raises(ConfigError, match=r"method: .*set name"):
        study_from_dict(MINIMAL | {"method": {}})
    both = study_from_dict(
        MINIMAL | {"method": {"name": "head-only", "plan": 'hold(named("*.bias"))'}}
    )
    alone = make_method(study_from_dict(MINIMAL | {"method": {"name": "head-only"}}))
    assert make_method(both) == replace(alone, plan=chain(alone.plan, hold(named("*.bias"))))


def test_a_rule_for_products_is_said_as_a_text() -> None:
    said = {"plan": "chain(freeze(), share(adapter))", "lora_aggregation": "by_residual(scale=2.0)"}
    assert make_method(study_from_dict(MINIMAL | {"method": said})).lora_aggregation == by_residual(
        2.0
    )
    assert (
        make_method(study_from_dict(MINIMAL | {"method": {"name": "fedit"}})).lora_aggregation
        == average_separately()
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"_attn_implementation": "someone/kernel"}, "would download code"),
        ({"attn_implementation": "paged|someone/kernel"}, "would download code"),
        ({"text_config": {"attn_implementation": "someone/kernel@main"}}, "would download code"),
        ({"vision_config": {"auto_map": {"AutoModel": "x.Y"}}}, "auto_map is not a setting"),
        ({"trust_remote_code": True}, "trust_remote_code is not a setting of the model"),
        ({"offload_folder": "/tmp"}, "offload_folder is not a setting of the model"),
        ({"attn_implementation": "sdpa", "hidden_size": 16}, ""),
    ],
)
def test_a_model_is_given_settings_and_no_code(settings: dict[str, Any], words: str) -> None:
    """transformers takes the name of a kernel on the hub for an attention, and loads it."""
    said: dict[str, Any] = {
        "model": {"type": "vit", "config": settings},
        "task": {"kind": "masked-lm"},
        "data": {"path": "rows.parquet"},
        "method": {"plan": "share()"},
    }
    if not words:
        assert study_from_dict(said).model.config == settings
        return
    with pytest.raises(ConfigError, match=rf"model\.config: .*{words}"):
        study_from_dict(said)
