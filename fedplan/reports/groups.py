# SPDX-License-Identifier: Apache-2.0
"""Groups: runs that differ by their seed alone, and what to call each group beside the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedplan.reports.figures.drawing import printable
from fedplan.studies.plain import flat
from fedplan.studies.schema import Study

ASIDE: dict[str, Any] = {
    **dict.fromkeys(("seed", "name", "threads", "device", "deterministic", "patience"), True),
    "train": {"cache"},
}
"""What two runs of one group may differ in: the seed, a name, and each machine's own."""
PLANS = ("method.plan", "method.given")
"""Fields that say a plan: it is told by its text."""
SETTINGS = "method.settings."
"""How fields begin that stand beside the method's own name."""
UNSAID: tuple[Any, ...] = (None, "", [], {})
"""Values of a field that say nothing."""
LONG = 72
"""Letters of a name; a longer one tells a reader nothing at a glance."""

T = TypeVar("T")
Member = tuple[Study, str, Path]
"""Of a run: its study, the text of its plan, and its folder."""


def said_of_study(study: Study) -> dict[str, Any]:
    """All fields of a study by their dotted names, but for those that are no difference."""
    return flat(study.model_dump(mode="json", exclude=ASIDE))


def differing(studies: Iterable[Study]) -> list[str]:
    """The fields in which some studies are not all the same."""
    said = [said_of_study(each) for each in studies]
    names = dict.fromkeys(name for each in said for name in each)
    return [name for name in names if any(each.get(name) != said[0].get(name) for each in said)]


def seed_groups(runs: Iterable[T], told: Callable[[T], Member]) -> list[tuple[str, list[T]]]:
    """Runs by all that they differ in but the seed, in the order in which they came, with names."""
    held = dict[str, list[T]]()
    for each in runs:
        key = json.dumps(said_of_study(told(each)[0]), sort_keys=True)
        held.setdefault(key, []).append(each)
    groups = list(held.values())
    names = _names([told(min(group, key=lambda each: told(each)[0].seed)) for group in groups])
    return list(zip(names, groups, strict=True))


def _names(firsts: Sequence[Member]) -> list[str]:
    """The first way that tells all groups apart in few words: what differs, or where it lies."""
    fields = differing(study for study, _, _ in firsts)
    ways: tuple[Callable[[Member], str], ...] = (
        lambda each: _label(said_of_study(each[0]), each[1], fields) or each[0].name,
        lambda each: each[0].name,
        lambda each: each[2].name.rpartition(",seed=")[0] or each[2].name,
        lambda each: str(each[2]),
    )
    for way in ways:
        told = [printable(way(each)) for each in firsts]
        names = [name if len(name) <= LONG else f"{name[: LONG - 1]}…" for name in told]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{study.name} ({number})" for number, (study, _, _) in enumerate(firsts, 1)]


def _label(said: Mapping[str, Any], plan: str, fields: Sequence[str]) -> str:
    """A group by what differs: the value alone where that is one field."""
    values = {**said, **{name: plan for name in PLANS if said.get(name) not in UNSAID}}
    if len(fields) == 1:
        value = values.get(fields[0])
        return "unsaid" if value in UNSAID else str(value)
    told = [name for name in fields if values.get(name) not in UNSAID]
    named = [name for name in ("method.name", *PLANS) if name in told]
    rest = [f"{name.removeprefix(SETTINGS)}={values[name]}" for name in told if name not in named]
    return ", ".join([*(str(values[name]) for name in named), *rest])
