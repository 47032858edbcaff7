# SPDX-License-Identifier: Apache-2.0
"""Executors: run the clients' turns of a round, in this process or in a pool of workers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.client_round import train_round
from fedplan.federation.error_codes import describe_code
from fedplan.federation.evaluation import Scores, evaluate_client, make_eval_request
from fedplan.federation.layer_scoring import score_layers
from fedplan.federation.messages import ClientStateMissing, Request, RequestRefused
from fedplan.federation.rounds import RoundState
from fedplan.federation.run_states import SiteState
from fedplan.federation.server import Server
from fedplan.federation.status import StatusReporter
from fedplan.models.params import Block
from fedplan.runners.clients import Clients
from fedplan.storage.failpoints import failpoint

Result = TypeVar("Result")


class Executor(Protocol):
    """Runs the clients' work of a round. Every executor gives the same bits."""

    def poll_layer_scores(
        self, round_state: RoundState, names: Sequence[str]
    ) -> dict[str, Mapping[Block, float]]:
        """Return the layer scores that each of these clients computes on its examples."""
        ...

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train these clients; add their updates, or why they are rejected, to `round_state`.

        Updates of clients in `late` are recorded, but not aggregated.
        """

    def evaluate_clients(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """Evaluate the models of the last round at these clients.

        Returns the scores by client, and the reason by client that refused.
        """
        ...

    def close(self) -> None:
        """Stop the workers, if there are any; the next call restarts them."""


class SerialExecutor:
    """Executor that runs one client after the other, in this process."""

    def __init__(self, server: Server, clients: Clients, status: StatusReporter) -> None:
        self.server, self.clients, self.status = server, clients, status

    def poll_layer_scores(
        self, round_state: RoundState, names: Sequence[str]
    ) -> dict[str, Mapping[Block, float]]:
        """Return each client's layer scores; see Executor."""
        return {name: self._call(score_layers, round_state, name) for name in names}

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train the clients in the order of `names`; see Executor."""
        for name in names:
            self.status.heartbeat()
            self.status.set_site_state(name, SiteState.ASKED)
            update = self._call(partial(train_round, copy=False), round_state, name)
            failpoint("round.answered")
            self.server.take(round_state, update, late=name in late)
            del update  # it aliases the model, which the next turn overwrites
            self.status.set_site_state(name, SiteState.ANSWERED)

    def evaluate_clients(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """Return scores and refusals of these clients; see Executor."""
        scores, refusals = dict[str, Scores](), dict[str, str]()
        for name in names:
            try:
                scores[name] = self._evaluate(name)
            except RequestRefused as error:
                refusals[name] = describe_code("refused", error.code)
        return scores, refusals

    def close(self) -> None:
        """Do nothing: there are no workers."""

    def _call(
        self,
        work: Callable[[Agreement, Client, Request], Result],
        round_state: RoundState,
        name: str,
    ) -> Result:
        """Run a client's work; after ClientStateMissing run it again with a full request."""
        client, agreement = self.clients[name], self.server.agreement
        try:
            return work(agreement, client, round_state.cohort[name])
        except ClientStateMissing:
            self.server.resend_all(round_state, name)
            return work(agreement, client, round_state.cohort[name])

    def _evaluate(self, name: str) -> Scores:
        agreement, client = self.server.agreement, self.clients[name]
        arguments = agreement, self.server.global_state, name, client.traits
        try:
            return evaluate_client(agreement, client, make_eval_request(*arguments))
        except ClientStateMissing:
            return evaluate_client(agreement, client, make_eval_request(*arguments, full=True))
