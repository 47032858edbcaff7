# SPDX-License-Identifier: Apache-2.0
"""Differences: what tells two runs apart, in words: fields of their studies, and roles of parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedplan.federation.record import ROLES, TurnRecord, read_record
from fedplan.language.plan import Role
from fedplan.models.params import Kind
from fedplan.reports.groups import differing, said_of_study
from fedplan.reports.units import millions
from fedplan.studies.run import Run, looked_at
from fedplan.studies.schema import Study

ABSENT = "not there"

Sides = tuple[str, str]


def study_words(base: Study, other: Study) -> list[str]:
    """What a study says otherwise than another, a line for each field."""
    left, right = said_of_study(base), said_of_study(other)
    return [
        f"{name} is {_value(right, name)}, not {_value(left, name)}"
        for name in differing((base, other))
    ]


def _value(said: Mapping[str, Any], name: str) -> str:
    return repr(said[name]) if name in said else "unsaid"


@dataclass(frozen=True)
class Faring:
    """How the params of each kind fared in each round of a run, in words, and how many they are."""

    words: Mapping[Kind, Mapping[int, str]]
    sizes: Mapping[Kind, int]

    @property
    def rounds(self) -> set[int]:
        """The rounds that it is told of."""
        return {number for held in self.words.values() for number in held}


def role_words(base: Faring, other: Faring) -> list[str]:
    """Which parts of the model fared otherwise in a run than in another, and in which rounds.

    It is what was done, by the ledgers, in the rounds that both have.
    """
    left, right, rounds = base.words, other.words, base.rounds & other.rounds
    sizes = {**base.sizes, **other.sizes}
    changes = dict[tuple[Sides, tuple[int, ...]], list[Kind]]()
    for kind in Kind:
        here, there = left.get(kind, {}), right.get(kind, {})
        apart = dict[Sides, list[int]]()
        for number in sorted(rounds) if here or there else ():
            sides = here.get(number, ABSENT), there.get(number, ABSENT)
            if sides[0] != sides[1]:
                apart.setdefault(sides, []).append(number)
        for sides, numbers in apart.items():
            changes.setdefault((sides, tuple(numbers)), []).append(kind)
    return [
        f"{', '.join(kinds)} ({millions(sum(sizes[k] for k in kinds))} params): {new}, "
        f"not {old}, in {_spelled(numbers, len(rounds))}"
        for ((old, new), numbers), kinds in changes.items()
    ]


def faring_of(folder: Path) -> Faring:
    """How each kind fared in each round of the run in a folder."""
    return looked_at(folder, _faring)


def _faring(run: Run) -> Faring:
    params, seen = run.params, dict[Kind, dict[int, set[Role]]]()
    told = set[tuple[int, str]]()
    for line in run.lines():
        turn = read_record(line)
        if isinstance(turn, TurnRecord) and (turn.round, turn.roles) not in told:
            told.add((turn.round, turn.roles))
            for param, letter in zip(params, turn.roles, strict=True):
                seen.setdefault(param.kind, {}).setdefault(turn.round, set()).add(ROLES[letter])
    words = {
        kind: {number: _role(roles) for number, roles in held.items()}
        for kind, held in seen.items()
    }
    sizes = {kind: sum(p.numel for p in params if p.kind is kind) for kind in seen}
    return Faring(words, sizes)


def _role(roles: set[Role]) -> str:
    words = [role.word for role in Role if role in roles]
    return words[0] if len(words) == 1 else " and ".join(f"partly {word}" for word in words)


def _spelled(numbers: tuple[int, ...], of: int) -> str:
    """Rounds in words: `all rounds`, `round 3`, `rounds 4-10`, `7 of 10 rounds`."""
    if len(numbers) == of:
        return "all rounds"
    if len(numbers) == 1:
        return f"round {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"rounds {numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} of {of} rounds, the first of them {numbers[0]}"
