# SPDX-License-Identifier: Apache-2.0
"""A stored round to the bit, and rounds that a second implementation takes part in.

`python tests/secagg/test_vectors.py` writes vectors.json anew; a change of it is a new version of
the protocol (`RULE` in fedplan/secagg/terms.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1] / "kit"), str(Path(__file__).parents[2])]

import masked
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from masked import NEVER, drawn
from second_secagg import SecondSite

from fedplan.secagg.client import ProtocolClient
from fedplan.secagg.client_state import ClientRoundState
from fedplan.secagg.crypto import KEY_SIZE, PRIME, KeyStream, hkdf, node_public_key
from fedplan.secagg.messages import (
    EncryptedShares,
    KeyAdvert,
    MaskedInput,
    SurvivorSignature,
    UnmaskShares,
    from_json,
    to_json,
)
from fedplan.secagg.progress import MemoryProgressStore
from fedplan.secagg.server import ProtocolServer
from fedplan.secagg.terms import RULE, Slot, Terms
from fedplan.tensors.ring import ints_from_words, widen_words

FILE = Path(__file__).parent / "vectors.json"
Json = dict[str, Any]


def node_secret(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


class MixedRound:
    """A round over JSON: sites of this package, and `seconds`, sites of the second implementation.

    `gone`: the step that a site no longer does. `messages`: all replies, by step and site.
    """

    def __init__(
        self,
        terms: Terms,
        numbers: dict[str, dict[str, Any]],
        weights: dict[str, int],
        seconds: list[str],
        gone: dict[str, int] | None = None,
        draws: Json | None = None,
    ) -> None:
        self.terms, self.numbers, self.weights, self.gone = terms, numbers, weights, gone or {}
        keys = {n: Ed25519PrivateKey.from_private_bytes(node_secret(n)) for n in numbers}
        known = {n: node_public_key(key) for n, key in keys.items()}
        raw = {n: key.public_key().public_bytes_raw() for n, key in keys.items()}
        plain = asdict(terms) | {"rule": RULE}
        self.server, self.stores = ProtocolServer(terms, known), dict[str, MemoryProgressStore]()
        self.sites = dict[str, ProtocolClient]()
        self.seconds = {
            n: SecondSite(n, node_secret(n), raw, plain, (draws or {}).get(n, {})) for n in seconds
        }
        for name in numbers.keys() - self.seconds.keys():
            self.stores[name] = MemoryProgressStore()
            self.sites[name] = ProtocolClient(name, keys[name], known, self.stores[name])
        self.messages: dict[str, dict[str, Json]] = {}

    def integers(self, name: str) -> dict[str, list[int]]:
        wide = {slot.name: slot.wide for slot in self.terms.slots}
        return {
            slot: ints_from_words(words if wide[slot] else widen_words(words))
            for slot, words in self.numbers[name].items()
        }

    def reply(self, step: int, name: str, told: Any) -> Json:
        """The reply of a site to a message of the server, as JSON."""
        told = to_json(told, self.terms) if told is not None else {}
        if name in self.seconds:
            second = self.seconds[name]
            if step == 2:
                given = self.integers(name), self.weights[name]
                vectors, wrong, signed = second.masked(told, *given)
                said = {"complaints": wrong, "signature": signed.hex()}
                return said | {"vectors": {n: v.hex() for n, v in vectors.items()}}
            if step == 0:
                return second.advert(list(self.numbers[name]))
            return (second.shares, None, second.signature, second.unmask)[step - 1](told)  # type: ignore[misc]
        site = self.sites[name]
        if step == 0:
            advert = site.advertise_keys(self.terms, list(self.numbers[name]))
            return to_json(advert, self.terms)
        if step == 2:
            given = self.server.shares_for(name)
            said = site.mask_input(given, self.numbers[name], self.weights[name])
            vectors = {n: v.hex() for n, v in said.vectors.items()}
            signed = {"complaints": list(said.complaints), "signature": said.signature.hex()}
            return signed | {"vectors": vectors}
        if step == 1:
            return to_json(site.share_secrets(self.server.roster()))
        if step == 3:
            return to_json(site.sign_survivors(self.server.survivor_list()))
        return to_json(site.reveal_shares(self.server.signature_list()))

    def play(self) -> Json:
        server, terms = self.server, self.terms
        tell: list[Any] = [lambda _: None, lambda _: server.roster(), server.shares_for]
        tell += [lambda _: server.survivor_list(), lambda _: server.signature_list()]
        for step, name_of in enumerate(("advert", "shares", "input", "signature", "unmask")):
            there = [n for n in sorted(self.numbers) if self.gone.get(n, NEVER) > step]
            asked = {name: tell[step](name) for name in there}
            replies = {name: self.reply(step, name, asked[name]) for name in there}
            self.messages[name_of] = replies
            for name, said in replies.items():
                if step == 0:
                    server.accept_advert(from_json(KeyAdvert, said, terms))
                elif step == 1:
                    server.accept_shares(from_json(EncryptedShares, said))
                elif step == 2:
                    vectors = {n: bytes.fromhex(v) for n, v in said["vectors"].items()}
                    wrong, signed = tuple(said["complaints"]), bytes.fromhex(said["signature"])
                    server.add_masked_input(MaskedInput(terms.digest, name, vectors, wrong, signed))
                elif step == 3:
                    server.accept_signature(from_json(SurvivorSignature, said))
                else:
                    server.accept_unmask_shares(from_json(UnmaskShares, said))
        found = server.unmask()
        wide = {slot.name: slot.wide for slot in terms.slots}
        sums = {
            n: [str(i) for i in ints_from_words(w if wide[n] else widen_words(w))]
            for n, w in found.numbers.items()
        }
        return {"sums": sums, "weights": found.weights, "withheld": sorted(found.withheld)}


def stored_terms() -> tuple[Terms, dict[str, dict[str, Any]], dict[str, int], dict[str, int]]:
    """Five sites, of which one drops out; four slots in three parts, one of which stays closed."""
    slots = [Slot("all", 0), Slot("body", 3), Slot("head", 2, wide=True), Slot("own", 1)]
    agreed = masked.terms(slots, threshold=4, floor=3, experiment="vectors", round=7)
    dice, sent = random.Random(31), {"ada": 4, "bea": 3, "dora": 3, "eve": 2, "fay": 3}
    numbers = {n: {s.name: drawn(dice, s) for s in slots[:k]} for n, k in sent.items()}
    return agreed, numbers, {n: 10 + k for n, k in sent.items()}, {"fay": 2}


def draws_of(made: MixedRound) -> Json:
    """What each site has drawn, as the second implementation takes it."""
    found = dict[str, Json]()
    for name, store in made.stores.items():
        progress = store.read()
        assert progress is not None
        state = ClientRoundState(name, progress)
        count = made.terms.threshold - 1
        seeds = {g.name: state.self_mask_seed(g).hex() for g in state.groups_of(name)}
        coefficients = dict[str, list[str]]()
        for number in range(1 + len(seeds)):
            key = hkdf(progress.secret, progress.terms.digest, "shares", state.roster_digest)
            stream = KeyStream(hkdf(key, state.roster_digest, "coefficients", number))
            drawn = [int.from_bytes(stream.bytes(2 * KEY_SIZE)) % PRIME for _ in range(count)]
            coefficients[str(number)] = [hex(each) for each in drawn]
        found[name] = {
            **{"secret": progress.secret.hex(), "node": node_secret(name).hex()},
            **{"encryption": state.encryption_secret.hex(), "masking": state.masking_secret.hex()},
            **{"seeds": seeds, "coefficients": coefficients},
        }
    return found


def stored_round(patch: pytest.MonkeyPatch) -> Json:
    """The round of the vectors, by this package, with fixed secrets."""
    agreed, numbers, weights, gone = stored_terms()
    made = MixedRound(agreed, numbers, weights, [], gone)
    secrets = iter(hashlib.sha256(f"secret {n}".encode()).digest() for n in sorted(numbers))
    patch.setattr(os, "urandom", lambda count: next(secrets))
    opened = made.play()
    return {
        "rule": RULE,
        "terms": asdict(agreed) | {"digest": agreed.digest.hex()},
        "numbers": {n: {s: [*map(str, v)] for s, v in made.integers(n).items()} for n in numbers},
        "weights": weights,
        "drops_out_before_its_input": sorted(gone),
        "draws": draws_of(made),
        "roster": made.server.roster().digest.hex(),
        "context": made.server._context.hex(),
        "messages": made.messages,
        "opened": opened,
    }


def vectors() -> Json:
    return json.loads(FILE.read_text())


def test_the_stored_round_is_played_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert json.loads(json.dumps(stored_round(monkeypatch))) == vectors()


def test_the_second_implementation_says_the_same_to_the_bit() -> None:
    stored = vectors()
    agreed, numbers, weights, gone = stored_terms()
    made = MixedRound(agreed, numbers, weights, list(numbers), gone, stored["draws"])
    opened = made.play()
    assert json.loads(json.dumps(made.messages)) == stored["messages"]
    assert json.loads(json.dumps(opened)) == stored["opened"]
    assert opened["withheld"] == ["own"]
    sites = [name for name in numbers if name not in gone]
    for slot, sums in opened["sums"].items():
        sent = [made.integers(n)[slot] for n in sites if slot in numbers[n]]
        assert sums == [str(sum(column)) for column in zip(*sent, strict=True)]


@pytest.mark.parametrize("seed", range(12))
def test_sites_of_both_implementations_sum_together(seed: int) -> None:
    """Random federations with random sites of the second implementation and random dropouts."""
    dice = random.Random(seed)
    for _ in range(100):
        like = masked.federation(dice.randrange(2**32))
        wanted = masked.plain(like)
        if wanted is not None and len(like.numbers) > 2:
            break
    else:
        raise AssertionError("no federation opens")
    numbers = {n: dict(each) for n, each in like.numbers.items()}
    names = sorted(numbers)
    some = dice.sample(names, dice.randint(1, len(names)))
    made = MixedRound(like.terms, numbers, dict(like.weights), some, dict(like.gone))
    opened = made.play()
    sums, weights, closed = wanted
    assert opened["sums"] == {n: [*map(str, each)] for n, each in sums.items()}
    assert opened["weights"] == weights and opened["withheld"] == sorted(closed)


def test_both_complain_of_the_same_wrong_shares() -> None:
    agreed = masked.terms([Slot("body", 2)], threshold=3, floor=3)
    dice, names = random.Random(1), ["ada", "bea", "dora", "eve", "fay"]
    numbers = {n: {"body": drawn(dice, agreed.slots[0])} for n in names}
    made = MixedRound(agreed, numbers, dict.fromkeys(names, 1), ["ada"])
    calm = made.reply

    def reply(step: int, name: str, told: Any) -> Json:
        said = calm(step, name, told)
        if step == 1 and name == "eve":
            size = len(said["encrypted_shares"]["ada"])
            said["encrypted_shares"] |= dict.fromkeys(("ada", "bea"), "00" * (size // 2))
        return said

    made.reply = reply  # type: ignore[method-assign]
    opened = made.play()
    complaints = {n: each["complaints"] for n, each in made.messages["input"].items()}
    assert complaints == {"ada": ["eve"], "bea": ["eve"], "dora": [], "eve": [], "fay": []}
    sent = [made.integers(n)["body"] for n in names]
    assert opened["sums"]["body"] == [str(sum(column)) for column in zip(*sent, strict=True)]


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        FILE.write_text(json.dumps(stored_round(patch), indent=1) + "\n")
