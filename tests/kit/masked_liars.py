# SPDX-License-Identifier: Apache-2.0
"""Masked rounds in which one site lies: what it does wrong, and what the server makes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from masked import directory, node, terms

from fedplan.secagg.client import ProtocolClient
from fedplan.secagg.client_state import ClientRoundState
from fedplan.secagg.config import SecAggConfig
from fedplan.secagg.crypto import secret_hash, share_hashes
from fedplan.secagg.messages import (
    EncryptedShares,
    MaskedInput,
    UnmaskShares,
    decode,
    encode,
    to_json,
)
from fedplan.secagg.progress import MemoryProgressStore
from fedplan.secagg.round import SecureRound
from fedplan.secagg.terms import Slot
from fedplan.tensors.message import Message

WRONG = (5).to_bytes(33)
Lie = Callable[["Liars", Any], Any]
"""Changes a message of the liar."""


@dataclass
class Liars:
    """Rounds of some sites, one of which, the liar, changes its message of one step.

    Site n sends the number 10**n, so that a sum shows who is in it. `sent` and `seconds` are the
    bytes of all replies and the time of sites and server.
    """

    count: int
    step: str
    lie: Lie
    numbers: int = 1
    sent: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.names = [f"site {n:02}" for n in range(self.count)]
        self.liar, self.honest = self.names[1], [n for n in self.names if n != self.names[1]]
        self.threshold = SecAggConfig("secure").resolve_threshold(self.count)
        self.agreed = terms([Slot("body", self.numbers)], threshold=self.threshold, floor=3)
        known = directory(self.names)
        self.stores = {name: MemoryProgressStore() for name in self.names}
        self.sites = {n: ProtocolClient(n, node(n), known, self.stores[n]) for n in self.names}

    def state(self) -> ClientRoundState:
        progress = self.stores[self.liar].read()
        assert progress is not None
        return ClientRoundState(self.liar, progress)

    def input(self, name: str) -> tuple[dict[str, Any], int]:
        value = 10 ** (self.names.index(name) % 15)
        return {"body": np.full(self.numbers, value, np.uint64)}, 1

    def play(self) -> SecureRound:
        """All attempts at the round."""
        drive = SecureRound(1, lambda attempt: replace(self.agreed, attempt=attempt), self.ask)
        start = time.process_time()
        while drive.begin_attempt():
            agreed = replace(self.agreed, attempt=drive.attempt)
            adverts = dict[str, Any]()
            for name, site in self.sites.items():
                try:
                    advert = site.advertise_keys(agreed, ["body"])
                except Exception:
                    continue
                adverts[name] = to_json(advert, agreed)
            drive.run_attempt(adverts, directory(self.names))
        self.seconds = time.process_time() - start
        return drive

    def ask(self, step: str, messages: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        for name, message in messages.items():
            try:
                reply = self.sites[name].answer(step, message, lambda name=name: self.input(name))
            except Exception:
                continue
            if name == self.liar and step == self.step:
                kinds: dict[str, Any] = {"share_keys": EncryptedShares, "unmask": UnmaskShares}
                said = decode(kinds.get(step, MaskedInput), reply)
                if (changed := self.lie(self, said)) is None:
                    continue
                reply = encode(self.agreed.run, changed)
            self.sent[step] = self.sent.get(step, 0) + reply.nbytes
            yield name, reply

    def expected(self, names: list[str]) -> int:
        return sum(int(self.input(name)[0]["body"][0]) for name in names)


def redealt(liars: Liars, said: EncryptedShares, wrong: list[str]) -> EncryptedShares:
    """Shares to some sites that are not those that the liar has committed to, in right boxes."""
    state, boxes = liars.state(), dict(said.ciphertexts)
    for name in wrong:
        shares = [WRONG] * len(said.secret_hashes)
        boxes[name] = state.encrypt_shares(name, shares, said.share_hashes[name])
    return replace(said, ciphertexts=boxes)


def recommitted(liars: Liars, said: EncryptedShares, *, secrets: bool) -> EncryptedShares:
    """Shares that match their hashes, and of no polynomial; or hashes of other secrets."""
    state = liars.state()
    if secrets:
        wrong = tuple(
            secret_hash(state.roster_digest, liars.liar, n, bytes(32))
            for n in range(len(said.secret_hashes))
        )
        return replace(said, secret_hashes=wrong)
    boxes, hashes = dict(said.ciphertexts), dict(said.share_hashes)
    for name in liars.honest:
        shares = [bytes([0, *name.encode().ljust(32)])] * len(said.secret_hashes)
        hashes[name] = share_hashes(state.roster_digest, liars.liar, name, shares)
        boxes[name] = state.encrypt_shares(name, shares, hashes[name])
    return replace(said, ciphertexts=boxes, share_hashes=hashes)


def wrong_seeds(liars: Liars, said: UnmaskShares) -> UnmaskShares:
    seeds = {g: dict.fromkeys(each, WRONG) for g, each in said.self_mask_shares.items()}
    return replace(said, self_mask_shares=seeds)


def one_wrong_seed(liars: Liars, said: UnmaskShares) -> UnmaskShares:
    """One bit of one share."""
    ((group, seeds),) = said.self_mask_shares.items()
    victim = liars.names[-1]
    changed = bytes([*seeds[victim][:-1], seeds[victim][-1] ^ 1])
    return replace(said, self_mask_shares={group: {**seeds, victim: changed}})


def no_seeds(liars: Liars, said: UnmaskShares) -> UnmaskShares:
    return replace(said, self_mask_shares={})


def one_missing(liars: Liars, said: UnmaskShares) -> UnmaskShares:
    ((group, seeds),) = said.self_mask_shares.items()
    less = {name: share for name, share in seeds.items() if name != liars.names[-1]}
    return replace(said, self_mask_shares={group: less})


def garbage_boxes(liars: Liars, said: EncryptedShares) -> EncryptedShares:
    """Boxes of the right size that nobody can open."""
    return replace(said, ciphertexts={n: bytes(len(b)) for n, b in said.ciphertexts.items()})


def short_boxes(liars: Liars, said: EncryptedShares) -> EncryptedShares:
    return replace(said, ciphertexts={n: b[:-1] for n, b in said.ciphertexts.items()})


def short_input(liars: Liars, said: MaskedInput) -> MaskedInput:
    return replace(said, vectors={name: each[:-8] for name, each in said.vectors.items()})


def false_complaints(liars: Liars, said: MaskedInput) -> MaskedInput:
    return replace(said, complaints=tuple(liars.honest))


def wrong_count(liars: Liars, said: MaskedInput) -> MaskedInput:
    vectors = dict[str, bytes]()
    for name, content in said.vectors.items():
        words = np.frombuffer(content, "<u8").copy()
        words[0] += np.uint64(1)
        vectors[name] = words.tobytes()
    return replace(said, vectors=vectors)


STILL_SUMMED: dict[str, tuple[str, Lie, str]] = {
    "wrong unmask shares": ("unmask", wrong_seeds, "wrong share of"),
    "one bit of one unmask share": ("unmask", one_wrong_seed, "wrong share of"),
    "no unmask shares": ("unmask", no_seeds, "no share of"),
    "one missing unmask share": ("unmask", one_missing, "no share of"),
    "one wrong dealt share": (
        "share_keys",
        lambda liars, said: redealt(liars, said, liars.names[:1]),
        "wrong shares, say site 00",
    ),
}
"""Lies after which the input of the liar is in the sum, which is opened from honest shares: the
step, the change, and what is said of the liar."""
LEFT_OUT: dict[str, tuple[str, Lie, str]] = {
    "wrong dealt shares": (
        "share_keys",
        lambda liars, said: redealt(liars, said, liars.honest),
        "dealt wrong shares",
    ),
    "boxes that nobody opens": ("share_keys", garbage_boxes, "dealt wrong shares"),
    "boxes of a wrong size": ("share_keys", short_boxes, "has not sent"),
    "no commitments": (
        "share_keys",
        lambda _, said: replace(said, share_hashes={}),
        "has not committed",
    ),
    "input of a wrong length": ("masked_input", short_input, "bytes and not"),
}
"""Lies after which the sum is opened without the liar."""
