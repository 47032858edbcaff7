# SPDX-License-Identifier: Apache-2.0
"""A federation on one machine: the server, its clients, and the executor that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedplan.data.examples import Examples, Loss, first_examples
from fedplan.data.score_counts import Counts
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import EvalSet, TrainSetup, load_client_state, require_private_setup
from fedplan.federation.evaluation import EvalConfig, Scores, SiteScores, combine_scores
from fedplan.federation.global_state import GlobalState, personal_values
from fedplan.federation.ledger.digests import InitialModel, digest_initial_model
from fedplan.federation.ledger.events import CommittedRound, RoundStarted
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.participation import Participation
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.language.predicates import Turn
from fedplan.models.values import get_values
from fedplan.runners.clients import Clients, Faults
from fedplan.runners.executors.executor import Executor, SerialExecutor
from fedplan.tensors.devices import move_model
from fedplan.training.activation_cache import ActivationCache
from fedplan.training.fit import ClientHook


class Federation:
    """A server and its clients on one machine; the constructor opens or resumes a run in `folder`.

    For each round call `run_round`, optionally `evaluate`, then `commit`. `examples` are by client;
    a client in `names` without examples never replies. `model` is used in place and moved to
    `device`; the values of the global state stay in host memory. `deterministic` makes PyTorch fail
    where no deterministic kernel exists. `start` and `initial_model` are the model's initial values
    and digests, computed if None. `make_executor` makes the executor of clients (default:
    SerialExecutor). `spread` trains turns on several devices. `synced`: whether each turn of a
    client is durable at once, as clients on several machines need; else `commit` makes all so.
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
        deterministic: bool = TrainSetup.deterministic,
        eval_sets: Mapping[str, EvalSet | None] | None = None,
        events: EventStream | None = None,
        make_executor: Callable[[Server, Clients, EventStream], Executor] | None = None,
        start: Mapping[str, Tensor] | None = None,
        initial_model: InitialModel | None = None,
        activation_cache: ActivationCache | None = None,
        spread: ClientHook | None = None,
    ) -> None:
        self.events = events or EventStream()
        start = get_values(model, agreement.trainable) if start is None else start
        initial_model = initial_model or digest_initial_model(model, agreement.params, start)
        self.model = move_model(model.eval(), device) if device else model.eval()
        self.faults = faults or Faults()
        roster = {name: dict((traits or {}).get(name, {})) for name in names or examples}
        self.server = server = Server(
            agreement,
            start,
            folder,
            rounds=rounds,
            roster=roster,
            participation=participation,
            start_digests=initial_model.short_digests,
            examples_digests=examples_digests,
        )
        del start
        self.clients = Clients(
            agreement=self.server.agreement,
            setup=TrainSetup(
                model=self.model,
                loss=loss,
                start=self.server.start,
                initial=initial_model.with_checksums(self.model, self.agreement.frozen),
                digests=self.server.digests,
                deterministic=deterministic,
                activation_cache=activation_cache,
                trial_examples=first_examples(examples.values()),
                spread=spread,
            ),
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
