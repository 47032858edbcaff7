# SPDX-License-Identifier: Apache-2.0
"""Ledger records of turns and rounds: dataclasses, and strict parsers of ledger lines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, TypeVar, cast

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
    **{"attention": None, "products": None, "defence": None, "secagg": None},
    "warnings": [],
}
"""Fields that a round's line may omit, with the value that this means."""
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
    `download_bytes`, `upload_bytes`: bytes received and sent. `weight`: number of examples, or 1.
    `steps`: optimizer steps. `loss`: mean training loss; None if private or not finite. `scores`:
    block scores behind the choice of layers. `full`: the request had all values. `missed`: earlier
    turns with an update that the server did not receive.

    The server verifies these fields, except `steps`, `loss`, scores of the client's own choice,
    `missed`, and digests of personal params (and of sent ones as in `validate_digests`).
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
    """

    threshold: int
    clients: tuple[str, ...]
    not_unmasked: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class RoundRecord:
    """One round, in the ledger of the server.

    `phase`: the training phase of the round. `aggregated`: clients with an aggregated update.
    `rejected`: by client, why the update was not aggregated. `changed`: new digest of each changed
    param. `drift`: by kind of param, the variance between clients and the squared step of the mean.
    `upload_bytes`, `download_bytes`: of all clients. `attention`: change of each block's attention,
    if measured. `products`: relative errors of LoRA products (`lora_products.Errors`), if both
    factors are shared. `defence`, `secagg`: present with a defence or secure aggregation.
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
    warnings: tuple[str, ...] = ()

    def json(self) -> dict[str, Any]:
        """Return the record as a ledger line, without empty optional fields."""
        values = asdict(self)
        for name in OPTIONAL_FIELDS:
            if values[name] is None or values[name] == ():
                del values[name]
        line = json.dumps({"kind": ROUND, "version": VERSION, **values})
        return cast("dict[str, Any]", json.loads(line))


Record = TurnRecord | RoundRecord
"""A record of either kind."""


def read_record(line: object) -> Record:
    """Return the record of a parsed ledger line; raise RecordError if the line is invalid."""
    values = _object(line, "a line")
    return read_round(values) if values.get("kind") == ROUND else read_turn(values)


def read_turn(line: object, *, max_missed: int = MAX_MISSED_TURNS) -> TurnRecord:
    """Return the turn of a parsed ledger line with at most `max_missed` missed turns.

    Raises RecordError if a field is missing, unknown, of the wrong type or out of range, or if a
    missed turn has missed turns itself.
    """
    values = _record_fields(line, TURN, {f.name for f in fields(TurnRecord)})
    missed = _list(values, "missed")
    if len(missed) > max_missed:
        raise RecordError(f"missed holds {len(missed)} turns, which is too many")
    roles = _text(values, "roles")
    if not _ROLES.fullmatch(roles):
        raise RecordError(f"roles is {roles[:40]!r}: it has one of S, K, F and H for each param")
    return TurnRecord(
        round=_count(values, "round", minimum=1),
        client=_text(values, "client"),
        phase=_text(values, "phase"),
        traits=_texts(values, "traits"),
        roles=roles,
        before=_digests(values, "before", len(roles)),
        after=_digests(values, "after", len(roles)),
        download_bytes=_count(values, "download_bytes"),
        upload_bytes=_count(values, "upload_bytes"),
        weight=_count(values, "weight", minimum=1),
        steps=_count(values, "steps"),
        loss=None if values["loss"] is None else _number(values["loss"], "loss"),
        scores=None if values["scores"] is None else _scores(values, "scores"),
        full=_typed(values["full"], bool, "full"),
        missed=tuple(read_turn(turn, max_missed=0) for turn in missed),
    )


def read_round(line: object) -> RoundRecord:
    """Return the round of a parsed ledger line.

    Raises RecordError if a field is missing, unknown or of the wrong type, or if an optional field
    is present with the empty value of OPTIONAL_FIELDS.
    """
    raw = _object(line, "a line")
    empty = [name for name, default in OPTIONAL_FIELDS.items() if raw.get(name, ...) == default]
    if empty:
        raise RecordError(f"{empty[0]} is empty: such a line leaves it out")
    values = _record_fields(
        {**OPTIONAL_FIELDS, **raw}, ROUND, {f.name for f in fields(RoundRecord)}
    )
    drift, changed = _pairs(values, "drift", _number), _texts(values, "changed")
    if any(len(digest) != 16 or not _DIGESTS.fullmatch(digest) for digest in changed.values()):
        raise RecordError("changed holds a value that is not a digest")
    return RoundRecord(
        round=_count(values, "round", minimum=1),
        phase=_text(values, "phase"),
        aggregated=tuple(
            _typed(client, str, "aggregated") for client in _list(values, "aggregated")
        ),
        rejected=_texts(values, "rejected"),
        changed=changed,
        drift=drift,
        upload_bytes=_count(values, "upload_bytes"),
        download_bytes=_count(values, "download_bytes"),
        attention=None if values["attention"] is None else _scores(values, "attention"),
        products=None if values["products"] is None else _errors(values, "products"),
        defence=None if values["defence"] is None else _read_defence(values["defence"]),
        secagg=None if values["secagg"] is None else _read_secagg(values["secagg"]),
        warnings=tuple(_typed(text, str, "warnings") for text in _list(values, "warnings")),
    )


def _read_defence(value: object) -> DefenceRecord:
    """Return the DefenceRecord of a JSON object; raise RecordError for other or invalid fields."""
    values = _object(value, "defence")
    if values.keys() != (names := {f.name for f in fields(DefenceRecord)}):
        raise RecordError(f"defence has other fields than {', '.join(sorted(names))}")
    excluded = _object(values["excluded"], "excluded")
    distance = _object(values["distance"], "distance")
    return DefenceRecord(
        _pairs(values, "capped", _integer),
        _pairs(values, "clipped", _number),
        {client: _integer(count, "excluded") for client, count in excluded.items()},
        {client: _number(ratio, "distance") for client, ratio in distance.items()},
        _count(values, "undefended"),
    )


def _read_secagg(value: object) -> SecAggRecord:
    """Return the SecAggRecord of a JSON object; raise RecordError for other or invalid fields."""
    values = _object(value, "secagg")
    if values.keys() != (names := {f.name for f in fields(SecAggRecord)}):
        raise RecordError(f"secagg has other fields than {', '.join(sorted(names))}")
    clients = tuple(_typed(client, str, "clients") for client in _list(values, "clients"))
    threshold = _count(values, "threshold", minimum=2)
    return SecAggRecord(threshold, clients, _texts(values, "not_unmasked"))


def parse_line(line: bytes) -> object:
    """Return the JSON value of a line; raise RecordError if it is not JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"this is not JSON: {line[:60]!r}") from error


def _record_fields(line: object, kind: str, names: set[str]) -> Mapping[str, Any]:
    """Return the line as a dict; raise RecordError if kind, version or fields (`names`) differ."""
    values = _object(line, "a line")
    if values.get("kind") != kind:
        raise RecordError(f"kind is {_short(values.get('kind'))}, not {kind!r}")
    if type(values.get("version")) is not int or values["version"] != VERSION:
        raise RecordError(f"version is {_short(values.get('version'))}, not {VERSION}")
    names = names | {"kind", "version"}
    if missing := names - values.keys():
        raise RecordError(f"{min(missing)} is missing")
    if unknown := values.keys() - names:
        raise RecordError(f"{_short(min(unknown))} is no field of a {kind}")
    return values


def _object(value: object, name: str) -> dict[str, Any]:
    """Return a dict with text keys unchanged; raise RecordError, with `name`, for other values."""
    if type(value) is not dict:
        raise RecordError(f"{name} is {_short(value)}, not an object")
    items = cast("dict[Any, Any]", value)
    if any(type(key) is not str for key in items):
        raise RecordError(f"{name} has names that are not texts")
    return cast("dict[str, Any]", items)


def _typed(value: object, kind: type[T], name: str) -> T:
    if type(value) is not kind:
        raise RecordError(f"{name} is {_short(value)}, not of {kind.__name__}")
    return cast("T", value)


def _text(values: Mapping[str, Any], name: str) -> str:
    return _typed(values[name], str, name)


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    return cast("list[Any]", _typed(values[name], list, name))


def _count(values: Mapping[str, Any], name: str, minimum: int = 0) -> int:
    return _integer(values[name], name, minimum)


def _integer(value: object, name: str, minimum: int = 0) -> int:
    number = _typed(value, int, name)
    if not minimum <= number < MAX_INT:
        raise RecordError(f"{name} is {_short(number)}: it is a whole number from {minimum}")
    return number


def _number(value: object, name: str) -> float:
    number = _typed(value, float, name)
    if not isfinite(number):
        raise RecordError(f"{name} is {number}: it is a finite number")
    return number


def _texts(values: Mapping[str, Any], name: str) -> dict[str, str]:
    items = _object(values[name], name)
    return {key: _typed(value, str, name) for key, value in items.items()}


def _pairs(
    values: Mapping[str, Any], name: str, read: Callable[[object, str], T]
) -> dict[str, tuple[T, T]]:
    """Return the field `name`, an object of two-element lists, with `read` of each element.

    Raises RecordError if the field has another form, or if `read` does.
    """
    items = _object(values[name], name)
    pairs = {k: cast("list[Any]", _typed(v, list, name)) for k, v in items.items()}
    if any(len(pair) != 2 for pair in pairs.values()):
        raise RecordError(f"{name} holds a value that is not a pair")
    return {k: (read(one, name), read(other, name)) for k, (one, other) in pairs.items()}


def _errors(values: Mapping[str, Any], name: str) -> tuple[float, float]:
    errors = [_number(error, name) for error in _list(values, name)]
    if len(errors) != 2 or min(errors) < 0:
        raise RecordError(f"{name} is {_short(errors)}: it is two errors from 0 up")
    return errors[0], errors[1]


def _digests(values: Mapping[str, Any], name: str, count: int) -> str:
    text = _text(values, name)
    if len(text) != 16 * count or not _DIGESTS.fullmatch(text):
        raise RecordError(f"{name} has not sixteen hex digits for each param")
    return text


def _scores(values: Mapping[str, Any], name: str) -> Scores:
    """Return the list of [stack, number, score] in field `name` as tuples, or raise RecordError."""
    rows = [cast("list[Any]", _typed(row, list, name)) for row in _list(values, name)]
    if any(len(row) != 3 for row in rows):
        raise RecordError(f"{name} holds what is no stack, number and score")
    return tuple(
        (_typed(stack, str, name), _typed(number, int, name), _score(score, name))
        for stack, number, score in rows
    )


def _score(value: object, name: str) -> float:
    score = _number(value, name)
    if abs(score) > MAX_SCORE:
        raise RecordError(f"{name} holds {score}, and scores are at most {MAX_SCORE:g}")
    return score


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
