# SPDX-License-Identifier: Apache-2.0
"""Translation of old study words and metric names, for committed questions, studies and results.

These files keep the words they were committed with: the digest of a question proves that it came
before its runs. Files in today's words pass unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

SECTIONS = {"continues": "continue_from", "patience": "timeouts", "stop": "early_stopping"}
"""Sections and top-level fields of a study, old to new."""
FIELDS: dict[str, dict[str, str]] = {
    "model": {
        "still": "freeze_batch_norm",
        "like": "layer_map_like",
        "anatomy": "layer_map",
        "given": "from_python",
        "quantised": "quantization",
        "settings": "config",
    },
    "task": {"template": "prompt_template", "weights": "class_weights", "given": "from_python"},
    "data": {
        "only": "filter",
        "train": "train_filter",
        "test": "test_filter",
        "limit": "max_examples",
        "test_limit": "max_test_examples",
        "by": "partition",
        "clients": "num_clients",
        "column": "partition_column",
        "classes": "classes_per_client",
        "each": "clients_per_value",
        "least": "min_examples",
        "own_test": "holdout_fraction",
        "given": "from_python",
    },
    "method": {
        "together": "joint_choice",
        "inside": "base_method",
        "wire": "compression",
        "wraps": "client_hooks",
        "product": "lora_aggregation",
        "server_optimiser": "server_optimizer",
        "server_settings": "server_optimizer_settings",
        "given": "from_python",
    },
    "train": {
        "rate": "lr",
        "optimiser": "optimizer",
        "optimiser_settings": "optimizer_settings",
        "schedule": "lr_scheduler",
        "schedule_settings": "lr_scheduler_settings",
        "over": "lr_scheduler_span",
        "decay": "weight_decay",
        "decay_all": "decay_norm_and_bias",
        "batch": "batch_size",
        "accumulate": "gradient_accumulation_steps",
        "clip": "max_grad_norm",
        "checkpointing": "gradient_checkpointing",
        "compile": "torch_compile",
        "by_length": "group_by_length",
        "workers": "num_workers",
        "reuse": "cache_activations",
        "cache": "activation_cache_mb",
    },
    "clients": {
        "share": "fraction",
        "dropped": "dropout_fraction",
        "late": "late_fraction",
        "quorum": "min_updates",
    },
    "evaluate": {"batch": "batch_size", "sites": "on_clients", "attention": "attention_examples"},
    "patience": {
        "answers": "updates",
        "absent": "reconnect",
        "look": "poll_interval",
        "scores": "evaluations",
    },
    "stop": {"least": "min_delta", "better": "mode"},
    "privacy": {
        "clip": "clipping_norm",
        "noise": "noise_multiplier",
        "size": "examples_per_site",
        "vote": "vote_noise_multiplier",
        "period": "vote_every",
        "quantile": "clipping_quantile",
        "cap": "max_weight",
    },
    "defence": {
        "liars": "malicious_clients",
        "weight_cap": "max_weight",
        "share_cap": "max_weight_fraction",
        "change_bound": "max_norm_ratio",
    },
    "aggregation": {
        "floor": "min_contributors",
        "wide": "wide_integers",
        "alike": "equal_weights",
    },
}
"""Fields of each section, by its old name, old to new."""
VALUES: dict[tuple[str, str], dict[str, str]] = {
    ("evaluate", "keep_best"): {"world": "global", "own": "personal"},
    ("stop", "better"): {"higher": "max", "lower": "min"},
    ("aggregation", "kind"): {"masked": "secure"},
    ("train", "over"): {"turn": "round"},
}
"""Values of fields, by their old section and name, old to new."""
METHOD_SETTINGS = {
    "strength": "mu",
    "rate": "lr",
    "floor": "eps",
    "rows": "examples",
    "together": "joint_choice",
    "own_epochs": "head_epochs",
    "on": "target",
}
"""Settings of methods and server optimizers, old to new; no method uses an old name today."""
SPREADS = ("std", "worst", "best", "worst_decile")
"""Statistics over clients whose metric names begin with the primary metric today."""


def translate_study(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested values of a study file in today's words."""
    return {SECTIONS.get(key, key): _section(key, value) for key, value in values.items()}


def translate_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes to a study in today's words; keys are sections or dotted fields."""
    translated = dict[str, Any]()
    for key, value in changes.items():
        names, nested = key.split("."), value
        for name in reversed(names):
            nested = {name: nested}
        nested, path = translate_study(nested), list[str]()
        for _ in names:
            ((name, nested),) = nested.items()
            path.append(name)
        translated[".".join(path)] = nested
    return translated


def translate_metric(name: str, primary: str) -> str:
    """Return today's name of a metric, or of a pattern of metrics.

    primary: the task's primary metric, which `personal.mean` and its spread are of.
    """
    parts = name.split(".")
    if parts[0] == "sites":
        parts = [{"own": "personal", "world": "global"}.get(part, part) for part in parts]
    if parts[0] == "world":
        parts[0] = "global"
    if parts[0] == "personal" or parts[:2] == ["sites", "spread"]:
        last = parts[-1]
        parts[-1] = primary if last == "mean" else f"{primary}_{last}" if last in SPREADS else last
    return ".".join(parts)


def translate_metrics(row: Mapping[str, Any], primary: str) -> dict[str, Any]:
    """Return the nested metrics of one round under today's names."""
    translated = dict[str, Any]()
    for key, value in row.items():
        if key == "personal":
            value = {
                translate_metric(f"{key}.{name}", primary).removeprefix(f"{key}."): number
                for name, number in value.items()
            }
        translated[translate_metric(key, primary)] = value
    return translated


def translate_figure(svg: str) -> str:
    """Return a committed drawing with today's words for a log scale."""
    return svg.replace(", by factors</text>", ", log scale</text>")


def _section(section: str, value: Any) -> Any:
    """Return one section, or top-level field, in today's words."""
    if not isinstance(value, dict):
        return value
    translated = dict[str, Any]()
    for name, field in cast("dict[str, Any]", value).items():
        if section == "method" and isinstance(field, dict):
            field = _method_table(name, cast("dict[str, Any]", field))
        words = VALUES.get((section, name), {})
        field = words.get(field, field) if isinstance(field, str) else field
        translated[FIELDS.get(section, {}).get(name, name)] = field
    return translated


def _method_table(name: str, field: dict[str, Any]) -> dict[str, Any]:
    """Return a table of the method section, a base method or settings, in today's words."""
    if FIELDS["method"].get(name, name) == "base_method":
        return _section("method", field)
    if name.endswith("settings"):
        return {METHOD_SETTINGS.get(key, key): value for key, value in field.items()}
    return field
