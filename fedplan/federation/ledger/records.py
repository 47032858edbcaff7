# SPDX-License-Identifier: Apache-2.0
"""Ledger records of turns and rounds: dataclasses, and strict parsers of ledger lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import cache
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from fedplan.errors import FedplanError
from fedplan.language.plan import Role, Roles
from fedplan.models.params import Params

ROLE_LETTERS = {Role.SHARE: "S", Role.KEEP: "K", Role.FREEZE: "F", Role.HOLD: "H"}
"""Letter of each role in `TurnRecord.roles`."""
ROLE_BY_LETTER = {letter: role for role, letter in ROLE_LETTERS.items()}
"""Role of each letter."""
VERSION = 1
"""Version of the record format."""
TURN, ROUND = "turn", "round"
"""Values of "kind" in a ledger line."""
OPTIONAL_FIELDS: dict[str, object] = {
    **{"attention": None, "products": None, "defence": None, "secagg": None, "edges": None},
    "warnings": [],
}
"""Fields that a round's line may omit, with the value that this means."""
SECAGG_OPTIONAL = ("faults", "discarded")
"""Fields that its `secagg` may omit: then they are empty."""
MAX_INT = 2**53
"""Integers in a record are below it, so that every JSON parser reads them exactly."""
MAX_SCORE = 1e150
"""Largest magnitude of a score, so that sums of scores do not overflow."""
MAX_MISSED_TURNS = 10_000
"""Most turns in `TurnRecord.missed`."""
_DIGESTS = re.compile("(?:[0-9a-f]{16})*")
_ROLES = re.compile("[SKFH]*")
T = TypeVar("T")
Scores = tuple[tuple[str, int, float], ...]
"""Stack, number and score of each block."""


class RecordError(FedplanError):
    """An invalid ledger line; the message names the wrong field."""


@dataclass(frozen=True)
class TurnRecord:
    """One turn (the work of one client in one round), as the client reports it.

    `round`, `client`, `phase`, `traits`: as in the server's request. `roles`: one letter of
    ROLE_LETTERS for each param. `before`, `after`: 16 hex digits for each param, before and after
    training; digests of personal params are keyed, so that only the client can compute them.
    `download_bytes`, `upload_bytes`: bytes received and sent; under secure aggregation, the bytes
    of masked inputs that the server has received. `weight`: number of examples, or 1.
    `steps`: optimizer steps. `loss`: mean training loss; None if private or not finite. `scores`:
    block scores behind the choice of layers. `full`: the request had all values. `missed`: earlier
    turns with an update that the server did not receive.

    The server verifies these fields, except `steps`, `loss`, scores of the client's own choice,
    `missed`, and digests of personal params (and of sent ones as in `rounds.validate_turn`).
    """

    round: int
    client: str
    phase: str
    traits: dict[str, str]
    roles: str
    before: str
    after: str
    download_bytes: int
    upload_bytes: int
    weight: int
    steps: int
    loss: float | None
    scores: Scores | None
    full: bool
    missed: tuple[TurnRecord, ...] = ()

    def json(self) -> dict[str, Any]:
        """Return the record as a ledger line."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        scores = [list(score) for score in self.scores] if self.scores is not None else None
        missed = [record.json() for record in self.missed]
        converted = {"scores": scores, "missed": missed, "traits": dict(self.traits)}
        return {"kind": TURN, "version": VERSION, **values, **converted}


@dataclass(frozen=True)
class DefenceRecord:
    """Effects of a defence against malicious clients in a round, by client.

    Only affected clients are listed. `capped`: reported weight, and the least weight that was used.
    `clipped`: norm of the change before and after clipping. `excluded`: number of params for which
    the rule excluded the client. `distance`: distance of an outlier from the rule's values, as a
    multiple of the reference distance. `undefended`: number of params with too few senders for the
    rule to tolerate a malicious client.
    """

    capped: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    clipped: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    excluded: dict[str, int] = field(default_factory=dict[str, int])
    distance: dict[str, float] = field(default_factory=dict[str, float])
    undefended: int = 0


WHOLE_SUM = "all"
"""Key in `SecAggRecord.not_unmasked` if no sum of the round was unmasked."""


@dataclass(frozen=True)
class SecAggRecord:
    """Result of the secure aggregation of a round.

    `threshold`: clients needed to unmask. `clients`: clients in the sum. `not_unmasked`: by param
    key, or for WHOLE_SUM, the reason why a sum was not unmasked; empty if all sums were unmasked.
    `faults`: by client, what it did wrong in the protocol, or that it was silent, after its input
    was in the sum, or in the attempts at a sum that failed. `discarded`: by client, the number of
    masked inputs that arrived in attempts that failed. A line without faults, or without discarded
    inputs, leaves the field out.
    """

    threshold: int
    clients: tuple[str, ...]
    not_unmasked: dict[str, str] = field(default_factory=dict[str, str])
    faults: dict[str, str] = field(default_factory=dict[str, str])
    discarded: dict[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True)
class RoundRecord:
    """One round, in the ledger of the server.

    `phase`: the training phase of the round. `aggregated`: clients with an aggregated update.
    `rejected`: by client, why the update was not aggregated. `changed`: new digest of each changed
    param. `drift`: by kind of param, the variance between clients and the squared step of the mean.
    `upload_bytes`, `download_bytes`: of all clients. `attention`: change of each block's attention,
    if measured. `products`: relative errors of LoRA products (`lora_products.Errors`), if both
    factors are shared. `defence`, `secagg`: present with a defence or secure aggregation.
    `edges`: by edge, the clients whose updates it summed, if there are edges.
    `warnings`: sentences that follow from other fields.
    """

    round: int
    phase: str
    aggregated: tuple[str, ...]
    rejected: dict[str, str]
    changed: dict[str, str]
    drift: dict[str, tuple[float, float]]
    upload_bytes: int
    download_bytes: int
    attention: Scores | None = None
    products: tuple[float, float] | None = None
    defence: DefenceRecord | None = None
    secagg: SecAggRecord | None = None
    edges: dict[str, tuple[str, ...]] | None = None
    warnings: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """Return the record as a ledger line, without empty optional fields."""
        values = asdict(self)
        for name in OPTIONAL_FIELDS:
            if values[name] is None or values[name] == ():
                del values[name]
        for name in SECAGG_OPTIONAL if self.secagg is not None else ():
            if not values["secagg"][name]:
                del values["secagg"][name]
        line = json.dumps({"kind": ROUND, "version": VERSION, **values})
        return cast("dict[str, Any]", json.loads(line))


Record = TurnRecord | RoundRecord
"""A record of either kind."""


def read_record(line: object) -> Record:
    """Return the record of a parsed ledger line; raise RecordError if the line is invalid."""
    is_round = _object(line, "a line").get("kind") == ROUND
    return read_round(line) if is_round else read_turn(line)


def read_turn(line: object, *, max_missed: int = MAX_MISSED_TURNS) -> TurnRecord:
    """Return the turn of a parsed ledger line with at most `max_missed` missed turns.

    Raises RecordError if a field is missing, unknown, of the wrong type or out of range, or if a
    missed turn has missed turns itself.
    """
    values = _line_values(line, TURN)
    missed = cast("list[object]", _typed(values.get("missed"), list, "missed"))
    if len(missed) > max_missed:
        raise RecordError(f"missed holds {len(missed)} turns, which is too many")
    turn = cast("TurnRecord", _read_dataclass(TurnRecord, {**values, "missed": []}, "a turn"))
    _require(turn.round >= 1, "round", turn.round, "a whole number from 1")
    _require(turn.weight >= 1, "weight", turn.weight, "a whole number from 1")
    _require(_ROLES.fullmatch(turn.roles), "roles", turn.roles, "one of S, K, F, H for each param")
    for name, text in (("before", turn.before), ("after", turn.after)):
        fits = len(text) == 16 * len(turn.roles) and _DIGESTS.fullmatch(text)
        _require(fits, name, text, "sixteen hex digits for each param")
    _require_scores(turn.scores or (), "scores")
    return replace(turn, missed=tuple(read_turn(each, max_missed=0) for each in missed))


def read_round(line: object) -> RoundRecord:
    """Return the round of a parsed ledger line.

    Raises RecordError if a field is missing, unknown or of the wrong type, or if an optional field
    is present but empty.
    """
    values = _line_values(line, ROUND)
    for name, default in OPTIONAL_FIELDS.items():
        if values.setdefault(name, ...) == default:
            raise RecordError(f"{name} is empty: such a line leaves it out")
        values[name] = default if values[name] is ... else values[name]
    if isinstance(values["secagg"], dict):
        secagg = cast("dict[str, Any]", values["secagg"])
        for name in SECAGG_OPTIONAL:
            if secagg.get(name) == {}:
                raise RecordError(f"{name} is empty: such a line leaves it out")
        values["secagg"] = {name: {} for name in SECAGG_OPTIONAL} | secagg
    record = cast("RoundRecord", _read_dataclass(RoundRecord, values, "a round"))
    _require(record.round >= 1, "round", record.round, "a whole number from 1")
    for text in record.changed.values():
        _require(len(text) == 16 and _DIGESTS.fullmatch(text), "changed", text, "a digest")
    _require_scores(record.attention or (), "attention")
    _require(min(record.products or (0.0,)) >= 0, "products", record.products, "errors from 0 up")
    threshold = record.secagg.threshold if record.secagg else 2
    _require(threshold >= 2, "threshold", threshold, "a whole number from 2")
    return record


def parse_line(line: bytes) -> object:
    """Return the JSON value of a line; raise RecordError if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"this is not JSON: {line[:60]!r}") from error


def _line_values(line: object, kind: str) -> dict[str, Any]:
    """Return the fields of a line but kind and version, which are checked."""
    values = dict(_object(line, "a line"))
    line_kind, version = values.pop("kind", None), values.pop("version", None)
    _require(line_kind == kind, "kind", line_kind, repr(kind))
    _require(type(version) is int and version == VERSION, "version", version, str(VERSION))
    return values


_field_types = cache(get_type_hints)
"""Types of a dataclass's fields, by name."""


def _read_dataclass(record: type, values: Mapping[str, Any], name: str) -> Any:
    """Return a dataclass object of exactly these fields; raise RecordError if one is invalid."""
    types = _field_types(record)
    if missing := types.keys() - values.keys():
        raise RecordError(f"{min(missing)} is missing")
    if unknown := values.keys() - types.keys():
        raise RecordError(f"{_short(min(unknown))} is no field of {name}")
    return record(**{each: _read(kind, values[each], each) for each, kind in types.items()})


def _read(kind: Any, value: object, name: str) -> Any:
    """Return a JSON value as an object of a type of a record's fields; raise RecordError if none.

    A `float` is finite, and never an `int`; an `int` is from 0 and below MAX_INT.
    """
    if isinstance(kind, type) and type(value) is kind:
        if kind is int:
            _require(0 <= cast("int", value) < MAX_INT, name, value, "a whole number from 0")
        if kind is float:
            _require(isfinite(cast("float", value)), name, value, "a finite number")
        return value
    if is_dataclass(kind):
        return _read_dataclass(cast("type", kind), _object(value, name), name)
    origin, types = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _read(types[0], value, name)
    if origin is dict:
        return {key: _read(types[1], item, name) for key, item in _object(value, name).items()}
    if origin is tuple:
        items = cast("list[object]", _typed(value, list, name))
        types = types[:1] * len(items) if types[-1] is ... else types
        _require(len(items) == len(types), name, value, f"a list of {len(types)}")
        return tuple(_read(each, item, name) for each, item in zip(types, items, strict=True))
    return _typed(value, cast("type[Any]", kind), name)


def _object(value: object, name: str) -> dict[str, Any]:
    items = cast("dict[Any, Any]", _typed(value, dict, name))
    _require(all(type(key) is str for key in items), name, value, "an object with texts as names")
    return items


def _typed(value: object, kind: type[T], name: str) -> T:
    if type(value) is not kind:
        raise RecordError(f"{name} is {_short(value)}, not of type {kind.__name__}")
    return cast("T", value)


def _require_scores(scores: Scores, name: str) -> None:
    for *_, score in scores:
        _require(abs(score) <= MAX_SCORE, name, score, f"a score of at most {MAX_SCORE:g}")


def _require(condition: object, name: str, value: object, text: str) -> None:
    if not condition:
        raise RecordError(f"{name} is {_short(value)}, not {text}")


def _short(value: object) -> str:
    try:
        return repr(value)[:60]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


def role_letters(roles: Roles) -> str:
    """Return one letter for each param, in the order of `roles`."""
    return "".join(ROLE_LETTERS[role] for role in roles.values())


def join_digests(params: Params, digests: Mapping[str, str]) -> str:
    """Return the 16-digit digests by key as one text, in the order of the params."""
    return "".join(digests[p.key] for p in params)


def split_digests(params: Params, text: str) -> dict[str, str]:
    """Return the digests by key of a text that `join_digests` made for the same params."""
    return {p.key: text[16 * i : 16 * i + 16] for i, p in enumerate(params)}
