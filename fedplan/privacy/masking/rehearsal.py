# SPDX-License-Identifier: Apache-2.0
"""Rehearsals: a whole masked round in one process, which hides nothing and adds up the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedplan.privacy.masking.ciphers import node_public
from fedplan.privacy.masking.diary import Unwritten
from fedplan.privacy.masking.server import MaskingServer, Opened
from fedplan.privacy.masking.site import MaskingSite
from fedplan.privacy.masking.terms import Terms
from fedplan.tensors.modular import Words


@dataclass(frozen=True)
class Contribution:
    """What one site would mask: its numbers by slot, and its weight."""

    numbers: Mapping[str, Words]
    weight: int


def rehearsed(terms: Terms, held: Mapping[str, Contribution]) -> Opened:
    """Every step of a round, by sites whose keys are drawn for it; none of them is lost."""
    keys = {name: Ed25519PrivateKey.generate() for name in held}
    known = {name: node_public(key) for name, key in keys.items()}
    sites = {name: MaskingSite(name, keys[name], known, Unwritten()) for name in held}
    server = MaskingServer(terms, known)
    for name, site in sites.items():
        server.advertised(site.advertise(terms, list(held[name].numbers)))
    for site in sites.values():
        server.shared(site.share(server.adverts()))
    for name, site in sites.items():
        own = held[name]
        server.add(site.mask(server.delivery(name), own.numbers, own.weight))
    for site in sites.values():
        server.consented(site.consent(server.survivors()))
    for site in sites.values():
        server.answered(site.answer(server.consents()))
    return server.open()
