# SPDX-License-Identifier: Apache-2.0
"""Messages of a secure aggregation round, in the order of the protocol (Bonawitz et al., 2017).

Each carries the digest of the round's terms. Clients send a key advert, encrypted shares, a masked
input, a signature of the survivor list, and unmask shares. The server answers each but the last.

As bytes a message is JSON in a blob (bytes in hex), masked input raw blobs. One codec derives the
JSON from the fields of the classes.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from fedplan.secagg.crypto import sha256_of
from fedplan.secagg.terms import SlotGroup, Terms, group_slots
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import JSON, SerializationError, pack_message, unpack_message

M = TypeVar("M")
_JSON_NAMES = {"terms_digest": "terms", "ciphertexts": "encrypted_shares", "clients": "survivors"}
"""Names in JSON of the fields that have another one there."""


@dataclass(frozen=True)
class KeyAdvert:
    """Client to server: the client's public keys of a round, and the names of the slots to be sent.

    encryption_key: public X25519 key for encrypting shares to this client.
    masking_key: public X25519 key for pairwise masks.
    signature: of `body`, by the client's node key, so that the server cannot replace the keys.
    terms_digest: digest of the round's terms, as in all messages.
    """

    encryption_key: bytes
    masking_key: bytes
    signature: bytes
    terms_digest: bytes
    client: str
    slots: tuple[str, ...]

    @property
    def body(self) -> bytes:
        """Digest of all fields but the signature, to be signed."""
        keys = self.encryption_key, self.masking_key
        return sha256_of("advert", self.terms_digest, self.client, *keys, *self.slots)


@dataclass(frozen=True)
class KeyRoster:
    """Server to all clients: the key adverts of the round with these terms, sorted by client."""

    terms_digest: bytes
    adverts: tuple[KeyAdvert, ...]

    @property
    def digest(self) -> bytes:
        """Digest of terms, clients, keys and slots; signatures excluded."""
        return sha256_of("roster", self.terms_digest, *(advert.body for advert in self.adverts))

    def groups(self, terms: Terms) -> tuple[SlotGroup, ...]:
        """The slots of the terms, grouped by the clients that declared them."""
        return group_slots(terms, {advert.client: advert.slots for advert in self.adverts})


@dataclass(frozen=True)
class EncryptedShares:
    """Client to server: shares of the client's secrets, encrypted, by receiving client.

    share_hashes: commitments to the shares of each client of the roster, this one included.
    secret_hashes: commitments to the secrets.
    """

    terms_digest: bytes
    client: str
    ciphertexts: Mapping[str, bytes]
    share_hashes: Mapping[str, tuple[bytes, ...]]
    secret_hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class ForwardedShares:
    """Server to one client: the ciphertexts of shares encrypted to this client, by sender.

    The senders and the receiver are the clients that mask their input for each other.
    share_hashes: by sender, the commitments to the shares that are encrypted to this client.
    """

    terms_digest: bytes
    ciphertexts: Mapping[str, bytes]
    share_hashes: Mapping[str, tuple[bytes, ...]]


@dataclass(frozen=True)
class MaskedInput:
    """Client to server: the client's masked vector for each slot group, by group name.

    complaints: the clients whose shares to this client do not decrypt, or do not match their
    commitments; this client will give no share of their secrets.
    signature: of `input_digest`, by the client's node key: it names the clients that this input is
    masked with.
    """

    terms_digest: bytes
    client: str
    vectors: Mapping[str, bytes]
    complaints: tuple[str, ...]
    signature: bytes


@dataclass(frozen=True)
class SurvivorList:
    """Server to all clients: those whose masked input has arrived, sorted, with its signatures."""

    terms_digest: bytes
    clients: tuple[str, ...]
    input_signatures: Mapping[str, bytes]


@dataclass(frozen=True)
class SurvivorSignature:
    """Client to server: the client's signature of the survivor list, by its node key."""

    terms_digest: bytes
    client: str
    signature: bytes


@dataclass(frozen=True)
class SignatureList:
    """Server to all survivors: the signatures, which prove that all received the same list."""

    terms_digest: bytes
    signatures: tuple[SurvivorSignature, ...]


@dataclass(frozen=True)
class UnmaskShares:
    """Client to server: the shares that the client has of all clients' secrets, to unmask the sum.

    self_mask_shares: of the self mask seeds of survivors, by group name and client.
    masking_key_shares: of the masking secrets of clients that dropped out, by client.
    No client is in both.
    """

    terms_digest: bytes
    client: str
    self_mask_shares: Mapping[str, Mapping[str, bytes]]
    masking_key_shares: Mapping[str, bytes]


def input_digest(context: bytes) -> bytes:
    """Digest that a masked input signs: the mask context, with all clients it is masked with."""
    return sha256_of("masked input", context)


def survivors_digest(context: bytes, survivors: tuple[str, ...]) -> bytes:
    """Digest that a survivor signature signs: the mask context of the round, and the survivors."""
    return sha256_of("survivors", context, *survivors)


def to_json(message: object, terms: Terms | None = None) -> dict[str, JSON]:
    """The JSON fields of a message; slots of key adverts are a bit set in the terms' order."""
    result = dict[str, JSON]()
    for each in fields(cast("Any", message)):
        value = getattr(message, each.name)
        if isinstance(message, KeyAdvert) and each.name == "slots":
            assert terms is not None
            sent = set(message.slots)
            bits = (1 << place for place, slot in enumerate(terms.slots) if slot.name in sent)
            result["slots"] = hex(sum(bits))
        else:
            result[_JSON_NAMES.get(each.name, each.name)] = value_to_json(value, terms)
    return result


def value_to_json(value: Any, terms: Terms | None = None) -> JSON:
    """Return a value of a message's field as JSON; bytes in hex."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [value_to_json(each, terms) for each in cast("tuple[Any, ...]", value)]
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {name: value_to_json(each, terms) for name, each in items}
    return to_json(value, terms) if is_dataclass(value) else cast("str", value)


def from_json(kind: type[M], data: object, terms: Terms | None = None) -> M:
    """Return the message of class `kind` in JSON fields; slot names are from the reader's terms.

    Raises SerializationError for a missing field, or one of another type. Fields that the class
    does not have are ignored.
    """
    with _serialization_errors():
        return value_from_json(kind, data, terms)


@contextmanager
def _serialization_errors() -> Generator[None]:
    """Raise a SerializationError in place of the errors of reading JSON in the body."""
    try:
        yield
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise SerializationError(
            f"this is not a message of secure aggregation: {str(error)[:80]}"
        ) from error


def value_from_json(kind: Any, data: Any, terms: Terms | None = None) -> Any:
    """Return the value of a type that `value_to_json` wrote; TypeError or ValueError if none."""
    if kind in (str, bytes):
        if not isinstance(data, str):
            raise TypeError(f"{str(data)[:40]!r} is not text")
        return bytes.fromhex(data) if kind is bytes else data
    shape: type = list if get_origin(kind) is tuple else dict
    if not isinstance(data, shape):
        raise TypeError(f"{str(data)[:40]!r} is no {shape.__name__}")
    if is_dataclass(kind):
        return cast("Any", kind)(
            **{
                name: _slots_from_bits(data["slots"], terms)
                if kind is KeyAdvert and name == "slots"
                else value_from_json(hint, data[_JSON_NAMES.get(name, name)], terms)
                for name, hint in _type_hints(kind).items()
            }
        )
    if shape is list:
        return tuple(value_from_json(get_args(kind)[0], each, terms) for each in data)
    return {name: value_from_json(get_args(kind)[1], each, terms) for name, each in data.items()}


_type_hints = cache(get_type_hints)


def _slots_from_bits(data: Any, terms: Terms | None) -> tuple[str, ...]:
    """Return the names of the terms' slots in a bit set; ValueError if it is none."""
    assert terms is not None
    text, count = value_from_json(str, data), len(terms.slots)
    # The length first: a huge number is never parsed.
    if not text.startswith("0x") or len(text) > 2 + (count + 3) // 4:
        raise ValueError(f"{text[:40]!r} is not a bit set of {count} slots")
    if (bits := int(text, 16)) >> count:
        raise ValueError(f"{text[:40]!r} has bits of more than {count} slots")
    return tuple(slot.name for place, slot in enumerate(terms.slots) if bits >> place & 1)


def encode(run: str, message: object, terms: Terms | None = None) -> Message:
    """Return a message as bytes; each vector of a MaskedInput is a blob, named in the header."""
    if isinstance(message, MaskedInput):
        header = to_json(replace(message, vectors={}))
        del header["vectors"]
        header |= {"run": run, "groups": [*message.vectors]}
        return Message(pack_message({}, header).header, tuple(message.vectors.values()))
    # A blob, because headers are limited in size.
    text = json.dumps(to_json(message, terms), sort_keys=True)
    return Message(pack_message({}, {"run": run}).header, (text.encode(),))


def decode(kind: type[M], message: Message, terms: Terms | None = None) -> M:
    """Return the message that `encode` made bytes of; SerializationError for other bytes."""
    if kind is not MaskedInput:
        with _serialization_errors():
            return value_from_json(kind, json.loads(message.blobs[0]), terms)
    _, header = unpack_message(Message(message.header))
    masked = from_json(MaskedInput, header | {"vectors": {}})
    with _serialization_errors():
        groups = value_from_json(tuple[str, ...], header["groups"])
    if len(groups) != len(message.blobs):
        raise SerializationError(f"{len(message.blobs)} vectors have {len(groups)} names")
    vectors = dict(zip(groups, message.blobs, strict=True))
    return cast("M", replace(masked, vectors=vectors))


def read_terms_digest(message: Message) -> bytes:
    """Return the digest of the round's terms in a message from `encode`, other than MaskedInput."""
    with _serialization_errors():
        return value_from_json(bytes, json.loads(message.blobs[0])["terms"])
