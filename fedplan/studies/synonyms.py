# SPDX-License-Identifier: Apache-2.0
"""Words of other tools, each with the field of a study that means the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from pydantic import BaseModel

from fedplan.naming import unknown_name_message

SYNONYMS = {
    # Hugging Face Trainer and TRL
    "adam_beta1": "train.optimizer_settings = { betas = [...] }",
    "adam_beta2": "train.optimizer_settings = { betas = [...] }",
    "adam_epsilon": "train.optimizer_settings = { eps = ... }",
    "dataloader_num_workers": "train.num_workers",
    "early_stopping_patience": "early_stopping.patience",
    "early_stopping_threshold": "early_stopping.min_delta",
    "eval_steps": "evaluate.every",
    "eval_strategy": "evaluate.every",
    "evaluation_strategy": "evaluate.every",
    "greater_is_better": 'early_stopping.mode = "max"',
    "label_names": "task.labels",
    "learning_rate": "train.lr",
    "load_best_model_at_end": 'evaluate.keep_best = "global"',
    "load_in_4bit": 'model.quantization = "nf4"',
    "load_in_8bit": 'model.quantization = "int8"',
    "lora_alpha": 'model.adapter = { type = "lora", lora_alpha = ... }',
    "lora_dropout": 'model.adapter = { type = "lora", lora_dropout = ... }',
    "lora_r": 'method.settings = { rank = ... } of name = "fedit"',
    "lr_scheduler_kwargs": "train.lr_scheduler_settings",
    "lr_scheduler_type": "train.lr_scheduler",
    "max_seq_length": "task.max_length",
    "max_steps": "train.steps",
    "max_train_samples": "data.max_examples",
    "max_eval_samples": "data.max_test_examples",
    "metric_for_best_model": "early_stopping.metric",
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "num_labels": "task.labels",
    "num_train_epochs": "train.epochs",
    "optim": "train.optimizer",
    "optim_args": "train.optimizer_settings",
    "output_dir": "--output on the command line",
    "per_device_eval_batch_size": "evaluate.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "bf16": 'train.precision = "bf16"',
    "fp16": 'train.precision = "fp16"',
    "report_to": "evaluate.trackers",
    "resume_from_checkpoint": "fedplan run --resume RUN",
    "target_modules": "model.adapter.target",
    "text_column": "task.input",
    "label_column": "task.label",
    "torch_compile_backend": "train.torch_compile",
    "torch_dtype": "model.dtype",
    "train_batch_size": "train.batch_size",
    "warmup_ratio": "train.warmup",
    "warmup_steps": "train.warmup",
    # Flower
    "fraction_evaluate": "evaluate.every (every evaluation asks all clients)",
    "fraction_fit": "clients.fraction",
    "fraction_train": "clients.fraction",
    "local_epochs": "train.epochs",
    "min_available_clients": "clients.min_updates",
    "min_available_nodes": "clients.min_updates",
    "min_fit_clients": "clients.min_updates",
    "min_train_nodes": "clients.min_updates",
    "num_partitions": "data.num_clients",
    "num_supernodes": "data.num_clients",
    "num_rounds": "train.rounds",
    "num_server_rounds": "train.rounds",
    "partition_by": "data.partition_column",
    "partitioner": "data.partition",
    "proximal_mu": 'method.settings = { mu = ... } of name = "fedprox"',
    "round_timeout": "timeouts.updates",
    "server_learning_rate": "method.server_optimizer_settings = { lr = ... }",
    "strategy": "method.name",
    # PFLlib
    "algorithm": "method.name",
    "client_drop_rate": "clients.dropout_fraction",
    "eval_gap": "evaluate.every",
    "global_rounds": "train.rounds",
    "join_ratio": "clients.fraction",
    "learning_rate_decay": 'train.lr_scheduler, such as "linear"',
    "local_learning_rate": "train.lr",
    "num_classes": "task.labels",
    "dirichlet_alpha": "data.alpha",
    # pfl
    "central_learning_rate": "method.server_optimizer_settings = { lr = ... }",
    "central_lr": "method.server_optimizer_settings = { lr = ... }",
    "central_num_iterations": "train.rounds",
    "evaluation_frequency": "evaluate.every",
    "local_batch_size": "train.batch_size",
    "local_max_grad_norm": "train.max_grad_norm",
    "local_num_epochs": "train.epochs",
    "train_cohort_size": "clients.fraction",
    # Opacus and dp-accounting
    "clip_norm": "privacy.clipping_norm",
    "clipping_bound": "privacy.clipping_norm",
    "clipping_threshold": "privacy.clipping_norm",
    "max_per_sample_grad_norm": "privacy.clipping_norm",
    "poisson_sampling": "nothing: [privacy] always samples this way",
    "sigma": "privacy.noise_multiplier",
    "sample_rate": "clients.fraction, or train.batch_size / privacy.examples_per_site",
    "target_delta": "privacy.delta",
    "target_epsilon": "privacy.epsilon",
    # PyTorch and everyday words
    "betas": "train.optimizer_settings = { betas = [...] }",
    "cohort_size": "clients.fraction",
    "lr_schedule": "train.lr_scheduler",
    "optimiser": "train.optimizer",
    "patience": "early_stopping.patience",
    "scheduler": "train.lr_scheduler",
    "validation_split": "data.holdout_fraction",
    "val_split": "data.holdout_fraction",
    "wd": "train.weight_decay",
}
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

    `word` is the unknown name and `section` the dotted name of the section that it was written in,
    "" at the top of the file. Case is ignored, and hyphens count as underscores.
    """
    name = _normalize(word)
    return SECTION_SYNONYMS.get(section, {}).get(name, "") or SYNONYMS.get(name, "")


def unknown_field_message(schema: type[BaseModel], location: Sequence[int | str]) -> str:
    """Return the message for an unknown field, with the field that the user most likely means.

    `schema` is the class of the whole file and `location` the path of the unknown field. Looks for
    a word of another tool, then for a field of that name in this section and in others, then for
    the closest field of this section; else lists all fields of this section.
    """
    word, sections = str(location[-1])[:60], list(map(str, location[:-1]))
    fields = _section_fields(schema, sections)
    name = _normalize(word)
    suggestion = suggest_field(word, ".".join(sections))
    if not suggestion and name in fields:
        suggestion = ".".join([*sections, name])
    if suggestion := suggestion or _fields_elsewhere(schema, name):
        return f"there is no field {word!r}: did you mean {suggestion}?"
    return unknown_name_message("field", word, fields)


def _normalize(word: str) -> str:
    return word.lower().replace("-", "_")


def _fields_elsewhere(schema: type[BaseModel], name: str) -> str:
    """Return the dotted names of the fields with this name in other sections, joined by "or"."""
    if name in schema.model_fields and not _section_fields(schema, [name]):
        return f"{name}, at the top of the file"
    return " or ".join(
        f"{section}.{name}"
        for section in _SEARCHED_SECTIONS
        if name in _section_fields(schema, [section])
    )


def _section_fields(schema: type[BaseModel], sections: Sequence[str]) -> list[str]:
    """Return the names of a section's fields; none if there is no such section."""
    section: type[BaseModel] | None = schema
    for name in sections:
        field = section.model_fields.get(name) if section else None
        types = get_args(field.annotation) or (field.annotation,) if field else ()
        section = next(
            (type_ for type_ in types if isinstance(type_, type) and issubclass(type_, BaseModel)),
            None,
        )
    return list(section.model_fields) if section else []
