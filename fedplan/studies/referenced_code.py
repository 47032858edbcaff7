# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that a study names: methods, tasks, metrics and hooks, and digests of their code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fedplan.data.custom_task import CUSTOM_KIND
from fedplan.data.metrics import METRIC_NAMES
from fedplan.data.tasks import TASK_NAMES
from fedplan.methods.registry import METHOD_REGISTRY, METHODS, SERVER_OPTIMIZER_REGISTRY
from fedplan.naming import NamedObject, Registry
from fedplan.training.client_hooks import CLIENT_HOOK_NAMES
from fedplan.training.loops import LOOP_NAMES
from fedplan.training.optimizers import OPTIMIZER_NAMES
from fedplan.training.probes import PROBE_NAMES

if TYPE_CHECKING:
    from fedplan.studies.schema import Study
    from fedplan.studies.sections import MethodSection


def turn_code_fingerprints(study: Study) -> list[str]:
    """Return the name and code fingerprint of each plug-in of a study that affects training."""
    return [
        f"\n{plugin.name} {plugin.code_fingerprint}"
        for plugin in named_objects(study)
        if plugin.code_fingerprint
    ]


def metric_code_fingerprints(study: Study) -> list[str]:
    """Return the name and code fingerprint of each plug-in metric of a study."""
    metrics = map(METRIC_NAMES.find, study.evaluate.metrics)
    return [
        f"\n{metric.name} {metric.code_fingerprint}"
        for metric in metrics
        if metric.code_fingerprint
    ]


def named_objects(study: Study) -> list[NamedObject[Any]]:
    """Resolve each name of a study that affects training: task, optimizer, method and its parts."""
    kind = "" if study.task.kind == CUSTOM_KIND else study.task.kind
    named = [(TASK_NAMES, kind), (OPTIMIZER_NAMES, study.train.optimizer)]
    named += _names_in_method(study.method)
    return [registry.find(name) for registry, name in named if name]


def _names_in_method(section: MethodSection) -> Iterator[tuple[Registry[Any], str]]:
    """Yield the registry and name of each plug-in of a method section and its inner methods."""
    yield METHOD_REGISTRY, section.name
    yield PROBE_NAMES, section.probe
    yield LOOP_NAMES, section.loop
    yield SERVER_OPTIMIZER_REGISTRY, section.server_optimizer
    yield from ((CLIENT_HOOK_NAMES, name) for name in section.client_hooks)
    # Built-in methods such as safl take the name of a probe as a setting.
    if section.name in METHODS and isinstance(probe := section.settings.get("probe"), str):
        yield PROBE_NAMES, probe
    if section.base_method is not None:
        yield from _names_in_method(section.base_method)
