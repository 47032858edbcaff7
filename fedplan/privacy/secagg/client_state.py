# SPDX-License-Identifier: Apache-2.0
"""State of a client in a round, derived from its stored progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fedplan.privacy.secagg.masks import (
    GroupVector,
    apply_pairwise_mask,
    mask_context,
    pairwise_mask_keys,
    self_mask_key,
)
from fedplan.privacy.secagg.messages import KeyAdvert, KeyRoster, UnmaskShares, survivors_digest
from fedplan.privacy.secagg.round_progress import RoundProgress
from fedplan.privacy.secagg.round_secrets import RoundSecrets
from fedplan.privacy.secagg.terms import SlotGroup, Terms, group_slots
from fedplan.tensors.ring import Words


@dataclass(frozen=True)
class ClientRoundState:
    """Client `name` in a round; each property needs the progress up to its step."""

    name: str
    progress: RoundProgress

    @property
    def terms(self) -> Terms:
        """Terms of the round."""
        return self.progress.terms

    @cached_property
    def secrets(self) -> RoundSecrets:
        """The client's keys and seeds of the round."""
        return RoundSecrets(self.progress.secret, self.terms.digest)

    @cached_property
    def adverts(self) -> dict[str, KeyAdvert]:
        """Key adverts of the roster, by client."""
        return {advert.client: advert for advert in self.progress.adverts}

    @cached_property
    def roster_digest(self) -> bytes:
        """Digest of the roster."""
        return KeyRoster(self.terms.digest, self.progress.adverts).digest

    @cached_property
    def groups(self) -> tuple[SlotGroup, ...]:
        """Slots grouped by the clients that declared them."""
        slots = {advert.client: advert.slots for advert in self.progress.adverts}
        return group_slots(self.terms, slots)

    @cached_property
    def sharing(self) -> tuple[str, ...]:
        """Clients whose encrypted shares were forwarded, and this one, sorted."""
        return tuple(sorted((*self.progress.ciphertexts, self.name)))

    @cached_property
    def context(self) -> bytes:
        """Digest that all mask keys of the round depend on."""
        return mask_context(self.terms.digest, self.roster_digest, self.sharing)

    @property
    def survivors_digest(self) -> bytes:
        """Digest of the survivor list, which survivors sign."""
        return survivors_digest(self.context, self.progress.survivors)

    def groups_of(self, client: str) -> list[SlotGroup]:
        """Slot groups that a client declared."""
        return [group for group in self.groups if client in group.clients]

    def revealable_groups(self, clients: Sequence[str]) -> list[SlotGroup]:
        """Slot groups of which at least `min_senders` senders are among some clients."""
        least = self.terms.min_senders
        return [group for group in self.groups if len(group.senders_among(clients)) >= least]

    def senders_by_slot(self, clients: Sequence[str]) -> dict[str, tuple[str, ...]]:
        """Senders among some clients of each slot that these could unmask."""
        groups = self.revealable_groups(clients)
        return {slot.name: group.senders_among(clients) for group in groups for slot in group.slots}

    @cached_property
    def encrypted_shares(self) -> dict[str, bytes]:
        """This client's shares for each other client, encrypted to it."""
        return {
            client: self.secrets.encrypt_shares(
                self.name, advert, self.roster_digest, self._own_shares[client]
            )
            for client, advert in self.adverts.items()
            if client != self.name
        }

    @cached_property
    def _own_shares(self) -> dict[str, list[bytes]]:
        groups, clients = self.groups_of(self.name), list(self.adverts)
        return self.secrets.split(groups, clients, self.roster_digest, self.terms.threshold)

    def shares_of(self, client: str) -> list[bytes]:
        """This client's shares of a client's secrets: of its masking secret, then of each seed.

        Raises a SecAggError if they do not decrypt.
        """
        if client == self.name:
            return self._own_shares[client]
        return self.secrets.decrypt_shares(
            self.name,
            self.adverts[client],
            self.roster_digest,
            self.progress.ciphertexts[client],
            count=len(self.groups_of(client)) + 1,
        )

    def masked_vectors(self, numbers: Mapping[str, Words], weight: int) -> dict[str, bytes]:
        """This client's masked input for each of its groups that could be unmasked, by group name.

        numbers: the input by slot name.
        """
        groups = [g for g in self.revealable_groups(self.sharing) if self.name in g.clients]
        count = len(self.sharing)
        vectors = {group.name: GroupVector.of(group, numbers, weight, count) for group in groups}
        for group in groups:
            seed = self.secrets.self_mask_seed(group.name, self.roster_digest)
            vectors[group.name].add_mask(self_mask_key(seed, self.context, group.name, self.name))
        for client in self.sharing:
            common = [g.name for g in groups if client in g.clients and client != self.name]
            for name, key in self._pairwise_keys(client, common).items():
                apply_pairwise_mask(vectors[name], key, first=self.name < client)
        return {name: vectors.pop(name).to_bytes() for name in list(vectors)}  # frees each at once

    def _pairwise_keys(self, client: str, groups: Sequence[str]) -> dict[str, bytes]:
        """Keys of the pairwise masks with another client, by group name."""
        if not groups:
            return {}
        other = (client, self.adverts[client].masking_key)
        return pairwise_mask_keys(
            self.secrets.masking_secret, self.context, self.name, other, groups
        )

    def unmask_shares(self) -> UnmaskShares:
        """Shares that unmask the sum of the survivors: the message to the server.

        Shares of self mask seeds of survivors, and of masking secrets of clients that dropped out,
        both only for groups that are unmasked.
        """
        survivors, seeds = self.progress.survivors, dict[str, dict[str, bytes]]()
        shares = {client: self.shares_of(client) for client in self.sharing}
        dropped = set[str]()
        for group in self.revealable_groups(survivors):
            senders = group.senders_among(survivors)
            seeds[group.name] = {
                client: shares[client][1 + self.groups_of(client).index(group)]
                for client in senders
            }
            dropped |= set(group.senders_among(self.sharing)) - set(senders)
        keys = {client: shares[client][0] for client in sorted(dropped)}
        return UnmaskShares(self.terms.digest, self.name, seeds, keys)
