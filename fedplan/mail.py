# SPDX-License-Identifier: Apache-2.0
"""Mail: what a server and a site say to each other, as parcels.

Tensors are packed together, because some carriers fetch each blob by a request of its own; and as
safetensors, which know every dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from fedplan.exchange import Down, Update, listed, nbytes, scored
from fedplan.identity import is_id
from fedplan.message import JSON, MessageError, pack, unpack
from fedplan.parcel import Parcel
from fedplan.turn import Turn

BUCKET = 2**25
"""Bytes of tensors in one blob: enough to save requests, little enough to hold."""


def parcel_of(tensors: Mapping[str, Tensor], said: Mapping[str, JSON]) -> Parcel:
    """Tensors and what is said of them."""
    blobs = (pack(bucket, {}) for bucket in _buckets(tensors))
    return Parcel(pack({}, said), tuple(blobs))


def opened(parcel: Parcel, *, limit: int | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a parcel of at most `limit` bytes, and what is said of them."""
    if limit is not None and parcel.nbytes > limit:
        raise MessageError(f"a message of {parcel.nbytes} bytes is larger than the limit, {limit}")
    strays, said = unpack(parcel.header)
    if strays:
        raise MessageError("the header of a message holds tensors")
    found = dict[str, Tensor]()
    for blob in parcel.blobs:
        tensors, _ = unpack(blob)
        if again := found.keys() & tensors.keys():
            raise MessageError(f"{min(again)!r} is in two blobs of one message")
        found |= tensors
    return found, said


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    bucket = dict[str, Tensor]()
    for name, tensor in sorted(tensors.items()):
        if bucket and nbytes(bucket) + nbytes({name: tensor}) > BUCKET:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def down_said(down: Down) -> dict[str, JSON]:
    """What a request says, without its values."""
    turn = down.turn
    return {
        "request": down.request,
        "agreed": down.agreed,
        "round": turn.round,
        "client": turn.client,
        "phase": turn.phase,
        "traits": dict(turn.traits),
        "scores": listed(turn.scores) if turn.scores is not None else None,
        "versions": dict(down.versions),
        "basis": down.basis,
        "heard": down.heard,
        "anew": down.anew,
        "run": down.run,
    }


def down_parcel(down: Down) -> Parcel:
    """A request as a parcel."""
    return parcel_of(down.values, down_said(down))


def down_of(parcel: Parcel) -> Down:
    """A request from its parcel."""
    values, said = opened(parcel)
    turn = Turn(
        round=_read(said, "round", int),
        client=_read(said, "client", str),
        phase=_read(said, "phase", str),
        traits=_words(said, "traits", str),
        scores=scored(said["scores"]) if said.get("scores") is not None else None,
    )
    return Down(
        request=_read(said, "request", str),
        agreed=_read(said, "agreed", str),
        turn=turn,
        values=values,
        versions=_words(said, "versions", int),
        basis=_read(said, "basis", str),
        heard=_read(said, "heard", int),
        anew=_read(said, "anew", bool),
        run=_read(said, "run", str),
    )


def run_of(parcel: Parcel) -> str:
    """The id of the run that a request is of."""
    found = opened(Parcel(parcel.header))[1].get("run")
    if not is_id(found):
        raise MessageError(f"the request is of no run, but of {str(found)[:40]!r}")
    return str(found)


def update_parcel(update: Update) -> Parcel:
    """An answer as a parcel."""
    said: dict[str, JSON] = {
        "client": update.client,
        "request": update.request,
        "agreed": update.agreed,
        "weight": update.weight,
        "line": update.line,
    }
    return parcel_of(update.values, said)


def update_of(parcel: Parcel, *, limit: int | None = None) -> Update:
    """An answer from its parcel."""
    values, said = opened(parcel, limit=limit)
    return Update(
        client=_read(said, "client", str),
        request=_read(said, "request", str),
        agreed=_read(said, "agreed", str),
        values=values,
        weight=_read(said, "weight", int),
        line=_read(said, "line", dict),
    )


def _words(said: Mapping[str, Any], name: str, kind: type) -> dict[str, Any]:
    found = _read(said, name, dict)
    if any(type(value) is not kind for value in found.values()):
        raise MessageError(f"the message's {name} are not all of {kind.__name__}")
    return found


def _read(said: Mapping[str, Any], name: str, kind: type) -> Any:
    found = said.get(name)
    if type(found) is not kind:
        raise MessageError(f"the message's {name} is {str(found)[:40]!r}, not of {kind.__name__}")
    return found
