# SPDX-License-Identifier: Apache-2.0
"""A federation on one machine: the server, its clients with simulated faults, and an executor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedplan import seeds
from fedplan.data.examples import Examples, Loss, first_examples
from fedplan.data.score_counts import Counts
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import (
    Client,
    ClientPrivacy,
    EvalSet,
    TrainSetup,
    load_client_state,
    make_example_guard,
    require_private_setup,
)
from fedplan.federation.evaluation import EvalConfig, Scores, SiteScores, combine_scores
from fedplan.federation.global_state import GlobalState, personal_values
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.events import CommittedRound, RoundStarted
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Participation
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.language.predicates import Turn
from fedplan.models.values import get_values
from fedplan.privacy.guard import CHARGES_FILE, ClientGuard
from fedplan.runners.executors.executor import Executor, SerialExecutor
from fedplan.storage.journal import Journal, client_state_folder, sync_journals
from fedplan.storage.locks import find_syncfs
from fedplan.studies.experiment import Experiment
from fedplan.studies.schema import Study
from fedplan.tensors.devices import move_model
from fedplan.tensors.named import Tensors
from fedplan.training.activation_cache import ActivationCache


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


class Federation:
    """A server and its clients on one machine; the constructor opens or resumes a run in `folder`.

    For each round call `run_round`, optionally `evaluate`, then `commit`. `examples` are by client;
    a client in `names` without examples never replies. `model` is used in place and moved to
    `device`; the values of the global state stay in host memory. `setup`: how the clients train
    this model, made of `model`, `loss` and `activation_cache` if None. `make_executor` makes the
    executor of clients (default: SerialExecutor). `synced`: whether each turn of a client is
    durable at once, as clients on several machines need; else `commit` makes all so.
    """

    def __init__(
        self,
        agreement: Agreement,
        model: nn.Module,
        examples: Mapping[str, Examples],
        loss: Loss,
        folder: Path,
        *,
        rounds: int,
        participation: Participation | None = None,
        faults: Faults | None = None,
        traits: Mapping[str, Mapping[str, str]] | None = None,
        names: Iterable[str] = (),
        keep_replies: bool = False,
        synced: bool = False,
        examples_digests: Mapping[str, str] | None = None,
        device: torch.device | None = None,
        eval_sets: Mapping[str, EvalSet | None] | None = None,
        events: EventStream | None = None,
        make_executor: Callable[[Server, Clients, EventStream], Executor] | None = None,
        activation_cache: ActivationCache | None = None,
        setup: TrainSetup | None = None,
    ) -> None:
        self.events = events or EventStream()
        if setup is None:
            start = get_values(model, agreement.trainable)
            initial = digest_initial_model(model, agreement.params, start)
            model = move_model(model.eval(), device) if device else model.eval()
            setup = TrainSetup(
                model=model,
                loss=loss,
                start=start,
                initial=initial.with_checksums(model, agreement.frozen),
                activation_cache=activation_cache,
                trial_examples=first_examples(examples.values()),
            )
        self.model, self.faults = setup.model, faults or Faults()
        roster = {name: dict((traits or {}).get(name, {})) for name in names or examples}
        self.server = server = Server(
            agreement,
            setup.start,
            folder,
            rounds=rounds,
            roster=roster,
            participation=participation,
            start_digests=setup.initial.short_digests,
            examples_digests=examples_digests,
        )
        self.clients = Clients(
            agreement=self.server.agreement,
            # The server removes values from its `start` as soon as they are not needed.
            setup=replace(setup, start=server.start, digests=server.digests),
            examples=dict(examples),
            folder=folder,
            # Not `self.server`: a reference cycle would keep the folder locked after deletion.
            global_state=lambda: server.global_state,
            traits=roster,
            eval_sets=eval_sets or {},
            examples_digests=examples_digests or {},
            keep_replies=keep_replies,
            synced=synced,
        )
        require_private_setup(agreement, self.clients.setup)
        make_executor = make_executor or SerialExecutor
        self.executor: Executor = make_executor(self.server, self.clients, self.events)

    @property
    def agreement(self) -> Agreement:
        """Agreement of server and clients."""
        return self.server.agreement

    @property
    def global_state(self) -> GlobalState:
        """Present global state: values and versions of the shared params."""
        return self.server.global_state

    def run_round(self) -> RoundState:
        """Run the next round; nothing of the server is on disk before `commit` of it."""
        round_state = self.server.begin_round()
        late = self.faults.apply(self.server, round_state)
        self.poll_clients(round_state)
        absent = round_state.cohort.keys() - self.clients.keys()
        round_state.rejected |= {name: "no answer" for name in absent}
        present = [name for name in round_state.cohort if name in self.clients]
        self.events.emit(RoundStarted(len(present)))
        self.executor.run_turns(round_state, present, late)
        self.server.close_round(round_state)
        return round_state

    def evaluate(self) -> tuple[dict[str, SiteScores], dict[str, str]]:
        """Evaluate the last round's models; return scores, and reasons for none, by client."""
        present = [name for name in self.server.roster if name in self.clients]
        scores, failures = self.executor.evaluate_clients(present)
        absent = [name for name in self.server.roster if name not in self.clients]
        return scores, failures | dict.fromkeys(absent, "no answer")

    def joint_scores(self, scoring: EvalConfig) -> tuple[dict[str, Any], dict[str, Scores]]:
        """Evaluate at all clients; return scores of all, and by client unless they send counts."""
        answers, failures = self.evaluate()
        if (vector := scoring.vector) is None:
            scores = cast("dict[str, Scores]", answers)
            return combine_scores(scores, failures, scoring), scores
        counts = {name: vector.from_json(each) for name, each in answers.items()}
        total: Counts | None = sum(counts.values(), np.zeros(vector.size, np.int64))
        if self.agreement.secagg.active:
            from fedplan.federation.aggregation.secure import (  # optional dependency
                open_counts_sum,
            )

            clients = len(self.server.roster)
            secure_sum = open_counts_sum(self.agreement, self.global_state, clients, vector.size)
            secure_sum.simulate(counts)
            total = secure_sum.counts
            if secure_sum.failure:
                failures |= dict.fromkeys(counts, f"not summed: {secure_sum.failure}")
        return vector.combine(total, counts, failures), {}

    def commit(
        self,
        round_state: RoundState,
        scores: Mapping[str, Any] | None = None,
        signs: Mapping[str, Any] | None = None,
    ) -> CommittedRound:
        """Write a round of `run_round` to ledger, metrics and checkpoint; see Server.

        What the round has written for its clients is made durable before.
        """
        self.clients.sync()
        return self.server.commit(round_state, scores, signs)

    def poll_clients(self, round_state: RoundState) -> None:
        """Let the clients of a round choose blocks together, if the plan has a joint choice."""
        voters = self.server.voters(round_state)
        if voters is not None:
            present = [name for name in voters if name in self.clients]
            layer_scores = self.executor.poll_layer_scores(round_state, present)
            self.server.choose_blocks(round_state, layer_scores)

    @property
    def epsilon_spent(self) -> float | None:
        """Epsilon spent: the run's, or the largest of a client; None without DP."""
        guard = self.server.aggregation.guard
        return guard.epsilon_spent if guard else self.clients.epsilon_spent()

    def global_values(self) -> dict[str, Tensor]:
        """Return the global model's values, with initial values for personal params."""
        return self.server.global_values()

    def personal_values(self, name: str) -> dict[str, Tensor]:
        """Return all trainable values of client `name`: its own for personal params, or the global.

        Personal params of a client that has not trained yet have the initial values.
        """
        state, journal = self.global_state, self.clients.journal(name)
        client_state, _ = load_client_state(journal, name, state.last_round_of(name))
        turn = Turn(state.round, name, state.phase, self.server.roster[name])
        return personal_values(self.agreement, state, self.server.start, turn, client_state)


def with_task(closed: CommittedRound, scoring: EvalConfig) -> CommittedRound:
    """Return a committed round with the task's primary metric and directions, for callbacks."""
    return replace(
        closed,
        primary=scoring.primary,
        higher_is_better=scoring.higher_is_better,
        directions=scoring.directions,
    )
