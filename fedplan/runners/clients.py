# SPDX-License-Identifier: Apache-2.0
"""Clients of a simulation, made on access and not kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, make_example_guard
from fedplan.federation.eval_sets import EvalSet
from fedplan.federation.global_state import GlobalState
from fedplan.federation.initial_model import InitialModel
from fedplan.privacy.guard import CHARGES_FILE, ClientGuard
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.tensors.named import DigestCache, Tensors
from fedplan.training.activation_cache import ActivationCache


@dataclass
class Clients(MutableMapping[str, Client]):
    """Lazy mapping from name to Client: each access makes a new Client, except for `pinned` ones.

    A client's received values alias the tensors of the present global state, so no older state
    stays in memory. `start` are the model's initial values, `model_digests` their digests,
    `initial_model` digests of the whole model. `global_state` returns the server's present state.
    `examples_digests` has the digests of clients' examples, where they are known. Setting an item
    pins a Client.
    """

    agreement: Agreement
    model: nn.Module
    examples: dict[str, Examples]
    loss: Loss
    folder: Path
    start: dict[str, Tensor]
    model_digests: dict[str, str]
    digests: DigestCache
    global_state: Callable[[], GlobalState]
    traits: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    eval_sets: Mapping[str, EvalSet | None] = field(default_factory=dict[str, "EvalSet | None"])
    examples_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    keep_replies: bool = False
    deterministic: bool = Client.deterministic
    initial_model: InitialModel | None = None
    activation_cache: ActivationCache | None = None
    pinned: dict[str, Client] = field(default_factory=dict[str, Client])

    def __getitem__(self, name: str) -> Client:
        """Make the client, with the values of the present global state that it already has."""
        if name in self.pinned:
            return self.pinned[name]
        global_state = self.global_state()
        client_versions = global_state.versions_of(name).items()
        current = {key: n for key, n in client_versions if n == global_state.versions[key]}
        return self.make_client(name, {key: global_state.values[key] for key in current}, current)

    def make_client(self, name: str, values: Tensors, versions: Mapping[str, int]) -> Client:
        """Make a client that has received these global values, of these versions."""
        examples = self.examples[name]
        digest = self.examples_digests.get(name)
        return Client(
            name=name,
            examples=examples,
            journal=self.journal(name),
            model=self.model,
            start=self.start,
            start_digests=self.model_digests,
            loss=self.loss,
            traits=dict(self.traits.get(name, {})),
            received=dict(values),
            received_versions=dict(versions),
            digests=self.digests,
            guard=make_example_guard(self.agreement, self._budget_folder(name)),
            deterministic=self.deterministic,
            eval_set=self.eval_sets.get(name),
            cached_digest=(examples, digest) if digest else None,
            initial_model=self.initial_model,
            activation_cache=self.activation_cache,
        )

    def journal(self, name: str) -> Journal:
        """Return a client's journal."""
        if name in self.pinned:
            return self.pinned[name].journal
        return Journal(client_state_folder(self.folder, name), keep_replies=self.keep_replies)

    def _budget_folder(self, name: str) -> Path:
        return self.folder / "privacy" / client_state_folder(self.folder, name).name

    def epsilon_spent(self) -> float | None:
        """Return the largest epsilon spent by a client; None without example-level DP."""
        guarantee = self.agreement.guarantee
        if guarantee is None or guarantee.unit != "example":
            return None
        folders = (
            self._budget_folder(n) for n in self if (self._budget_folder(n) / CHARGES_FILE).exists()
        )
        return max(
            (ClientGuard(guarantee, folder).epsilon_spent for folder in folders), default=0.0
        )

    def __setitem__(self, name: str, client: Client) -> None:
        self.pinned[name], self.examples[name] = client, client.examples

    def __delitem__(self, name: str) -> None:
        del self.examples[name]
        self.pinned.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.examples)

    def __len__(self) -> int:
        return len(self.examples)

    def __contains__(self, name: object) -> bool:
        return name in self.examples
