# SPDX-License-Identifier: Apache-2.0
"""Parcels: what travels in a round as Flower's records: a JSON header and buckets of safetensors.

Flower fetches every array by a request of its own, so tensors are packed together; and as bytes,
because its arrays know neither bfloat16 nor eight-bit floats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from fedplan.exchange import Down, Update, nbytes
from fedplan.message import JSON, MessageError, pack, unpack
from fedplan.params import Block
from fedplan.turn import Turn

BUCKET = 2**25
"""Bytes of tensors that travel as one array: enough to save requests, little enough to hold."""

ARRAYS, HEADER, FIELD = "arrays", "header", "fedplan"


def wrapped(tensors: Mapping[str, Tensor], header: Mapping[str, JSON]) -> RecordDict:
    """Tensors and a header as records."""
    blobs = [pack(bucket, {}) for bucket in _buckets(tensors)]
    arrays = {
        f"{place:06}": Array("uint8", (len(blob),), "safetensors", blob)
        for place, blob in enumerate(blobs)
    }
    said = ConfigRecord({FIELD: pack({}, header)})
    return RecordDict({ARRAYS: ArrayRecord(arrays), HEADER: said})


def unwrapped(records: RecordDict) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the header of records, each bucket let go as soon as it is read."""
    held, said = records.get(ARRAYS), records.get(HEADER)
    if not isinstance(held, ArrayRecord) or not isinstance(said, ConfigRecord):
        raise MessageError("this is no message of fedplan: it lacks arrays or a header")
    data = said.get(FIELD)
    if not isinstance(data, bytes):
        raise MessageError("the header of a message must be bytes")
    _, header = unpack(data)
    found = dict[str, Tensor]()
    for place in sorted(held):
        tensors, _ = unpack(held.pop(place).data)
        if again := found.keys() & tensors.keys():
            raise MessageError(f"{min(again)!r} is in two buckets of one message")
        found |= tensors
    return found, header


def _buckets(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    bucket = dict[str, Tensor]()
    for name, tensor in sorted(tensors.items()):
        if bucket and nbytes(bucket) + nbytes({name: tensor}) > BUCKET:
            yield bucket
            bucket = {}
        bucket[name] = tensor
    if bucket:
        yield bucket


def down_records(down: Down) -> RecordDict:
    """A request as records."""
    turn = down.turn
    header: dict[str, JSON] = {
        "request": down.request,
        "agreed": down.agreed,
        "round": turn.round,
        "client": turn.client,
        "phase": turn.phase,
        "traits": dict(turn.traits),
        "scores": listed(turn.scores) if turn.scores is not None else None,
        "versions": dict(down.versions),
    }
    return wrapped(down.values, header)


def down_of(records: RecordDict) -> Down:
    """A request from its records."""
    values, said = unwrapped(records)
    turn = Turn(
        round=_read(said, "round", int),
        client=_read(said, "client", str),
        phase=_read(said, "phase", str),
        traits=_read(said, "traits", dict),
        scores=scored(said["scores"]) if said.get("scores") is not None else None,
    )
    return Down(
        request=_read(said, "request", str),
        agreed=_read(said, "agreed", str),
        turn=turn,
        values=values,
        versions=_read(said, "versions", dict),
    )


def update_records(update: Update) -> RecordDict:
    """An answer as records."""
    header: dict[str, JSON] = {
        "client": update.client,
        "request": update.request,
        "agreed": update.agreed,
        "weight": update.weight,
        "line": update.line,
    }
    return wrapped(update.values, header)


def update_of(records: RecordDict) -> Update:
    """An answer from its records."""
    values, said = unwrapped(records)
    return Update(
        client=_read(said, "client", str),
        request=_read(said, "request", str),
        agreed=_read(said, "agreed", str),
        values=values,
        weight=_read(said, "weight", int),
        line=_read(said, "line", dict),
    )


def listed(scores: Mapping[Block, float]) -> list[JSON]:
    """Scores as JSON."""
    return [[block.stack, block.number, score] for block, score in scores.items()]


def scored(found: Any) -> dict[Block, float]:
    """Scores from JSON."""
    try:
        return {Block(str(stack), int(number)): float(score) for stack, number, score in found}
    except (TypeError, ValueError) as error:
        raise MessageError(f"these are no scores of blocks: {str(found)[:60]}") from error


def _read(said: Mapping[str, Any], name: str, kind: type) -> Any:
    found = said.get(name)
    if type(found) is not kind:
        raise MessageError(f"the message's {name} is {str(found)[:40]!r}, not of {kind.__name__}")
    return found
