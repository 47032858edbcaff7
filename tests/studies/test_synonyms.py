# SPDX-License-Identifier: Apache-2.0
"""Words of other tools in a study file: valid fields, or a message that names the right field."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commands import run
from typer.main import get_command

from fedplan.cli import app
from fedplan.methods import method_by_name
from fedplan.studies.field_types import SECTION_SYNONYMS, SYNONYMS, unknown_field_message
from fedplan.studies.schema import ConfigError, Study, read_study, study_from_dict
from fedplan.studies.sections import AdapterSection

MINIMAL: dict[str, Any] = {
    "model": {"path": "weights"},
    "task": {"kind": "text-classification", "label": "y"},
    "data": {"path": "rows.parquet"},
    "method": {"name": "fedavg"},
}
REQUIRED: dict[str, dict[str, Any]] = {
    "privacy": {"unit": "client", "epsilon": 8.0},
    "early_stopping": {"metric": "loss"},
}
"""Fields without which a section is invalid whatever else it has."""
TABLES = (SYNONYMS, *SECTION_SYNONYMS.values())
SUGGESTIONS = sorted({text for table in TABLES for text in table.values()})


def section_classes() -> dict[str, Any]:
    """The class of each section by its name."""
    classes = dict[str, Any]()
    for name, field in Study.model_fields.items():
        types = [field.annotation, *getattr(field.annotation, "__args__", ())]
        if found := [each for each in types if hasattr(each, "model_fields")]:
            classes[name] = found[0]
    return classes | {"model.adapter": AdapterSection}


SECTIONS = section_classes()
FIELD = re.compile(rf"\b({'|'.join(map(re.escape, SECTIONS))})\.(\w+)")


@pytest.mark.parametrize("suggestion", SUGGESTIONS)
def test_a_suggestion_names_fields_that_exist(suggestion: str) -> None:
    fields = [
        (section, field)
        for section, field in FIELD.findall(suggestion)
        if f"{section}.{field}" not in SECTIONS  # a section within a section
    ]
    for section, field in fields:
        assert field in SECTIONS[section].model_fields, suggestion
    if not fields and "model.adapter" not in suggestion:
        # No field of a section: a field of the file, a section, an option, or "nothing".
        command = get_command(app).commands["run"]  # type: ignore[attr-defined]
        options = {option for param in command.params for option in param.opts}
        named = set(re.findall(r"--[a-z-]+", suggestion))
        first = suggestion.replace(",", "").split()[0]
        assert (named and named <= options) or first in {*Study.model_fields, *SECTIONS, "nothing:"}


@pytest.mark.parametrize("suggestion", [s for s in SUGGESTIONS if re.search(r' = "\w+"$', s)])
def test_a_suggested_value_is_valid(suggestion: str) -> None:
    if found := re.fullmatch(r'(\w+)\.(\w+) = "(\w+)"', suggestion):
        section, field, value = found.groups()
        values = {**MINIMAL.get(section, {}), **REQUIRED.get(section, {}), field: value}
        study = study_from_dict(MINIMAL | {section: values})
        assert getattr(getattr(study, section), field) == value
    elif found := re.fullmatch(r'(\w+) with (\w+) = "(\w+)"', suggestion):
        section, field, value = found.groups()
        assert study_from_dict(MINIMAL | {section: {field: value}})
    else:
        setting, name = re.findall(r'settings = \{ (\w+) = .* of name = "(\w+)"', suggestion)[0]
        assert method_by_name(name, {setting: 4 if setting == "rank" else 0.5})


def test_no_synonym_hides_a_field_of_its_own_name() -> None:
    for section, table in SECTION_SYNONYMS.items():
        fields = SECTIONS[section].model_fields if section else Study.model_fields
        assert not table.keys() & fields.keys()


VALID = ""
WORDS = [
    # Hugging Face Trainer
    ("train", "learning_rate", "train.lr"),
    ("train", "per_device_train_batch_size", "train.batch_size"),
    ("evaluate", "per_device_eval_batch_size", "evaluate.batch_size"),
    ("train", "num_train_epochs", "train.epochs"),
    ("train", "max_steps", "train.steps"),
    ("train", "weight_decay", VALID),
    ("train", "max_grad_norm", VALID),
    ("train", "gradient_accumulation_steps", VALID),
    ("train", "gradient_checkpointing", VALID),
    ("train", "group_by_length", VALID),
    ("train", "lr_scheduler_type", "train.lr_scheduler"),
    ("train", "warmup_ratio", "train.warmup"),
    ("train", "optim", "train.optimizer"),
    ("train", "adam_beta1", "train.optimizer_settings"),
    ("train", "bf16", 'train.precision = "bf16"'),
    ("train", "dataloader_num_workers", "train.num_workers"),
    ("train", "seed", "seed, at the top of the file"),
    ("evaluate", "eval_strategy", "evaluate.every"),
    ("evaluate", "load_best_model_at_end", 'evaluate.keep_best = "global"'),
    ("evaluate", "metric_for_best_model", "early_stopping.metric"),
    ("train", "early_stopping_patience", "early_stopping.patience"),
    ("model", "model_name_or_path", "model.path"),
    ("model", "load_in_4bit", 'model.quantization = "nf4"'),
    ("model", "torch_dtype", "model.dtype"),
    ("model", "lora_alpha", "model.adapter"),
    ("task", "max_seq_length", "task.max_length"),
    # Flower
    ("train", "num-server-rounds", "train.rounds"),
    ("train", "local-epochs", "train.epochs"),
    ("train", "learning-rate", "train.lr"),
    ("train", "batch-size", "train.batch_size"),
    ("clients", "fraction-fit", "clients.fraction"),
    ("clients", "fraction_train", "clients.fraction"),
    ("clients", "min_available_clients", "clients.min_updates"),
    ("data", "num_partitions", "data.num_clients"),
    ("data", "partition_by", "data.partition_column"),
    ("method", "strategy", "method.name"),
    ("method", "proximal_mu", "method.settings = { mu = ... }"),
    ("timeouts", "round_timeout", "timeouts.updates"),
    # PFLlib
    ("train", "global_rounds", "train.rounds"),
    ("train", "local_learning_rate", "train.lr"),
    ("clients", "join_ratio", "clients.fraction"),
    ("clients", "client_drop_rate", "clients.dropout_fraction"),
    ("clients", "num_clients", "data.num_clients"),
    ("data", "clients", "num_clients"),
    ("method", "algorithm", "method.name"),
    ("evaluate", "eval_gap", "evaluate.every"),
    ("data", "dataset", "data.path"),
    # pfl
    ("train", "central_num_iterations", "train.rounds"),
    ("train", "local_num_epochs", "train.epochs"),
    ("train", "local_batch_size", "train.batch_size"),
    ("clients", "train_cohort_size", "clients.fraction"),
    ("evaluate", "evaluation_frequency", "evaluate.every"),
    ("privacy", "clipping_bound", "privacy.clipping_norm"),
    # Opacus
    ("privacy", "noise_multiplier", VALID),
    ("privacy", "max_grad_norm", "privacy.clipping_norm"),
    ("privacy", "max_per_sample_grad_norm", "privacy.clipping_norm"),
    ("privacy", "target_epsilon", "privacy.epsilon"),
    ("privacy", "target-delta", "privacy.delta"),
    ("privacy", "poisson_sampling", "nothing: [privacy] always samples this way"),
]
"""Section where a user of that tool types the word, the word, and the field that is meant."""


@pytest.mark.parametrize(("section", "word", "meant"), WORDS)
def test_a_word_of_another_tool_is_valid_or_answered(section: str, word: str, meant: str) -> None:
    if meant == VALID:
        assert word in SECTIONS[section].model_fields
        return
    values = {**MINIMAL.get(section, {}), **REQUIRED.get(section, {}), word: 1}
    with pytest.raises(ConfigError) as raised:
        study_from_dict(MINIMAL | {section: values})
    [line] = str(raised.value).splitlines()[1:]
    assert f"{section}.{word}: there is no field {word!r}: did you mean {meant}" in line


@pytest.mark.parametrize("word", SYNONYMS)
def test_hyphens_and_capitals_change_nothing(word: str) -> None:
    for typed in (word.replace("_", "-"), word.upper()):
        message = unknown_field_message(Study, ("train", typed))
        assert message == f"there is no field {typed!r}: did you mean {SYNONYMS[word]}?"


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("learning_rate=0.1", "train.lr"),
        ("learning-rate=0.1", "train.lr"),
        ("lr=0.1", "train.lr"),
        ("num_server_rounds=3", "train.rounds"),
        ("batch_size=8", "train.batch_size or evaluate.batch_size"),
        ("target_epsilon=8.0", "privacy.epsilon"),
        ("training.lr=0.1", "train"),
    ],
)
def test_an_override_without_its_section_is_answered(
    override: str, meant: str, tmp_path: Path
) -> None:
    file = tmp_path / "study.toml"
    file.write_text(
        '[model]\ntype = "vit"\n[task]\nkind = "image-classification"\n[data]\npath = "x"\n'
        '[method]\nname = "fedavg"\n'
    )
    with pytest.raises(ConfigError, match=rf"did you mean {re.escape(meant)}\?"):
        read_study(file, [override])
    code, out = run("run", str(file), "--output", str(tmp_path / "out"), "--set", override)
    assert code == 2 and f"did you mean {meant}?" in " ".join(out.split())
