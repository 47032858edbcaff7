# SPDX-License-Identifier: Apache-2.0
"""Records: the two kinds of lines that a ledger has, and the one reader of each."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, TypeVar, cast

from fedplan.errors import FedplanError
from fedplan.language.plan import Role, Roles
from fedplan.models.params import Params

LETTERS = {Role.SHARE: "S", Role.KEEP: "K", Role.FREEZE: "F", Role.HOLD: "H"}

ROLES = {letter: role for role, letter in LETTERS.items()}

VERSION = 1

TURN, ROUND = "turn", "round"

UNSAID: dict[str, object] = {
    **{"attention": None, "products": None, "defence": None, "masked": None},
    "warnings": [],
}
"""Fields that the line of a round may lack, and what they then say."""

LARGEST = 2**53
"""Whole numbers in a record are below it: every reader of JSON has them exactly."""

LARGEST_SCORE = 1e150
"""Scores are no larger, so that no sum of them overflows."""

MOST_MISSED = 10_000
"""Turns that a client may tell of at once, of which the server did not hear."""

_MARKS = re.compile("(?:[0-9a-f]{16})*")

_ROLES = re.compile("[SKFH]*")

T = TypeVar("T")

Scores = tuple[tuple[str, int, float], ...]


class RecordError(FedplanError):
    """A line that is no record: it says which field is wrong."""


@dataclass(frozen=True)
class TurnRecord:
    """One turn of one client, as the client says it.

    `roles` has a letter a param; `before` and `after` have sixteen hex digits a param. What a
    client keeps or holds for itself is told by digests that only it can make. `missed` are turns
    that the server has not heard of. `claims.require` says which of it a server can know; `steps`,
    `loss`, scores that were not chosen together, digests of own params and missed turns are the
    client's own word.
    """

    round: int
    client: str
    phase: str
    traits: dict[str, str]
    roles: str
    before: str
    after: str
    down: int
    up: int
    weight: int
    steps: int
    loss: float | None
    scores: Scores | None
    anew: bool
    missed: tuple[TurnRecord, ...] = ()

    def json(self) -> dict[str, Any]:
        """It as a line of the ledger."""
        said = {f.name: getattr(self, f.name) for f in fields(self)}
        scores = [list(each) for each in self.scores] if self.scores is not None else None
        missed = [each.json() for each in self.missed]
        lists = {"scores": scores, "missed": missed, "traits": dict(self.traits)}
        return {"kind": TURN, "version": VERSION, **said, **lists}


@dataclass(frozen=True)
class Defended:
    """What a defence did in a round, by client.

    `capped` are weights, as they were said and as they counted at the least; `clipped` are lengths
    of changes, as they came and as they counted; `left` is for how many params a rule took nothing
    of a client; `far` is how many times as far as is usual a client lay from what a rule made.
    `thin` is how many params came from too few clients for the rule to bear a liar among them.
    """

    capped: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    clipped: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    left: dict[str, int] = field(default_factory=dict[str, int])
    far: dict[str, float] = field(default_factory=dict[str, float])
    thin: int = 0


ALL = "all"
"""What stayed closed of a masked sum, if it was all of it."""


@dataclass(frozen=True)
class MaskedRecord:
    """A masked sum: how many it took to open it, of whom it is, and what stayed closed, and why."""

    threshold: int
    sites: tuple[str, ...]
    closed: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class RoundRecord:
    """One round, as the server says it.

    `moved` are the digests of what it changed; `drift` is how far the clients' changes lay apart,
    by kind of param; `attention`, if it was looked at, how far each block's moved; `products`, if
    clients shared both sides of LoRA, how far the product of the mean sides lay from the mean of
    the products, and how far what the world then has: both over the length of the latter.
    `defence` is what was done against bad weights and values, if the study has a defence; `masked`
    who was in a sum that the server saw nothing else of, and what of it stayed closed;
    `warnings` are what a person should look at, in words that follow from the rest.
    """

    round: int
    phase: str
    counted: tuple[str, ...]
    rejected: dict[str, str]
    moved: dict[str, str]
    drift: dict[str, tuple[float, float]]
    up: int
    down: int
    attention: Scores | None = None
    products: tuple[float, float] | None = None
    defence: Defended | None = None
    masked: MaskedRecord | None = None
    warnings: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """It as a line of the ledger; what there is nothing to say of is left out."""
        said = asdict(self)
        for name in UNSAID:
            if said[name] is None or said[name] == ():
                del said[name]
        return cast(
            "dict[str, Any]", json.loads(json.dumps({"kind": ROUND, "version": VERSION, **said}))
        )


Record = TurnRecord | RoundRecord


def read_record(line: object) -> Record:
    """The record of either kind that a line of a ledger is."""
    said = _object(line, "a line")
    return read_round(said) if said.get("kind") == ROUND else read_turn(said)


def read_turn(line: object) -> TurnRecord:
    """The turn that a line says, if it has every field of one, each as it must be, and no other."""
    return _turn(line, missed=True)


def _turn(line: object, *, missed: bool) -> TurnRecord:
    said = _fields(line, TURN, {f.name for f in fields(TurnRecord)})
    others = _list(said, "missed")
    if len(others) > (MOST_MISSED if missed else 0):
        raise RecordError(f"missed holds {len(others)} turns, which is too many")
    roles = _text(said, "roles")
    if not _ROLES.fullmatch(roles):
        raise RecordError(f"roles is {roles[:40]!r}: it has one of S, K, F and H for each param")
    return TurnRecord(
        round=_count(said, "round", least=1),
        client=_text(said, "client"),
        phase=_text(said, "phase"),
        traits=_words(said, "traits"),
        roles=roles,
        before=_marks(said, "before", len(roles)),
        after=_marks(said, "after", len(roles)),
        down=_count(said, "down"),
        up=_count(said, "up"),
        weight=_count(said, "weight", least=1),
        steps=_count(said, "steps"),
        loss=None if said["loss"] is None else _number(said["loss"], "loss"),
        scores=None if said["scores"] is None else _scores(said, "scores"),
        anew=_typed(said["anew"], bool, "anew"),
        missed=tuple(_turn(each, missed=False) for each in others),
    )


def read_round(line: object) -> RoundRecord:
    """The round that a line says, if it has every field of one and no other."""
    names = {f.name for f in fields(RoundRecord)}
    given = _object(line, "a line")
    if idle := [name for name, none in UNSAID.items() if name in given and given[name] == none]:
        raise RecordError(f"{idle[0]} says nothing: such a line leaves it out")
    said = _fields({**UNSAID, **given}, ROUND, names)
    drift = {
        kind: (_number(one, "drift"), _number(other, "drift"))
        for kind, (one, other) in _pairs(said, "drift").items()
    }
    moved = _words(said, "moved")
    if any(len(mark) != 16 or not _MARKS.fullmatch(mark) for mark in moved.values()):
        raise RecordError("moved holds what is no digest")
    return RoundRecord(
        round=_count(said, "round", least=1),
        phase=_text(said, "phase"),
        counted=tuple(_typed(each, str, "counted") for each in _list(said, "counted")),
        rejected=_words(said, "rejected"),
        moved=moved,
        drift=drift,
        up=_count(said, "up"),
        down=_count(said, "down"),
        attention=None if said["attention"] is None else _scores(said, "attention"),
        products=None if said["products"] is None else _errors(said, "products"),
        defence=None if said["defence"] is None else _defended(said["defence"]),
        masked=None if said["masked"] is None else _masked(said["masked"]),
        warnings=tuple(_typed(each, str, "warnings") for each in _list(said, "warnings")),
    )


def _defended(found: object) -> Defended:
    said = _object(found, "defence")
    if said.keys() != (names := {f.name for f in fields(Defended)}):
        raise RecordError(f"defence has other fields than {', '.join(sorted(names))}")
    weights, lengths = _pairs(said, "capped"), _pairs(said, "clipped")
    left, far = _object(said["left"], "left"), _object(said["far"], "far")
    return Defended(
        {c: (_whole(one, "capped"), _whole(two, "capped")) for c, (one, two) in weights.items()},
        {
            c: (_number(one, "clipped"), _number(two, "clipped"))
            for c, (one, two) in lengths.items()
        },
        {client: _whole(each, "left") for client, each in left.items()},
        {client: _number(each, "far") for client, each in far.items()},
        _count(said, "thin"),
    )


def _masked(found: object) -> MaskedRecord:
    said = _object(found, "masked")
    if said.keys() != (names := {f.name for f in fields(MaskedRecord)}):
        raise RecordError(f"masked has other fields than {', '.join(sorted(names))}")
    sites = tuple(_typed(each, str, "sites") for each in _list(said, "sites"))
    return MaskedRecord(_count(said, "threshold", least=2), sites, _words(said, "closed"))


def parsed(line: bytes) -> object:
    """The JSON of a line."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"this is not JSON: {line[:60]!r}") from error


def _fields(line: object, kind: str, names: set[str]) -> Mapping[str, Any]:
    said = _object(line, "a line")
    if said.get("kind") != kind:
        raise RecordError(f"kind is {_short(said.get('kind'))}, not {kind!r}")
    if type(said.get("version")) is not int or said["version"] != VERSION:
        raise RecordError(f"version is {_short(said.get('version'))}, not {VERSION}")
    names = names | {"kind", "version"}
    if missing := names - said.keys():
        raise RecordError(f"{min(missing)} is missing")
    if strange := said.keys() - names:
        raise RecordError(f"{_short(min(strange))} is no field of a {kind}")
    return said


def _object(found: object, what: str) -> dict[str, Any]:
    if type(found) is not dict:
        raise RecordError(f"{what} is {_short(found)}, not an object")
    said = cast("dict[Any, Any]", found)
    if any(type(name) is not str for name in said):
        raise RecordError(f"{what} has names that are not texts")
    return cast("dict[str, Any]", said)


def _typed(found: object, kind: type[T], name: str) -> T:
    if type(found) is not kind:
        raise RecordError(f"{name} is {_short(found)}, not of {kind.__name__}")
    return cast("T", found)


def _text(said: Mapping[str, Any], name: str) -> str:
    return _typed(said[name], str, name)


def _list(said: Mapping[str, Any], name: str) -> list[Any]:
    return cast("list[Any]", _typed(said[name], list, name))


def _count(said: Mapping[str, Any], name: str, least: int = 0) -> int:
    return _whole(said[name], name, least)


def _whole(found: object, name: str, least: int = 0) -> int:
    number = _typed(found, int, name)
    if not least <= number < LARGEST:
        raise RecordError(f"{name} is {_short(number)}: it is a whole number from {least}")
    return number


def _number(found: object, name: str) -> float:
    number = _typed(found, float, name)
    if not isfinite(number):
        raise RecordError(f"{name} is {number}: it is a finite number")
    return number


def _words(said: Mapping[str, Any], name: str) -> dict[str, str]:
    found = _object(said[name], name)
    return {key: _typed(value, str, name) for key, value in found.items()}


def _pairs(said: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
    found = _object(said[name], name)
    pairs = {k: cast("list[Any]", _typed(v, list, name)) for k, v in found.items()}
    if any(len(pair) != 2 for pair in pairs.values()):
        raise RecordError(f"{name} holds what is no pair")
    return pairs


def _errors(said: Mapping[str, Any], name: str) -> tuple[float, float]:
    found = [_number(each, name) for each in _list(said, name)]
    if len(found) != 2 or min(found) < 0:
        raise RecordError(f"{name} is {_short(found)}: it is two errors from 0 up")
    return found[0], found[1]


def _marks(said: Mapping[str, Any], name: str, count: int) -> str:
    found = _text(said, name)
    if len(found) != 16 * count or not _MARKS.fullmatch(found):
        raise RecordError(f"{name} has not sixteen hex digits for each param")
    return found


def _scores(said: Mapping[str, Any], name: str) -> Scores:
    found = [cast("list[Any]", _typed(each, list, name)) for each in _list(said, name)]
    if any(len(each) != 3 for each in found):
        raise RecordError(f"{name} holds what is no stack, number and score")
    return tuple(
        (_typed(stack, str, name), _typed(number, int, name), _score(score, name))
        for stack, number, score in found
    )


def _score(found: object, name: str) -> float:
    score = _number(found, name)
    if abs(score) > LARGEST_SCORE:
        raise RecordError(f"{name} holds {score}, and scores are at most {LARGEST_SCORE:g}")
    return score


def _short(found: object) -> str:
    try:
        return repr(found)[:60]
    except (ValueError, RecursionError):
        return f"a {type(found).__name__}"


def spelled(roles: Roles) -> str:
    """Roles as one letter a param, in the order of the params."""
    return "".join(LETTERS[role] for role in roles.values())


def joined(params: Params, known: Mapping[str, str]) -> str:
    """Digests one after the other, in the order of the params."""
    return "".join(known[p.key] for p in params)


def parted(params: Params, text: str) -> dict[str, str]:
    """The digests of a line, by key."""
    return {p.key: text[16 * i : 16 * i + 16] for i, p in enumerate(params)}
