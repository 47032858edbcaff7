# SPDX-License-Identifier: Apache-2.0
"""Group runs that differ only in their seed, and name each group by its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from fedplan.errors import printable
from fedplan.studies.schema import Study, flatten_fields

IGNORED_FIELDS: dict[str, Any] = {
    **dict.fromkeys(("seed", "name", "threads", "device", "deterministic", "timeouts"), True),
    "train": {"activation_cache_mb"},
}
"""Fields in which runs of one group may differ: seed, name, and settings of the machine."""
PLAN_FIELDS = ("method.plan", "method.from_python")
"""Fields that hold a plan; a name has the plan's text instead."""
MAX_PLAN_LENGTH = 40
"""The most characters of a plan in a name, if the names of folders are shorter and distinct."""
UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values of a field that is not set."""
MAX_NAME_LENGTH = 72
"""The most characters of a group's name."""

T = TypeVar("T")
Member = tuple[Study, str, Path]
"""The study of a run, the text of its plan, and its folder."""


def study_fields(study: Study) -> dict[str, Any]:
    """Return the fields of a study by dotted name, such as "train.lr", without IGNORED_FIELDS."""
    return flatten_fields(study.model_dump(mode="json", exclude=IGNORED_FIELDS))


def differing_fields(studies: Iterable[Study]) -> list[str]:
    """Return the dotted names of fields that differ; IGNORED_FIELDS are left out."""
    fields = [study_fields(each) for each in studies]
    names = dict.fromkeys(name for each in fields for name in each)
    return [name for name in names if any(f.get(name) != fields[0].get(name) for f in fields)]


def group_by_seed(runs: Iterable[T], member: Callable[[T], Member]) -> list[tuple[str, list[T]]]:
    """Group runs that differ only in their seed, or in IGNORED_FIELDS; return (name, runs) of each.

    Groups are in the order of their first runs; the names are distinct.
    """
    runs_by_fields = dict[str, list[T]]()
    for run in runs:
        key = json.dumps(study_fields(member(run)[0]), sort_keys=True)
        runs_by_fields.setdefault(key, []).append(run)
    groups = list(runs_by_fields.values())
    firsts = [member(min(group, key=lambda run: member(run)[0].seed)) for group in groups]
    names = _names(firsts)
    return list(zip(names, groups, strict=True))


def _names(firsts: Sequence[Member]) -> list[str]:
    """Return distinct names of groups, given the run with the lowest seed of each group."""
    fields = differing_fields(study for study, _, _ in firsts)
    by_plan = any(name in fields for name in PLAN_FIELDS)
    if by_plan and max(len(plan) for _, plan, _ in firsts) > MAX_PLAN_LENGTH:
        for texts in ([s.name for s, _, _ in firsts], [folder.name for _, _, folder in firsts]):
            short = all(len(text) <= MAX_PLAN_LENGTH for text in texts)
            if short and all(texts) and len(set(texts)) == len(texts):
                return [printable(text) for text in texts]
    namings: tuple[Callable[[Member], str], ...] = (
        lambda each: _label(study_fields(each[0]), each[1], fields) or each[0].name,
        lambda each: each[0].name,
        lambda each: each[2].name.rpartition(",seed=")[0] or each[2].name,
        lambda each: str(each[2]),
    )
    for naming in namings:
        texts = [printable(naming(each)) for each in firsts]
        names = [t if len(t) <= MAX_NAME_LENGTH else f"{t[: MAX_NAME_LENGTH - 1]}…" for t in texts]
        if all(names) and len(set(names)) == len(names):
            return names
    return [f"{study.name} ({number})" for number, (study, _, _) in enumerate(firsts, 1)]


def _label(values: Mapping[str, Any], plan: str, differing: Sequence[str]) -> str:
    """Return the differing fields of a study as a label: `fedavg, lr 0.001`.

    Method and plan stand alone; other fields have the last part of their name, or the whole name if
    two end alike. Unset fields are left out, unless no other differs.
    """
    values = {**values, **{name: plan for name in PLAN_FIELDS if values.get(name) not in UNSET}}
    alone = ("method.name", *PLAN_FIELDS)
    ends = [name.rpartition(".")[2] for name in differing]

    def short(name: str) -> str:
        end = name.rpartition(".")[2]
        return end if ends.count(end) == 1 else name

    present = [name for name in differing if values.get(name) not in UNSET]
    if not present:
        return f"{', '.join(map(short, differing))} not set" if differing else ""
    leading = [str(values[name]) for name in alone if name in present]
    settings = [f"{short(name)} {values[name]}" for name in present if name not in alone]
    return ", ".join([*leading, *settings])
