# SPDX-License-Identifier: Apache-2.0
"""Names: the code of others that a study calls by name, told apart by its content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fedplan.data.metrics import METRIC_NAMES
from fedplan.data.own import OWN
from fedplan.data.tasks import TASK_NAMES
from fedplan.methods.registry import METHOD_NAMES, METHODS, SERVER_OPTIMISER_NAMES
from fedplan.naming import Found, Registry
from fedplan.training.loops import LOOP_NAMES
from fedplan.training.optimisers import OPTIMISER_NAMES
from fedplan.training.probes import PROBE_NAMES
from fedplan.training.wraps import WRAP_NAMES

if TYPE_CHECKING:
    from fedplan.studies.schema import Study
    from fedplan.studies.sections import MethodSection


def code_of_names(study: Study) -> list[str]:
    """What stands behind each name of a study that changes a turn, but for what everybody has."""
    return [f"\n{each.name} {each.content}" for each in found_in(study) if each.content]


def code_of_metrics(study: Study) -> list[str]:
    """The same of the names that change no turn, but run at a site: its metrics."""
    found = map(METRIC_NAMES.find, study.evaluate.metrics)
    return [f"\n{each.name} {each.content}" for each in found if each.content]


def found_in(study: Study) -> list[Found[Any]]:
    """What each name of a study stands for, and whose it is."""
    kind = "" if study.task.kind == OWN else study.task.kind
    said = [(TASK_NAMES, kind), (OPTIMISER_NAMES, study.train.optimiser)]
    said += _in_method(study.method)
    return [names.find(name) for names, name in said if name]


def _in_method(said: MethodSection) -> Iterator[tuple[Registry[Any], str]]:
    yield METHOD_NAMES, said.name
    yield PROBE_NAMES, said.probe
    yield LOOP_NAMES, said.loop
    yield SERVER_OPTIMISER_NAMES, said.server_optimiser
    yield from ((WRAP_NAMES, name) for name in said.wraps)
    # Ours take the name of a probe as a setting, as safl does.
    if said.name in METHODS and isinstance(probe := said.settings.get("probe"), str):
        yield PROBE_NAMES, probe
    if said.inside is not None:
        yield from _in_method(said.inside)
