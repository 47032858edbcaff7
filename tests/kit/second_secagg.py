# SPDX-License-Identifier: Apache-2.0
"""A second implementation of a site in secure aggregation, from docs/explanation/secure-aggregation.md.

In plain Python, and without anything of fedplan: messages come and go as JSON.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

P = 2**256 + 297
Json = dict[str, Any]


def frame(*words: str | int | bytes) -> bytes:
    out = b""
    for word in words:
        content = word if isinstance(word, bytes) else str(word).encode()
        out += f"{type(word).__name__} {len(content)}:".encode() + content
    return out


def h(*words: str | int | bytes) -> bytes:
    return hashlib.sha256(frame(*words)).digest()


def kdf(secret: bytes, salt: bytes, *words: str | int | bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, frame(*words)).derive(secret)


def public(private: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared(private: bytes, other: bytes) -> bytes:
    key = X25519PublicKey.from_public_bytes(other)
    return X25519PrivateKey.from_private_bytes(private).exchange(key)


def keystream(key: bytes, count: int) -> bytes:
    return Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor().update(bytes(count))


class SecondSite:
    """A site of one round, whose terms are a dictionary.

    `peers`: public Ed25519 keys by name. `draws` replaces what is drawn: "encryption" and "masking"
    (private keys), "seeds" by part, and "coefficients" by number of the secret, in hex.
    """

    def __init__(
        self, name: str, node: bytes, peers: Mapping[str, bytes], terms: Json, draws: Json
    ) -> None:
        self.name, self.peers, self.terms, self.draws = name, peers, terms, draws
        self.node = Ed25519PrivateKey.from_private_bytes(node)
        self.encryption = bytes.fromhex(draws.get("encryption") or os.urandom(32).hex())
        self.masking = bytes.fromhex(draws.get("masking") or os.urandom(32).hex())
        slots = [w for s in terms["slots"] for w in (s["name"], s["count"], int(s["wide"]))]
        keys = ("rule", "experiment", "run", "agreement_digest", "round", "attempt", "base_digest")
        words = [terms[key] for key in keys]
        self.digest = h(*words, terms["threshold"], terms["min_senders"], *slots)

    def body(self, advert: Json) -> bytes:
        bits = int(advert["slots"], 16)
        slots = [s["name"] for n, s in enumerate(self.terms["slots"]) if bits >> n & 1]
        keys = bytes.fromhex(advert["encryption_key"]), bytes.fromhex(advert["masking_key"])
        return h("advert", bytes.fromhex(advert["terms"]), advert["client"], *keys, *slots)

    def advert(self, slots: Sequence[str]) -> Json:
        bits = sum(1 << n for n, s in enumerate(self.terms["slots"]) if s["name"] in slots)
        advert: Json = {
            "encryption_key": public(self.encryption).hex(),
            "masking_key": public(self.masking).hex(),
            **{"terms": self.digest.hex(), "client": self.name, "slots": hex(bits)},
        }
        return advert | {"signature": self.node.sign(self.body(advert)).hex()}

    def shares(self, roster: Json) -> Json:
        self.adverts: dict[str, Json] = {each["client"]: each for each in roster["adverts"]}
        for name, advert in self.adverts.items():
            key = Ed25519PublicKey.from_public_bytes(self.peers[name])
            key.verify(bytes.fromhex(advert["signature"]), self.body(advert))
        bodies = [self.body(advert) for advert in self.adverts.values()]
        self.roster = h("roster", self.digest, *bodies)
        self.parts: dict[str, tuple[list[Json], list[str]]] = {}
        by_senders: dict[tuple[str, ...], list[Json]] = {}
        for n, slot in enumerate(self.terms["slots"]):
            senders = [c for c, a in self.adverts.items() if int(a["slots"], 16) >> n & 1]
            if senders:
                by_senders.setdefault(tuple(senders), []).append(slot)
        for senders, slots in by_senders.items():
            names = [slot["name"] for slot in slots]
            name = h("group", len(names), *names, *senders).hex()[:32]
            self.parts[name] = slots, list(senders)
        own, known = self.parts_of(self.name), self.draws.get("seeds", {})
        self.seeds = {p: bytes.fromhex(known.get(p) or os.urandom(32).hex()) for p in own}
        holders, boxes, hashes = list(self.adverts), dict[str, str](), dict[str, list[str]]()
        polynomials = list[list[int]]()
        for number, secret in enumerate((self.masking, *self.seeds.values())):
            drawn = self.draws.get("coefficients", {}).get(str(number))
            more = [int(c, 16) for c in drawn or ()] or [
                secrets.randbelow(P) for _ in range(1, self.terms["threshold"])
            ]
            polynomials.append([int.from_bytes(secret), *more])
        for place, holder in enumerate(holders, start=1):
            own_shares = [
                (sum(c * pow(place, n, P) for n, c in enumerate(poly)) % P).to_bytes(33)
                for poly in polynomials
            ]
            digests = [
                h("share", self.roster, self.name, holder, n, each)
                for n, each in enumerate(own_shares)
            ]
            hashes[holder] = [each.hex() for each in digests]
            if holder == self.name:
                self.held = {self.name: own_shares}
                continue
            key = self.box_key(holder, self.name, holder)
            data = frame(self.name, holder, *digests)
            boxes[holder] = AESGCM(key).encrypt(bytes(12), b"".join(own_shares), data).hex()
        secrets_ = (self.masking, *self.seeds.values())
        committed = [
            h("secret", self.roster, self.name, n, s).hex() for n, s in enumerate(secrets_)
        ]
        return {
            **{"terms": self.digest.hex(), "client": self.name, "encrypted_shares": boxes},
            **{"share_hashes": hashes, "secret_hashes": committed},
        }

    def box_key(self, other: str, dealer: str, holder: str) -> bytes:
        secret = shared(self.encryption, bytes.fromhex(self.adverts[other]["encryption_key"]))
        return kdf(secret, self.roster, "shares", dealer, holder)

    def parts_of(self, site: str) -> list[str]:
        return [part for part, (_, senders) in self.parts.items() if site in senders]

    def masked(
        self, forwarded: Json, numbers: Mapping[str, Sequence[int]], weight: int
    ) -> tuple[dict[str, bytes], list[str], bytes]:
        """The vectors by part, the complaints, and the signature of the input."""
        complaints = list[str]()
        for dealer, box in forwarded["encrypted_shares"].items():
            digests = [bytes.fromhex(each) for each in forwarded["share_hashes"][dealer]]
            data, key = frame(dealer, self.name, *digests), self.box_key(dealer, dealer, self.name)
            try:
                content = AESGCM(key).decrypt(bytes(12), bytes.fromhex(box), data)
                found = [content[at : at + 33] for at in range(0, len(content), 33)]
                said = [h("share", self.roster, dealer, self.name, *x) for x in enumerate(found)]
                assert said == digests
                self.held[dealer] = found
            except Exception:
                complaints.append(dealer)
        self.sharing = sorted((*forwarded["encrypted_shares"], self.name))
        self.context = h("context", self.digest, self.roster, *self.sharing)
        vectors = dict[str, bytes]()
        for part in self.parts_of(self.name):
            slots, senders = self.parts[part]
            present = [site for site in senders if site in self.sharing]
            if len(present) < self.terms["min_senders"]:
                continue
            sizes = [(n, 8) for n in (1, weight)]
            for wide in (False, True):
                chosen = [slot for slot in slots if bool(slot["wide"]) is wide]
                sizes += [(n, 16 if wide else 8) for s in chosen for n in numbers[s["name"]]]
            total = [number for number, _ in sizes]
            for site in present:
                if site == self.name:
                    key, sign = kdf(self.seeds[part], self.context, "self", part, site), 1
                else:
                    secret = shared(self.masking, bytes.fromhex(self.adverts[site]["masking_key"]))
                    pair = sorted((site, self.name))
                    key = kdf(secret, self.context, "pair", part, *pair)
                    sign = 1 if self.name < site else -1
                stream, at = keystream(key, sum(size for _, size in sizes)), 0
                for n, (_, size) in enumerate(sizes):
                    total[n] += sign * int.from_bytes(stream[at : at + size], "little")
                    at += size
            words = zip(total, sizes, strict=True)
            vectors[part] = b"".join(
                (n % 2 ** (8 * s)).to_bytes(s, "little") for n, (_, s) in words
            )
        signature = self.node.sign(h("masked input", self.context))
        return vectors, sorted(complaints), signature

    def signature(self, survivors: Json) -> Json:
        self.survivors: list[str] = survivors["survivors"]
        for site in self.survivors:
            key = Ed25519PublicKey.from_public_bytes(self.peers[site])
            signed = bytes.fromhex(survivors["input_signatures"][site])
            key.verify(signed, h("masked input", self.context))
        body = h("survivors", self.context, *self.survivors)
        said = {"terms": self.digest.hex(), "client": self.name}
        return said | {"signature": self.node.sign(body).hex()}

    def unmask(self, signatures: Json) -> Json:
        body = h("survivors", self.context, *self.survivors)
        for each in signatures["signatures"]:
            key = Ed25519PublicKey.from_public_bytes(self.peers[each["client"]])
            key.verify(bytes.fromhex(each["signature"]), body)
        assert len(signatures["signatures"]) >= self.terms["threshold"]
        seeds, keys = dict[str, dict[str, str]](), dict[str, str]()
        for part, (_, senders) in self.parts.items():
            left = [site for site in senders if site in self.survivors]
            if len(left) < self.terms["min_senders"]:
                continue
            seeds[part] = {
                s: self.held[s][1 + self.parts_of(s).index(part)].hex()
                for s in left
                if s in self.held
            }
            gone = [s for s in senders if s in self.sharing and s not in left and s in self.held]
            keys |= {site: self.held[site][0].hex() for site in gone}
        said = {"terms": self.digest.hex(), "client": self.name}
        return said | {"self_mask_shares": seeds, "masking_key_shares": dict(sorted(keys.items()))}
