# SPDX-License-Identifier: Apache-2.0
"""Messages of the secure aggregation protocol as bytes: JSON in a blob, masked input as raw blobs.

The slots of a key advert are a bit set in the order of the terms, which both ends know. All
`*_from_json` functions raise ValueError, LookupError, TypeError or AttributeError for invalid
fields; `read_secagg_message` turns these into SerializationError.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from fedplan.privacy.secagg.messages import (
    EncryptedShares,
    ForwardedShares,
    KeyAdvert,
    KeyRoster,
    MaskedInput,
    SignatureList,
    SurvivorList,
    SurvivorSignature,
    UnmaskShares,
)
from fedplan.privacy.secagg.terms import Terms
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import JSON, SerializationError, pack_message, unpack_message

Parsed = TypeVar("Parsed")
Fields = Mapping[str, Any]
"""A parsed JSON object."""


def secagg_message(run: str, fields: Mapping[str, JSON]) -> Message:
    """Return a message with the run id in its header and the fields as JSON in a blob."""
    # A blob, because headers are limited in size.
    header = pack_message({}, {"run": run}).header
    return Message(header, (json.dumps(fields, sort_keys=True).encode(),))


def read_secagg_message(message: Message, parse: Callable[[Fields], Parsed]) -> Parsed:
    """Return `parse(fields)` for the JSON object in the message's first blob.

    Raises SerializationError if there is no blob or no JSON, or if `parse` raises ValueError,
    LookupError, TypeError or AttributeError.
    """
    try:
        fields: Any = json.loads(message.blobs[0])
        return parse(fields)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SerializationError(
            f"this is not a message of secure aggregation: {str(error)[:80]}"
        ) from error


def read_terms_digest(message: Message) -> bytes:
    """Return the digest of the protocol terms from a message of `secagg_message`."""
    return read_secagg_message(message, lambda fields: _bytes(fields["terms"]))


def masked_input_message(run: str, masked: MaskedInput) -> Message:
    """Return a message with each masked vector in a blob; the header has run id and names."""
    names = list(masked.vectors)
    header: dict[str, JSON] = {
        **{"run": run, "terms": masked.terms_digest.hex(), "client": masked.client},
        "groups": [*names],
    }
    return Message(pack_message({}, header).header, tuple(masked.vectors[name] for name in names))


def read_masked_input(message: Message) -> MaskedInput:
    """Return the masked input of a message that `masked_input_message` made.

    Raises SerializationError if the header is invalid, or has not one name for each blob. The bytes
    of the vectors are not checked.
    """
    _, header = unpack_message(Message(message.header))
    try:
        names = [_text(name) for name in cast("list[Any]", header["groups"])]
        vectors = dict(zip(names, message.blobs, strict=True))
        return MaskedInput(_bytes(header["terms"]), _text(header["client"]), vectors)
    except (ValueError, LookupError, TypeError) as error:
        raise SerializationError(f"this is not masked input: {str(error)[:80]}") from error


def key_advert_to_json(advert: KeyAdvert, terms: Terms) -> dict[str, JSON]:
    """Return the JSON fields of a key advert; the slots are bits in the order of the terms."""
    sent = set(advert.slots)
    bits = sum(1 << place for place, slot in enumerate(terms.slots) if slot.name in sent)
    return {
        "encryption_key": advert.encryption_key.hex(),
        "masking_key": advert.masking_key.hex(),
        "signature": advert.signature.hex(),
        **_sender_fields(advert.terms_digest, advert.client),
        "slots": hex(bits),
    }


def key_advert_from_json(fields: Fields, terms: Terms) -> KeyAdvert:
    """Return the key advert of JSON fields; slot names come from the reader's own terms.

    Raises ValueError if the bit set is not hex or longer than the terms' slots, and ValueError,
    LookupError or TypeError if another field is missing or invalid.
    """
    text, count = _text(fields["slots"]), len(terms.slots)
    # The length first: a huge number is never parsed.
    if not text.startswith("0x") or len(text) > 2 + (count + 3) // 4:
        raise ValueError(f"{text[:40]!r} is not a bit set of {count} slots")
    if (bits := int(text, 16)) >> count:
        raise ValueError(f"{text[:40]!r} has bits of more than {count} slots")
    slots = tuple(slot.name for place, slot in enumerate(terms.slots) if bits >> place & 1)
    encryption_key, masking_key, signature = (
        _bytes(fields[name]) for name in ("encryption_key", "masking_key", "signature")
    )
    return KeyAdvert(*_sender(fields), encryption_key, masking_key, slots, signature)


def key_roster_to_json(roster: KeyRoster, terms: Terms) -> dict[str, JSON]:
    """Return the JSON fields of the roster of key adverts."""
    adverts: list[JSON] = [key_advert_to_json(advert, terms) for advert in roster.adverts]
    return {"terms": roster.terms_digest.hex(), "adverts": adverts}


def key_roster_from_json(fields: Fields, terms: Terms) -> KeyRoster:
    """Return the roster of key adverts of JSON fields."""
    adverts = tuple(key_advert_from_json(advert, terms) for advert in fields["adverts"])
    return KeyRoster(_bytes(fields["terms"]), adverts)


def encrypted_shares_to_json(shares: EncryptedShares) -> dict[str, JSON]:
    """Return the JSON fields of a client's encrypted shares."""
    sender = _sender_fields(shares.terms_digest, shares.client)
    return {**sender, "encrypted_shares": _hex(shares.ciphertexts)}


def encrypted_shares_from_json(fields: Fields) -> EncryptedShares:
    """Return a client's encrypted shares of JSON fields."""
    return EncryptedShares(*_sender(fields), _unhex(fields["encrypted_shares"]))


def forwarded_shares_to_json(shares: ForwardedShares) -> dict[str, JSON]:
    """Return the JSON fields of the encrypted shares that a client receives."""
    return {"terms": shares.terms_digest.hex(), "encrypted_shares": _hex(shares.ciphertexts)}


def forwarded_shares_from_json(fields: Fields) -> ForwardedShares:
    """Return the encrypted shares that a client receives, of JSON fields."""
    return ForwardedShares(_bytes(fields["terms"]), _unhex(fields["encrypted_shares"]))


def survivor_list_to_json(survivors: SurvivorList) -> dict[str, JSON]:
    """Return the JSON fields of the survivor list."""
    return {"terms": survivors.terms_digest.hex(), "survivors": [*survivors.clients]}


def survivor_list_from_json(fields: Fields) -> SurvivorList:
    """Return the survivor list of JSON fields."""
    return SurvivorList(_bytes(fields["terms"]), tuple(_text(name) for name in fields["survivors"]))


def survivor_signature_to_json(signed: SurvivorSignature) -> dict[str, JSON]:
    """Return the JSON fields of a client's signature of the survivor list."""
    sender = _sender_fields(signed.terms_digest, signed.client)
    return {**sender, "signature": signed.signature.hex()}


def survivor_signature_from_json(fields: Fields) -> SurvivorSignature:
    """Return a client's signature of the survivor list, of JSON fields."""
    return SurvivorSignature(*_sender(fields), _bytes(fields["signature"]))


def signature_list_to_json(signed: SignatureList) -> dict[str, JSON]:
    """Return the JSON fields of all clients' signatures of the survivor list."""
    signatures: list[JSON] = [survivor_signature_to_json(each) for each in signed.signatures]
    return {"terms": signed.terms_digest.hex(), "signatures": signatures}


def signature_list_from_json(fields: Fields) -> SignatureList:
    """Return all clients' signatures of the survivor list, of JSON fields."""
    signatures = tuple(survivor_signature_from_json(each) for each in fields["signatures"])
    return SignatureList(_bytes(fields["terms"]), signatures)


def unmask_shares_to_json(shares: UnmaskShares) -> dict[str, JSON]:
    """Return the JSON fields of a client's unmask shares."""
    self_mask_shares: dict[str, JSON] = {
        group: _hex(by_client) for group, by_client in shares.self_mask_shares.items()
    }
    return {
        **_sender_fields(shares.terms_digest, shares.client),
        "self_mask_shares": self_mask_shares,
        "masking_key_shares": _hex(shares.masking_key_shares),
    }


def unmask_shares_from_json(fields: Fields) -> UnmaskShares:
    """Return a client's unmask shares of JSON fields."""
    groups = fields["self_mask_shares"].items()
    self_mask_shares = {_text(group): _unhex(by_client) for group, by_client in groups}
    masking_key_shares = _unhex(fields["masking_key_shares"])
    return UnmaskShares(*_sender(fields), self_mask_shares, masking_key_shares)


def _sender_fields(terms_digest: bytes, client: str) -> dict[str, JSON]:
    return {"terms": terms_digest.hex(), "client": client}


def _sender(fields: Fields) -> tuple[bytes, str]:
    return _bytes(fields["terms"]), _text(fields["client"])


def _hex(values: Mapping[str, bytes]) -> dict[str, JSON]:
    return {name: value.hex() for name, value in values.items()}


def _unhex(values: Mapping[Any, Any]) -> dict[str, bytes]:
    return {_text(name): _bytes(value) for name, value in values.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} is not text")
    return value


def _bytes(value: object) -> bytes:
    return bytes.fromhex(_text(value))
