# SPDX-License-Identifier: Apache-2.0
"""A whole secure aggregation round in one process, for simulations: same sums, no secrecy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedplan.privacy.secagg.client import ProtocolClient
from fedplan.privacy.secagg.crypto import node_public_key
from fedplan.privacy.secagg.round_progress import MemoryProgressStore
from fedplan.privacy.secagg.server import ProtocolServer, UnmaskedSums
from fedplan.privacy.secagg.terms import Terms
from fedplan.tensors.ring import Words


@dataclass(frozen=True)
class ClientInput:
    """Input of one client: its numbers by slot name, and its weight."""

    numbers: Mapping[str, Words]
    weight: int


def simulate_secagg_round(terms: Terms, inputs: Mapping[str, ClientInput]) -> UnmaskedSums:
    """Run all steps of a round in this process, with new keys; return the unmasked sums.

    inputs: numbers and weight of each client, by name; no client drops out. Raises a SecAggError if
    the number of clients does not suit the threshold, or an input does not suit the slots.
    """
    keys = {name: Ed25519PrivateKey.generate() for name in inputs}
    directory = {name: node_public_key(key) for name, key in keys.items()}
    clients = {
        name: ProtocolClient(name, keys[name], directory, MemoryProgressStore()) for name in inputs
    }
    server = ProtocolServer(terms, directory)
    for name, client in clients.items():
        server.accept_advert(client.advertise_keys(terms, list(inputs[name].numbers)))
    for client in clients.values():
        server.accept_shares(client.share_secrets(server.roster()))
    for name, client in clients.items():
        numbers, weight = inputs[name].numbers, inputs[name].weight
        server.add_masked_input(client.mask_input(server.shares_for(name), numbers, weight))
    for client in clients.values():
        server.accept_signature(client.sign_survivors(server.survivor_list()))
    for client in clients.values():
        server.accept_unmask_shares(client.reveal_shares(server.signature_list()))
    return server.unmask()
