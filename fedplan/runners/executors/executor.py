# SPDX-License-Identifier: Apache-2.0
"""The interface of executors, the settings of a pool, and the executor of this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client
from fedplan.federation.client_round import keep_rejected_turn, score_layers, train_round
from fedplan.federation.edges import accept_sum, open_edge_round, report_sum
from fedplan.federation.evaluation import SiteScores, evaluate_client, make_eval_request
from fedplan.federation.ledger.events import ClientChanged
from fedplan.federation.ledger.faults import describe_code
from fedplan.federation.ledger.status import SiteState
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.messages import ClientStateMissing, Request, RequestRefused
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.models.params import Block
from fedplan.storage.files import failpoint
from fedplan.studies.schema import ConfigError
from fedplan.tensors.devices import device_count, resolve_device

if TYPE_CHECKING:
    from fedplan.runners.local import Clients

Result = TypeVar("Result")
LOCAL, POOL, RAY = "local", "pool", "ray"
"""Runners: this process, worker processes on this machine, Ray actors."""


@dataclass(frozen=True)
class PoolConfig:
    """Settings of a worker pool, on which the result of a run does not depend.

    A `count` of 0 means one worker per card, or without cards the available cores divided by the
    threads per worker. `gpus` is the number (or fraction) of GPUs per Ray worker, `address` the
    address of a Ray cluster; an empty address starts Ray on this machine.
    """

    runner: str = POOL
    count: int = 0
    gpus: float = 0.0
    address: str = ""

    def worker_count(self, threads: int, device: str) -> int:
        """Return the number of workers on a device; one with an index, as "cuda:1", is one card."""
        resolved = resolve_device(device)
        if cards := device_count(resolved.type):
            return self.count or (1 if ":" in str(resolved) else cards)
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        return self.count or max(1, cores // threads)


def make_pool_config(
    runner: str, count: int | None = None, gpus: float = 0.0, address: str = ""
) -> PoolConfig | None:
    """Return a pool's settings, None for "local"; ConfigError if an argument does not apply."""
    if runner == LOCAL:
        if count or gpus or address:
            option = "workers" if count else "gpus_per_worker" if gpus else "ray_address"
            raise ConfigError(f"{option} does not apply to runner {LOCAL}: use {POOL} or {RAY}")
        return None
    if runner not in (POOL, RAY):
        raise ConfigError(f"the runner is {runner!r}: use {LOCAL}, {POOL} or {RAY}")
    if count is not None and count < 1:
        raise ConfigError(f"workers is {count}: give at least 1, or leave it out")
    if gpus < 0:
        raise ConfigError(f"gpus_per_worker is {gpus}: give a larger number")
    if runner == POOL and (gpus or address):
        option = "gpus_per_worker" if gpus else "ray_address"
        raise ConfigError(f"{option} is for Ray: use runner {RAY}, or leave it out")
    return PoolConfig(runner, count or 0, gpus, address)


class Executor(Protocol):
    """Runs the clients of a round, by any way to the same bits; FedplanError if one fails."""

    def poll_layer_scores(
        self, round_state: RoundState, names: Sequence[str]
    ) -> dict[str, Mapping[Block, float]]:
        """Return the layer scores that each client of `names` computes, by its request."""
        ...

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train the clients `names` by their requests in `round_state.cohort`.

        Adds each update, or the reason of a rejection, to `round_state`; updates of `late` clients
        are recorded, but not aggregated.
        """

    def evaluate_clients(
        self, names: Sequence[str]
    ) -> tuple[dict[str, SiteScores], dict[str, str]]:
        """Evaluate the models of the last round; return scores and refusals by client."""
        ...

    def close(self) -> None:
        """Stop the workers, if there are any; the next call restarts them."""


class SerialExecutor:
    """Executor that runs one client after the other in this process."""

    def __init__(self, server: Server, clients: Clients, events: EventStream) -> None:
        self.server, self.clients, self.events = server, clients, events

    def poll_layer_scores(
        self, round_state: RoundState, names: Sequence[str]
    ) -> dict[str, Mapping[Block, float]]:
        return {name: self._call(score_layers, round_state, name) for name in names}

    def run_turns(
        self, round_state: RoundState, names: Sequence[str], late: Collection[str]
    ) -> None:
        """Train the clients in the order of `names`; add each update to its sum at once.

        That is the round's, or the one of the client's edge, merged into the round's at the end.
        """
        participation = self.server.aggregation.participation
        edge_of, main = participation.edge_of, round_state
        edges = {edge: [n for n in names if edge_of.get(n) == edge] for edge in participation.edges}
        rounds = {e: open_edge_round(main, participation.edges[e]) for e in edges if edges[e]}
        for name in names:
            round_state = rounds.get(edge_of.get(name, ""), main)
            self.events.heartbeat()
            self.events.emit(ClientChanged(name, SiteState.REQUESTED))
            update = self._call(partial(train_round, copy=False), round_state, name)
            failpoint("round.answered")
            self.server.take(round_state, update, late=name in late)
            if name not in round_state.records:
                keep_rejected_turn(self.clients.journal(name), update)
            del update  # it aliases the model, which the next turn overwrites
            self.events.emit(ClientChanged(name, SiteState.RESPONDED))
        for edge, edge_round in rounds.items():
            accept_sum(self.server, main, edge, *report_sum(edge_round, edges[edge]))

    def evaluate_clients(
        self, names: Sequence[str]
    ) -> tuple[dict[str, SiteScores], dict[str, str]]:
        scores, refusals = dict[str, SiteScores](), dict[str, str]()
        agreement, state = self.server.agreement, self.server.global_state
        for name in names:
            try:
                client = self.clients[name]
                make = partial(make_eval_request, agreement, state, name, client.traits)
                try:
                    scores[name] = evaluate_client(agreement, client, make())
                except ClientStateMissing:
                    scores[name] = evaluate_client(agreement, client, make(full=True))
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
        """Return the result of `work` for a client; again, by a full request, if it lost state."""
        client, agreement = self.clients[name], self.server.agreement
        try:
            return work(agreement, client, round_state.cohort[name])
        except ClientStateMissing:
            self.server.resend_all(round_state, name)
            return work(agreement, client, round_state.cohort[name])
