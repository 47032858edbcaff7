# SPDX-License-Identifier: Apache-2.0
"""Letters of masked sums as messages: small ones as JSON, masked words as blobs.

Of the slots of an advert a bit each is said: both ends know their order from the terms.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from fedplan.privacy.masking.letters import (
    Advert,
    Adverts,
    Boxes,
    Consent,
    Consents,
    Delivery,
    MaskedWords,
    Survivors,
    Unmasking,
)
from fedplan.privacy.masking.terms import Terms
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import JSON, SerializationError, packed, unpacked

Found = TypeVar("Found")
Said = Mapping[str, Any]


def letter_message(run: str, said: Mapping[str, JSON]) -> Message:
    """A letter as a message. It is a blob, since a header is small."""
    return Message(packed({}, {"run": run}).header, (json.dumps(said, sort_keys=True).encode(),))


def letter_in(message: Message, read: Callable[[Said], Found]) -> Found:
    """The letter of a message; what is none is an error of the message."""
    try:
        said: Any = json.loads(message.blobs[0])
        return read(said)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise SerializationError(f"this is no letter of a masked sum: {str(error)[:80]}") from error


def terms_in(message: Message) -> bytes:
    """The digest of the terms that a letter is of."""
    return letter_in(message, lambda said: _bytes(said["terms"]))


def words_message(run: str, letter: MaskedWords) -> Message:
    """Masked words as a message: each part is a blob."""
    names = list(letter.parts)
    said: dict[str, JSON] = {
        **{"run": run, "terms": letter.terms.hex(), "site": letter.site},
        "parts": [*names],
    }
    return Message(packed({}, said).header, tuple(letter.parts[name] for name in names))


def words_in(message: Message) -> MaskedWords:
    """Masked words from their message."""
    _, said = unpacked(Message(message.header))
    try:
        names = [_text(name) for name in cast("list[Any]", said["parts"])]
        parts = dict(zip(names, message.blobs, strict=True))
        return MaskedWords(_bytes(said["terms"]), _text(said["site"]), parts)
    except (ValueError, LookupError, TypeError) as error:
        raise SerializationError(f"these are no masked words: {str(error)[:80]}") from error


def advert_said(advert: Advert, terms: Terms) -> dict[str, JSON]:
    """An advert as JSON."""
    sent = set(advert.slots)
    bits = sum(1 << place for place, slot in enumerate(terms.slots) if slot.name in sent)
    keys = {"boxing": advert.boxing, "masking": advert.masking, "signature": advert.signature}
    said: dict[str, JSON] = {name: each.hex() for name, each in keys.items()}
    return said | {"terms": advert.terms.hex(), "site": advert.site, "slots": hex(bits)}


def advert_of(said: Said, terms: Terms) -> Advert:
    """An advert from JSON, by one's own terms."""
    bits = _bits(_text(said["slots"]), len(terms.slots))
    slots = tuple(slot.name for place, slot in enumerate(terms.slots) if bits >> place & 1)
    boxing, masking, signature = (_bytes(said[n]) for n in ("boxing", "masking", "signature"))
    return Advert(_bytes(said["terms"]), _text(said["site"]), boxing, masking, slots, signature)


def adverts_said(letter: Adverts, terms: Terms) -> dict[str, JSON]:
    """A roster as JSON."""
    each: list[JSON] = [advert_said(advert, terms) for advert in letter.adverts]
    return {"terms": letter.terms.hex(), "adverts": each}


def adverts_of(said: Said, terms: Terms) -> Adverts:
    """A roster from JSON."""
    adverts = tuple(advert_of(each, terms) for each in said["adverts"])
    return Adverts(_bytes(said["terms"]), adverts)


def boxes_said(letter: Boxes) -> dict[str, JSON]:
    """A site's boxes as JSON."""
    return {**_said(letter.terms, letter.site), "boxes": _hex(letter.boxes)}


def boxes_of(said: Said) -> Boxes:
    """A site's boxes from JSON."""
    return Boxes(*_by(said), _unhex(said["boxes"]))


def delivery_said(letter: Delivery) -> dict[str, JSON]:
    """The boxes for a site as JSON."""
    return {"terms": letter.terms.hex(), "boxes": _hex(letter.boxes)}


def delivery_of(said: Said) -> Delivery:
    """The boxes for a site from JSON."""
    return Delivery(_bytes(said["terms"]), _unhex(said["boxes"]))


def survivors_said(letter: Survivors) -> dict[str, JSON]:
    """The survivors as JSON."""
    return {"terms": letter.terms.hex(), "sites": [*letter.sites]}


def survivors_of(said: Said) -> Survivors:
    """The survivors from JSON."""
    return Survivors(_bytes(said["terms"]), tuple(_text(each) for each in said["sites"]))


def consent_said(letter: Consent) -> dict[str, JSON]:
    """A consent as JSON."""
    return {**_said(letter.terms, letter.site), "signature": letter.signature.hex()}


def consent_of(said: Said) -> Consent:
    """A consent from JSON."""
    return Consent(*_by(said), _bytes(said["signature"]))


def consents_said(letter: Consents) -> dict[str, JSON]:
    """All consents as JSON."""
    each: list[JSON] = [consent_said(consent) for consent in letter.consents]
    return {"terms": letter.terms.hex(), "consents": each}


def consents_of(said: Said) -> Consents:
    """All consents from JSON."""
    return Consents(_bytes(said["terms"]), tuple(consent_of(each) for each in said["consents"]))


def unmasking_said(letter: Unmasking) -> dict[str, JSON]:
    """What opens a sum, as JSON."""
    masks: dict[str, JSON] = {part: _hex(shares) for part, shares in letter.masks.items()}
    return {**_said(letter.terms, letter.site), "masks": masks, "keys": _hex(letter.keys)}


def unmasking_of(said: Said) -> Unmasking:
    """What opens a sum, from JSON."""
    masks = {_text(part): _unhex(shares) for part, shares in said["masks"].items()}
    return Unmasking(*_by(said), masks, _unhex(said["keys"]))


def _bits(said: str, slots: int) -> int:
    """Bits of so many slots; no number is read that is longer than they are."""
    if not said.startswith("0x") or len(said) > 2 + (slots + 3) // 4:
        raise ValueError(f"{said[:40]!r} are no bits of {slots} slots")
    if (bits := int(said, 16)) >> slots:
        raise ValueError(f"{said[:40]!r} has bits of more than {slots} slots")
    return bits


def _said(terms: bytes, site: str) -> dict[str, JSON]:
    return {"terms": terms.hex(), "site": site}


def _by(said: Said) -> tuple[bytes, str]:
    return _bytes(said["terms"]), _text(said["site"])


def _hex(held: Mapping[str, bytes]) -> dict[str, JSON]:
    return {name: each.hex() for name, each in held.items()}


def _unhex(held: Mapping[Any, Any]) -> dict[str, bytes]:
    return {_text(name): _bytes(each) for name, each in held.items()}


def _text(said: object) -> str:
    if not isinstance(said, str):
        raise TypeError(f"{str(said)[:40]!r} is no text")
    return said


def _bytes(said: object) -> bytes:
    return bytes.fromhex(_text(said))
