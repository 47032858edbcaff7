# SPDX-License-Identifier: Apache-2.0
"""Words of other tools, each with the field of a study that means the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel

from fedplan.naming import unknown_name_message

_SYNONYMS_BY_FIELD = {
    "clients.dropout_fraction": "client_drop_rate",
    "clients.fraction": "cohort_size fraction_fit fraction_train join_ratio train_cohort_size",
    "clients.min_updates": "min_available_clients min_available_nodes min_fit_clients "
    "min_train_nodes",
    "data.alpha": "dirichlet_alpha",
    "data.holdout_fraction": "val_split validation_split",
    "data.max_examples": "max_train_samples",
    "data.max_test_examples": "max_eval_samples",
    "data.num_clients": "num_partitions num_supernodes",
    "data.partition": "partitioner",
    "data.partition_column": "partition_by",
    "early_stopping.metric": "metric_for_best_model",
    "early_stopping.min_delta": "early_stopping_threshold",
    'early_stopping.mode = "max"': "greater_is_better",
    "early_stopping.patience": "early_stopping_patience patience",
    "evaluate.batch_size": "per_device_eval_batch_size",
    "evaluate.every": "eval_gap eval_steps eval_strategy evaluation_frequency evaluation_strategy",
    "evaluate.every (every evaluation asks all clients)": "fraction_evaluate",
    'evaluate.keep_best = "global"': "load_best_model_at_end",
    "evaluate.trackers": "report_to",
    "fedplan run --resume RUN": "resume_from_checkpoint",
    "method.name": "algorithm strategy",
    "method.server_optimizer_settings = { lr = ... }": "central_learning_rate central_lr "
    "server_learning_rate",
    'method.settings = { mu = ... } of name = "fedprox"': "proximal_mu",
    'method.settings = { rank = ... } of name = "fedit"': "lora_r",
    'model.adapter = { type = "lora", lora_alpha = ... }': "lora_alpha",
    'model.adapter = { type = "lora", lora_dropout = ... }': "lora_dropout",
    "model.adapter.target": "target_modules",
    "model.dtype": "torch_dtype",
    "model.path": "model_name model_name_or_path",
    'model.quantization = "int8"': "load_in_8bit",
    'model.quantization = "nf4"': "load_in_4bit",
    "privacy.clipping_norm": "clip_norm clipping_bound clipping_threshold max_per_sample_grad_norm",
    "privacy.delta": "target_delta",
    "privacy.epsilon": "target_epsilon",
    "privacy.noise_multiplier": "sigma",
    "task.input": "text_column",
    "task.label": "label_column",
    "task.labels": "label_names num_classes num_labels",
    "task.max_length": "max_seq_length",
    "timeouts.updates": "round_timeout",
    "train.batch_size": "local_batch_size per_device_train_batch_size train_batch_size",
    "train.epochs": "local_epochs local_num_epochs num_train_epochs",
    "train.lr": "learning_rate local_learning_rate",
    "train.lr_scheduler": "lr_schedule lr_scheduler_type scheduler",
    "train.lr_scheduler_settings": "lr_scheduler_kwargs",
    "train.max_grad_norm": "local_max_grad_norm",
    "train.num_workers": "dataloader_num_workers",
    "train.optimizer": "optim optimiser",
    "train.optimizer_settings": "optim_args",
    "train.optimizer_settings = { betas = [...] }": "adam_beta1 adam_beta2 betas",
    "train.optimizer_settings = { eps = ... }": "adam_epsilon",
    'train.precision = "bf16"': "bf16",
    'train.precision = "fp16"': "fp16",
    "train.rounds": "central_num_iterations global_rounds num_rounds num_server_rounds",
    "train.steps": "max_steps",
    "train.torch_compile": "torch_compile_backend",
    "train.warmup": "warmup_ratio warmup_steps",
    "train.weight_decay": "wd",
    "--output on the command line": "output_dir",
    "clients.fraction, or train.batch_size / privacy.examples_per_site": "sample_rate",
    "nothing: [privacy] always samples this way": "poisson_sampling",
    'train.lr_scheduler, such as "linear"': "learning_rate_decay",
}
"""Each field with the words for it in Trainer, TRL, Flower, PFLlib, pfl, Opacus and PyTorch."""
SYNONYMS = {word: field for field, words in _SYNONYMS_BY_FIELD.items() for word in words.split()}
"""Each word that users of other tools type, with the field that means the same here."""
SECTION_SYNONYMS = {
    "": {
        "differential_privacy": "privacy",
        "dp": "privacy",
        "evaluation": "evaluate",
        "secagg": 'aggregation with kind = "secure"',
        "server": "method.server_optimizer, or aggregation",
        "training": "train",
        "dataset": "data",
        "timeout": "timeouts",
    },
    "data": {"dataset": "data.path"},
    "model": {"name": "model.path", "model": "model.path"},
    "privacy": {"max_grad_norm": "privacy.clipping_norm"},  # Opacus
}
"""Words that have this meaning in one section only; "" is the top of the file."""
_SEARCHED_SECTIONS = ("train", "data", "clients", "privacy", "task", "evaluate")
"""Sections whose field names are clear enough to be suggested for a word in another section."""


def suggest_field(word: str, section: str) -> str:
    """Return the field that a word of another tool means, or "" if the tables have none.

    `word`: the unknown name. `section`: dotted name of the section in which the word was written,
    "" at the top of the file. Case is ignored, and hyphens count as underscores.
    """
    name = _normalize(word)
    return SECTION_SYNONYMS.get(section, {}).get(name, "") or SYNONYMS.get(name, "")


def unknown_field_message(schema: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return the message for an unknown field, with the field that the user most likely means.

    `schema`: the class of the whole file. `location`: the path of the unknown field. Looks for a
    word of another tool, then for a field of that name in this section and in others, then for the
    closest field of this section; else lists all fields of this section.
    """
    word, sections = str(location[-1])[:60], list(map(str, location[:-1]))
    fields = _section_fields(schema, sections)
    name = _normalize(word)
    suggestion = suggest_field(word, ".".join(sections))
    if not suggestion and name in fields:
        suggestion = ".".join([*sections, name])
    if not suggestion and name in schema.model_fields and not _section_fields(schema, [name]):
        suggestion = f"{name}, at the top of the file"
    suggestion = suggestion or " or ".join(
        f"{section}.{name}"
        for section in _SEARCHED_SECTIONS
        if name in _section_fields(schema, [section])
    )
    if suggestion:
        return f"there is no field {word!r}: did you mean {suggestion}?"
    return unknown_name_message("field", word, fields)


def _normalize(word: str) -> str:
    return word.lower().replace("-", "_")


def _section_fields(schema: type[BaseModel], sections: Sequence[str]) -> list[str]:
    """Return the names of a section's fields; empty if there is no section of that name.

    `schema`: the class of the whole file. `sections`: the names on the way to the section.
    """
    section: type[BaseModel] | None = schema
    for name in sections:
        field = section.model_fields.get(name) if section else None
        types = get_args(field.annotation) or (field.annotation,) if field else ()
        section = next(
            (type_ for type_ in types if isinstance(type_, type) and issubclass(type_, BaseModel)),
            None,
        )
    return list(section.model_fields) if section else []
