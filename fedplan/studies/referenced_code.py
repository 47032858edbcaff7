# SPDX-License-Identifier: Apache-2.0
"""Plug-ins that a study names: methods, tasks, metrics and hooks, and digests of their code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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
    """Return the lines on a study's plug-ins that affect training: each name and code digest.

    Built-in objects have no line. Imports the plug-ins; raises UnknownName if one is missing.
    """
    return _fingerprint_lines(named_objects(study))


def metric_code_fingerprints(study: Study) -> list[str]:
    """Return the lines on a study's plug-in metrics; see `turn_code_fingerprints`."""
    return _fingerprint_lines(map(METRIC_NAMES.find, study.evaluate.metrics))


def _fingerprint_lines(plugins: Iterable[NamedObject[Any]]) -> list[str]:
    return [f"\n{p.name} {p.code_fingerprint}" for p in plugins if p.code_fingerprint]


def named_objects(study: Study) -> list[NamedObject[Any]]:
    """Return the object of each name in a study that affects training: task, optimizer, method.

    Includes the method's probe, training loop, server optimizer and client hooks, also of base
    methods. Imports plug-ins; raises UnknownName if one is missing.
    """
    kind = "" if study.task.kind == CUSTOM_KIND else study.task.kind
    named = [(TASK_NAMES, kind), (OPTIMIZER_NAMES, study.train.optimizer)]
    named += _names_in_method(study.method)
    return [registry.find(name) for registry, name in named if name]


def _names_in_method(section: MethodSection) -> Iterator[tuple[Registry[Any], str]]:
    """Yield (registry, name) for each plug-in field of a method section and of its base methods.

    The name is "" for a field that is not set.
    """
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
