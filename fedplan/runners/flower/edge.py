# SPDX-License-Identifier: Apache-2.0
"""An edge: a site to the server above, and the server of the sites below, without data of its own.

The server above sends the requests of a round to all sites of the edge in one message. The edge
passes them on, validates and sums the updates as a server does, and replies with one sum and the
record of each update. It keeps nothing on disk: after a restart it asks again, and each site gives
the reply that it has stored.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

from flwr.serverapp import Grid

from fedplan.federation.edges import read_edge_request, report_sum, sum_message
from fedplan.federation.endpoint import HELLO, TRAIN
from fedplan.federation.identity import is_run_id
from fedplan.federation.ledger.egress import content_digest
from fedplan.federation.ledger.faults import error_code_of, error_fields
from fedplan.federation.messages import RequestRefused, local_versions
from fedplan.federation.participation import Timeouts
from fedplan.federation.rounds import RoundState
from fedplan.federation.server import Server
from fedplan.models.layer_maps import restore_layer_maps
from fedplan.naming import allow_imports
from fedplan.runners.flower._internals import TaskIdentity
from fedplan.runners.flower.server import ServerLoop
from fedplan.runners.flower.superlink import SuperLink, flower_runs
from fedplan.runners.flower.supernode import run_supernode, serve_tasks
from fedplan.runners.site import Site
from fedplan.studies.experiment import build_experiment
from fedplan.studies.schema import Study, study_from_dict
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import JSON, pack_message, unpack_message

log = logging.getLogger("fedplan")
IDENTITY = ("task_id", "run_id", "node_id")
"""What Flower writes into each message that a task sends."""


class Edge:
    """The edge `site` of any study that names it; `answer` replies to the server above.

    `folder` is for temporary files. `open_grid` starts a Flower run of the sites below, and returns
    its grid. `registered_names` returns the names of the sites that are registered there; no others
    are waited for.
    """

    def __init__(
        self,
        site: Site,
        folder: Path,
        open_grid: Callable[[], Grid],
        registered_names: Callable[[], Iterable[str]] | None = None,
    ) -> None:
        self.site, self.folder = site, folder
        self.open_grid, self.registered_names = open_grid, registered_names
        self._opened: tuple[tuple[str, str], ServerLoop] | None = None
        self._last_answer: tuple[str, Message] | None = None

    def answer(self, kind: str, message: Message) -> Message:
        """Return the reply to a request of a kind, HELLO or TRAIN; of an exception its code."""
        with allow_imports(self.site.allow_packages), restore_layer_maps():
            try:
                fields = unpack_message(Message(message.header))[1]
                if kind not in (HELLO, TRAIN):
                    raise RequestRefused("an edge only trains").with_code("unknown-request")
                loop = self._open(fields)
                if kind == TRAIN:
                    return self._train(loop, message, fields)
                loop.rpc.wait_for_sites(0)
                agreement = loop.server.agreement
                hello: dict[str, JSON] = {
                    "client": self.site.name,
                    "agreement": agreement.fingerprint,
                    "start": agreement.start,
                    "run": agreement.run,
                    "traits": {},
                    "versions": dict(local_versions()),
                }
                return pack_message({}, hello)
            except Exception as error:
                log.exception("a request of the server above failed")
                return pack_message({}, {**error_fields(error_code_of(error))})

    def _open(self, fields: dict[str, Any]) -> ServerLoop:
        """Return the server of the sites below, for the run and the study in these fields."""
        run, offered = fields.get("run"), fields.get("study")
        if not is_run_id(run) or not isinstance(offered, dict):
            raise RequestRefused("the request has no run and study").with_code("another-study")
        study = study_from_dict(offered)
        key = str(run), study.full_digest
        if self._opened is None or self._opened[0] != key:
            self._opened = self._last_answer = None  # before another model is built
            self._opened = key, self._make_loop(str(run), study)
        return self._opened[1]

    def _make_loop(self, run: str, study: Study) -> ServerLoop:
        if self.site.name not in study.clients.edges:
            raise RequestRefused(f"{self.site.name} is no edge of the study").with_code(
                "another-study"
            )
        experiment = build_experiment(study)
        # What a server must keep is kept above: this one never commits a round.
        server = Server(
            replace(experiment.pinned_agreement, run=run),
            experiment.initial_values,
            Path(mkdtemp(dir=self.folder)),
            rounds=study.train.rounds,
            roster={
                name: study.clients.traits.get(name, {})
                for name in study.clients.edges[self.site.name]
            },
            start_digests=experiment.param_digests,
        )
        timeouts = Timeouts(**study.timeouts.model_dump())
        # The server above waits for as long as the study says, and then goes on without the edge.
        timeouts = replace(timeouts, sites=timeouts.sites / 2, updates=timeouts.updates / 2)
        loop = ServerLoop(None, server, timeouts, quorum=0, study=study, is_edge=True)
        loop.rpc.renew_grid, loop.rpc.registered_names = self.open_grid, self.registered_names
        return loop

    def _train(self, loop: ServerLoop, message: Message, fields: dict[str, Any]) -> Message:
        """Collect the updates of a round from the sites below, and return their sum."""
        digest = content_digest(message)
        if self._last_answer is not None and self._last_answer[0] == digest:
            return self._last_answer[1]  # the reply was lost
        server, self._last_answer = loop.server, None
        server.global_state, cohort = read_edge_request(message, server.global_state)
        if unknown := cohort.keys() - server.roster.keys():
            raise RequestRefused(f"{min(unknown)} is not below this edge").with_code(
                "another-study"
            )
        server.digests.keep_only(server.global_state.values.values())
        aggregator = server.aggregation.open_round(server.global_state, dict, len(server.roster))
        edge_round = RoundState(
            cohort, aggregator, start_digests=server.start_digests, digests=server.digests
        )
        loop.late = {name for name in fields.get("late", []) if name in cohort}
        loop.rpc.sent.clear()
        if not loop.rpc.sites:
            loop.rpc.wait_for_sites(0)
        loop.update_roster()
        loop.collect_updates(edge_round)
        number, count = server.global_state.round + 1, len(edge_round.aggregated)
        log.info("round %d: a sum of %d updates goes up", number, count)
        answer = sum_message(*report_sum(edge_round, loop.rpc.sent))
        if len(edge_round.records) == len(cohort):  # else the server may ask again for the others
            self._last_answer = digest, answer
        return answer


def serve_edge(link: SuperLink, site: Site) -> None:
    """Serve an edge until SIGTERM or SIGINT; sets their handlers.

    `link`: the SuperLink of the sites below. `site`: name of the edge, and the server above.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    identity, stop = dict[str, int](), threading.Event()
    temporary = TemporaryDirectory(prefix="fedplan-edge-")
    with suppress(KeyboardInterrupt), temporary as folder, flower_runs(link) as renew_grid:

        def open_grid() -> Grid:
            grid = renew_grid()
            identity.update({name: getattr(TaskIdentity, name) for name in IDENTITY})
            return grid

        def answer(kind: str, message: Message) -> Message:
            # Flower has one identity in a process: the task from above has just taken it.
            for name, number in identity.items():
                setattr(TaskIdentity, name, number)
            return edge.answer(kind, message)

        edge = Edge(site, Path(folder), open_grid, link.registered_names)
        with run_supernode(site, stop) as api:
            serve_tasks(api, answer, stop)
