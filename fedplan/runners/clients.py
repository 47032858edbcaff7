# SPDX-License-Identifier: Apache-2.0
"""Clients of a simulation, made on access and not kept, and their simulated faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from fedplan import seeds
from fedplan.data.examples import Examples
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, ClientPrivacy, EvalSet, TrainSetup, make_example_guard
from fedplan.federation.global_state import GlobalState
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.privacy.guard import CHARGES_FILE, ClientGuard
from fedplan.storage.journal import Journal, client_state_folder, sync_journals
from fedplan.storage.locks import find_syncfs
from fedplan.studies.experiment import Experiment
from fedplan.studies.schema import Study
from fedplan.tensors.named import Tensors


@dataclass
class Clients(MutableMapping[str, Client]):
    """Mapping from client name to Client; every access builds a new Client, and none is kept.

    Only `pinned` Clients are reused: setting an item pins a Client, and deleting an item removes
    the client with the examples. `folder` is the run folder, with a journal (durable state) for
    each client; `keep_replies` stores replies there. Without `synced`, commits of clients that keep
    a state are durable only after `sync`, where the system can. `global_state()` returns the
    server's present state; Clients alias the state's tensors.
    """

    agreement: Agreement
    setup: TrainSetup
    examples: dict[str, Examples]
    folder: Path
    global_state: Callable[[], GlobalState]
    traits: Mapping[str, Mapping[str, str]] = field(default_factory=dict[str, Mapping[str, str]])
    eval_sets: Mapping[str, EvalSet | None] = field(default_factory=dict[str, "EvalSet | None"])
    examples_digests: Mapping[str, str] = field(default_factory=dict[str, str])
    keep_replies: bool = False
    synced: bool = True
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
        """Build the Client `name`, which has received global `values` of these `versions`."""
        examples = self.examples[name]
        digest = self.examples_digests.get(name)
        guard = make_example_guard(self.agreement, self._budget_folder(name))
        return Client(
            name=name,
            examples=examples,
            journal=self.journal(name),
            setup=self.setup,
            traits=dict(self.traits.get(name, {})),
            received=dict(values),
            received_versions=dict(versions),
            privacy=ClientPrivacy(guard=guard),
            eval_set=self.eval_sets.get(name),
            cached_digest=(examples, digest) if digest else None,
        )

    def journal(self, name: str) -> Journal:
        """Return a client's journal (durable state)."""
        if name in self.pinned:
            return self.pinned[name].journal
        return Journal(
            client_state_folder(self.folder, name),
            keep_replies=self.keep_replies,
            optional=self._keeps_nothing,
            synced=self._syncs_each,
        )

    @property
    def _keeps_nothing(self) -> bool:
        return not self.keep_replies and not self.agreement.clients_keep_state

    @property
    def _syncs_each(self) -> bool:
        return self.synced or self._keeps_nothing or find_syncfs() is None

    def sync(self) -> None:
        """Make all commits of journals durable, with one call for all of them."""
        if not self._syncs_each:
            sync_journals(self.folder)

    def _budget_folder(self, name: str) -> Path:
        return self.folder / "privacy" / client_state_folder(self.folder, name).name

    def epsilon_spent(self) -> float | None:
        """Return the largest epsilon that a client has spent; None without example-level DP."""
        guarantee = self.agreement.guarantee
        if guarantee is None or guarantee.unit != "example":
            return None
        folders = [f for f in map(self._budget_folder, self) if (f / CHARGES_FILE).exists()]
        return max((ClientGuard(guarantee, f).epsilon_spent for f in folders), default=0.0)

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


def make_train_setup(study: Study, experiment: Experiment, trial: Examples | None) -> TrainSetup:
    """Return the setup of a study's clients, with `trial` examples to test private training on."""
    model, agreement = experiment.model, experiment.agreement
    return TrainSetup(
        model=model,
        loss=experiment.data.task.loss,
        start=experiment.initial_values,
        initial=experiment.initial_model.with_checksums(model, agreement.frozen),
        deterministic=study.deterministic,
        activation_cache=study.train.activation_cache,
        trial_examples=trial,
    )


@dataclass(frozen=True)
class Faults:
    """Simulated faults of clients, drawn from the experiment's seed for each client and round.

    Probabilities to drop out of a round before training, and to reply too late.
    """

    dropped: float = 0.0
    late: float = 0.0

    def apply(self, server: Server, round_state: RoundState) -> set[str]:
        """Drop clients out of the server's next round, and return the names of late ones."""
        number, late = server.global_state.round + 1, set[str]()
        for name in list(round_state.cohort):
            generator = seeds.generator(server.agreement.experiment, "fate", number, name)
            drawn = torch.rand((), generator=generator, dtype=torch.float64).item()
            if drawn < self.dropped:
                del round_state.cohort[name]
                round_state.rejected[name] = "dropped"
            elif drawn < self.dropped + self.late:
                late.add(name)
        return late


def study_faults(study: Study) -> Faults:
    """Return the fault probabilities of a study."""
    return Faults(study.clients.dropout_fraction, study.clients.late_fraction)
