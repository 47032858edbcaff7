# SPDX-License-Identifier: Apache-2.0
"""Differences between two runs in words: fields of their studies, and roles of their params."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedplan.federation.ledger.records import ROLE_BY_LETTER, TurnRecord, read_record
from fedplan.language.plan import Role
from fedplan.models.params import Kind
from fedplan.reports.formats import millions
from fedplan.reports.groups import differing_fields, study_fields
from fedplan.studies.run import RunReader, read_consistently
from fedplan.studies.schema import Study

ABSENT = "absent"
"""Role text of a kind of param that a run does not have."""

RolePair = tuple[str, str]
"""The role texts of a kind of param in two runs."""


def describe_study_differences(base: Study, other: Study) -> list[str]:
    """Return a sentence for each field of `other` that differs from `base`."""
    base_fields, other_fields = study_fields(base), study_fields(other)
    return [
        f"{name} is {_field_text(other_fields, name)}, not {_field_text(base_fields, name)}"
        for name in differing_fields((base, other))
    ]


def _field_text(fields: Mapping[str, Any], name: str) -> str:
    return repr(fields[name]) if name in fields else "unset"


@dataclass(frozen=True)
class RoleHistory:
    """The roles of a run's params by kind of param and round.

    `roles`: by kind, then by round, a role in words: "shared", or "partly shared and partly kept"
    if params of the kind, or clients, have several roles. `sizes`: number of param values by kind.
    """

    roles: Mapping[Kind, Mapping[int, str]]
    sizes: Mapping[Kind, int]

    @property
    def rounds(self) -> set[int]:
        """All rounds with a role."""
        return {number for by_round in self.roles.values() for number in by_round}


def describe_role_differences(base: RoleHistory, other: RoleHistory) -> list[str]:
    """Return a sentence for each kind of param that has other roles in `other` than in `base`.

    Compares the rounds that both runs have. Kinds with the same change in the same rounds share a
    sentence.
    """
    rounds = base.rounds & other.rounds
    sizes = {**base.sizes, **other.sizes}
    kinds_by_change = dict[tuple[RolePair, tuple[int, ...]], list[Kind]]()
    for kind in Kind:
        base_roles, other_roles = base.roles.get(kind, {}), other.roles.get(kind, {})
        rounds_by_pair = dict[RolePair, list[int]]()
        for number in sorted(rounds) if base_roles or other_roles else ():
            pair = base_roles.get(number, ABSENT), other_roles.get(number, ABSENT)
            if pair[0] != pair[1]:
                rounds_by_pair.setdefault(pair, []).append(number)
        for pair, numbers in rounds_by_pair.items():
            kinds_by_change.setdefault((pair, tuple(numbers)), []).append(kind)
    return [
        f"{', '.join(kinds)} ({millions(sum(sizes[k] for k in kinds))} params): {new}, "
        f"not {old}, in {_rounds_text(numbers, len(rounds))}"
        for ((old, new), numbers), kinds in kinds_by_change.items()
    ]


def read_role_history(folder: Path) -> RoleHistory:
    """Return the roles in the run of a folder by kind of param and round, from the run's ledger.

    The params of a kind and the clients of a round are not told apart: if their roles differ, the
    text names each role once. Raises FedplanError if the folder has no run, if the ledger cannot
    be read, or if the run goes on too fast to be read.
    """

    def read(run: RunReader) -> RoleHistory:
        params, roles_by_kind = run.params, dict[Kind, dict[int, set[Role]]]()
        counted = set[tuple[int, str]]()
        for turn in map(read_record, run.ledger_lines()):
            if isinstance(turn, TurnRecord) and (turn.round, turn.roles) not in counted:
                counted.add((turn.round, turn.roles))
                for param, letter in zip(params, turn.roles, strict=True):
                    by_round = roles_by_kind.setdefault(param.kind, {})
                    by_round.setdefault(turn.round, set()).add(ROLE_BY_LETTER[letter])
        texts = dict[Kind, dict[int, str]]()
        for kind, by_round in roles_by_kind.items():
            for number, roles in by_round.items():
                words = [role.word for role in Role if role in roles]
                several = " and ".join(f"partly {word}" for word in words)
                texts.setdefault(kind, {})[number] = words[0] if len(words) == 1 else several
        sizes = {kind: sum(p.numel for p in params if p.kind is kind) for kind in roles_by_kind}
        return RoleHistory(texts, sizes)

    return read_consistently(folder, read)


def _rounds_text(numbers: tuple[int, ...], total: int) -> str:
    """Return ascending round numbers in words: `all rounds`, `round 3`, `rounds 4-10`.

    Other numbers give `7 of 10 rounds, the first of them 2`. `total`: number of all rounds.
    """
    if len(numbers) == total:
        return "all rounds"
    if len(numbers) == 1:
        return f"round {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"rounds {numbers[0]}-{numbers[-1]}"
    return f"{len(numbers)} of {total} rounds, the first of them {numbers[0]}"
