# SPDX-License-Identifier: Apache-2.0
"""The server's round loop on Flower's grid: send requests, aggregate replies, commit."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.serverapp import Grid

from fedplan.errors import FedplanError, PrivacyError, printable
from fedplan.federation.edges import accept_sum, edge_request_message, read_sum, sum_limit
from fedplan.federation.endpoint import COMMITTED_ROUND, EVALUATED_ROUND
from fedplan.federation.evaluation import EvalConfig, Scores, join_validation
from fedplan.federation.ledger.events import (
    Callback,
    ClientChanged,
    CommittedRound,
    Notice,
    RoundStarted,
    RunChanged,
)
from fedplan.federation.ledger.status import RunState, SiteState, site_state_from_reason
from fedplan.federation.ledger.stream import EventStream
from fedplan.federation.messages import (
    Request,
    block_scores_from_json,
    package_differences,
    protocol_mismatch,
    read_update,
    request_header,
    request_message,
)
from fedplan.federation.participation import Timeouts
from fedplan.federation.rounds import RoundState, accept_masked_report
from fedplan.federation.server import Server
from fedplan.runners.flower.records import (
    BlobRecord,
    ConnectedSite,
    refusal_text,
    reply_fields,
    to_blob_record,
)
from fedplan.runners.flower.rpc import BATCH_BYTES, MessageFactory, SiteRpc
from fedplan.runners.flower.site_evaluation import SiteEvaluation
from fedplan.runners.local import Faults, with_task
from fedplan.studies.schema import Study
from fedplan.tensors.message import Message
from fedplan.tensors.named import Tensors, nbytes
from fedplan.tensors.serialization import JSON, pack_message

log = logging.getLogger("fedplan")
POLL = "query.poll"
"""Kind of the requests for layer scores."""
GlobalTest = Callable[[Tensors], dict[str, float]]
"""Metrics of the global values on a common set."""


class ServerLoop:
    """The rounds of a `server` with sites on a Flower `grid`: construct, then call `run` once.

    Without a `grid`, `rpc.renew_grid` gives the first. A round waits for all sites until a timeout
    of `timeouts`, and closes with at least `quorum` updates. A site with another study or initial
    model gets no requests. An edge gets the requests to its clients in one message, and replies
    with one sum of their updates. `is_edge`: this server is one, so only `update_roster` and
    `collect_updates` are called, with requests of the server above. `tests` evaluate the global
    values here. Raises PrivacyError for a quorum above 1 under client-level DP.
    """

    def __init__(
        self,
        grid: Grid | None,
        server: Server,
        timeouts: Timeouts | None = None,
        *,
        quorum: int = 1,
        faults: Faults | None = None,
        callbacks: Sequence[Callback] = (),
        scoring: EvalConfig | None = None,
        tests: Mapping[str, GlobalTest] | None = None,
        study: Study | None = None,
        events: EventStream | None = None,
        is_edge: bool = False,
    ) -> None:
        if server.aggregation.hides_clients and quorum > 1:
            raise PrivacyError(
                f"clients.min_updates is {quorum}, and this run has client-level privacy: "
                "a round that fails by its quorum reveals absent clients; "
                "leave clients.min_updates out"
            )
        participation = server.aggregation.participation
        # With client-level DP a round closes with any number of updates, even none.
        self.server, self.quorum = server, 0 if server.aggregation.hides_clients else quorum
        self._is_edge = is_edge
        self._study, self.scoring, self.tests = study, scoring or EvalConfig(), tests or {}
        self.edges, self._edge_of = participation.edges, participation.edge_of
        names = [*self.edges, *(name for name in server.roster if name not in self._edge_of)]
        self.rpc = SiteRpc(grid, names, timeouts or Timeouts(), self._hello())
        self._update_limit = 2 * nbytes(server.global_state.values) + 2**22
        # The pieces of an update take a little more than the update.
        self.rpc.reply_limit = sum_limit(server) if self.edges else self._update_limit + BATCH_BYTES
        self.events = self.rpc.events = events or EventStream()
        self.events.callbacks = tuple(callbacks)
        self.faults, self.late = faults or Faults(), set[str]()
        self._mismatches: dict[str, str] = {}
        self._adverts = dict[str, Any]()
        self._version_notes: dict[str, str] = {}
        no_blobs: tuple[tuple[tuple[str, int], ...], BlobRecord] = (), to_blob_record(())
        self._cached_blobs = no_blobs
        self.evaluation = SiteEvaluation(self.rpc, server, self._blobs)

    def run(self) -> None:
        """Run all remaining rounds in this thread, each committed before the next starts.

        First evaluates the last committed round if scores are missing. FedplanError if too few
        sites connect, or a round has too few updates; a new run continues with that round.
        """
        server, last = self.server, self.server.last_round()
        if last is not None:
            if self._needs_scores(last):
                self._wait_for_sites(0)
            last = self._add_scores(last)
        self.events.call_back(with_task(last, self.scoring) if last else None)
        if server.global_state.round < server.rounds and not self.events.stop_text:
            # An edge may bring any number of updates.
            self._wait_for_sites(1 if self.edges else min(self.quorum, len(server.roster)))
            self.events.stop_reason()
        while server.global_state.round < server.rounds and not self.events.stop_text:
            self.update_roster()
            self.rpc.sent.clear()
            round_state = server.begin_round()
            self.late = self.faults.apply(server, round_state)
            self._choose_blocks(round_state)
            self.events.emit(RoundStarted(sum(map(self._takes_part, round_state.cohort))))
            collect = partial(self.collect_updates, round_state)
            if server.agreement.secagg.active:
                from fedplan.runners.flower.secagg import collect_secagg  # optional dependency

                collect_secagg(self.rpc, server, round_state, collect, self.late)
            else:
                collect()
            if not self.server.aggregation.hides_clients:
                for name in round_state.cohort.keys() - self.rpc.sent:
                    del round_state.cohort[name]  # the ledger counts the bytes that were sent
            server.close_round(round_state)
            closed = with_task(self._add_scores(server.commit(round_state)), self.scoring)
            log.info("%s", _round_summary(closed, self.scoring.primary))
            self.events.emit(closed)
        if server.agreement.secagg.active:
            from fedplan.runners.flower.secagg import announce_commit  # optional dependency

            announce_commit(self.rpc, self._hello(done=True))
        if reason := self.events.stop_text:
            log.info("stopped after round %d: %s", server.global_state.round, reason)

    def _hello(self, *, done: bool = False) -> Message:
        agreement, committed = self.server.agreement, self.server.global_state.round
        if not agreement.secagg.active:
            return hello_message(agreement.run, self._study)
        evaluated = (committed if done else committed - 1) if self.scoring.vector else None
        return hello_message(agreement.run, self._study, committed, evaluated)

    def _wait_for_sites(self, enough: int) -> None:
        self.events.emit(RunChanged(RunState.WAITING))
        self.rpc.wait_for_sites(enough)
        self.events.emit(RunChanged(RunState.RUNNING))

    def _needs_scores(self, closed: CommittedRound) -> bool:
        lacks_scores = (self.scoring.on_clients or self.tests) and not closed.scores
        return bool(lacks_scores) and self.scoring.is_due(closed.round, self.server.rounds)

    def _add_scores(self, closed: CommittedRound) -> CommittedRound:
        """Evaluate the committed round if due; return it with scores, and keep the best one."""
        if self._needs_scores(closed):
            common = {n: test(self.server.global_values()) for n, test in self.tests.items()}
            scores: dict[str, Any] = {"global": common["test"]} if "test" in common else {}
            answers = dict[str, Scores]()
            if self.scoring.on_clients:
                self.update_roster()
                scores["sites"], answers = self.evaluation.evaluate_sites(
                    self._mismatches, self.scoring
                )
            validation = join_validation(scores, answers, self.scoring, common.get("validation"))
            scores |= {"validation": validation} if validation else {}
            closed = self.server.add_scores(closed, scores)
        self.server.keep_best(self.scoring.best_round(closed.metrics))
        return closed

    def _takes_part(self, client: str) -> bool:
        return self._edge_of.get(client, client) not in self._mismatches

    def update_roster(self) -> None:
        """Poll the nodes, take over the sites' traits, and exclude sites that do not match."""
        self.rpc.poll_nodes()
        for name, site in self.rpc.sites.items():
            if reason := self._mismatch(name, site):
                if self._mismatches.get(name) != reason:
                    log.warning("%s gets no requests: it %s", name, reason)
                refusal = f"not requested: it {reason}"
                self.events.emit(ClientChanged(name, SiteState.REFUSED, refusal))
                self._mismatches[name] = reason
                continue
            self._mismatches.pop(name, None)
            if name in self.server.roster:
                self.server.roster[name] = site.traits
            differences = package_differences(site.versions)
            if differences and self._version_notes.get(name) != differences:
                text = f"the site has {differences}; it takes part"
                self.events.emit(Notice("site versions", text, client=name))
            self._version_notes[name] = differences

    def _mismatch(self, name: str, site: ConnectedSite) -> str:
        """Return why the site or edge called `name` cannot take part; "" if it can."""
        # Under client-level DP traits come from the study: a site's own would reveal presence.
        # Below an edge they do, too: the server above makes the requests.
        agreement, traits = self.server.agreement, dict(self.server.roster.get(name, {}))
        reason = "this run hides its clients" if self.server.aggregation.hides_clients else ""
        reason = "it is below an edge" if self._is_edge else reason
        if reason and site.traits != traits:
            return f"has traits of its own, and {reason}: see clients.traits"
        claims = (site.initial_digest, site.run, site.agreement_digest)
        start, run, agreed = (printable(text[:40]) for text in claims)
        if agreement.start and site.initial_digest != agreement.start:
            return (
                f"starts from the model {start} and not from {agreement.start}: "
                "give it the same weights, and start it again"
            )
        if difference := protocol_mismatch(site.versions):
            return f"has {difference}: install the same there and here"
        if site.run != agreement.run:
            return f"is in the run {run} and this is {agreement.run}: start it again"
        if site.agreement_digest != agreement.fingerprint:
            return (
                f"agreed to {agreed} and this study is "
                f"{agreement.fingerprint}: give it the same study, and start it again"
            )
        return ""

    def collect_updates(self, round_state: RoundState) -> dict[str, Any]:
        """Add each update or rejection to a round; FedplanError with fewer than the quorum.

        Under secure aggregation returns the key adverts of the sites that trained.
        """
        self._adverts = dict[str, Any]()
        cohort = list(round_state.cohort)
        for name in itertools.filterfalse(self._takes_part, cohort):
            reason = self._mismatches[self._edge_of.get(name, name)]
            round_state.rejected[name] = f"not requested: it {reason}"
        is_enough = partial(self._enough, round_state)
        for name, reply in self._call_clients("train", round_state, cohort, is_enough):
            if isinstance(reply, str):
                self._reject(round_state, name, reply, SiteState.FAILED)
            else:
                # All present sites have their request: free the blobs.
                self._cached_blobs = ((), to_blob_record(()))
                self._accept_reply(round_state, name, reply)
            del reply  # as in `_call_clients`
        without_reply = (
            round_state.cohort.keys() - set(round_state.responded) - round_state.rejected.keys()
        )
        round_state.rejected |= {name: "no answer" for name in without_reply}
        for name in without_reply:
            if not self.rpc.is_away(name):
                self.events.emit(ClientChanged(name, SiteState.FAILED, "no answer in time"))
        if not self._enough(round_state):
            reasons = "; ".join(f"{n}: {why}" for n, why in sorted(round_state.rejected.items()))
            raise FedplanError(
                f"round {self.server.global_state.round + 1} has {len(round_state.responded)} "
                f"answers and needs {self.quorum}: {reasons}; start the run again to go on with it"
            )
        return self._adverts

    def _enough(self, round_state: RoundState) -> bool:
        return len(round_state.responded) >= min(self.quorum, len(round_state.cohort))

    def _blobs(self, request: Request) -> BlobRecord:
        """Return a request's values as a record; reuses the last result for the same versions."""
        versions = tuple(sorted((key, request.versions.get(key, -1)) for key in request.values))
        if versions != self._cached_blobs[0]:
            self._cached_blobs = (versions, to_blob_record(request_message(request).blobs))
        return self._cached_blobs[1]

    def _call_clients(
        self,
        kind: str,
        round_state: RoundState,
        names: Iterable[str],
        is_enough: Callable[[], bool],
    ) -> Iterator[tuple[str, Message | str]]:
        """Send the round's requests to the sites that take part; yield (name, reply) on arrival.

        Values that a site received for the last evaluation are left out. A site that has lost the
        values sent before gets a request with all.
        """

        def make_message(name: str) -> tuple[Message, BlobRecord | None]:
            request = round_state.cohort[name]
            request = replace(request, values=self.evaluation.missing_values(request))
            return pack_message({}, request_header(request)), self._blobs(request)

        requests, below = dict[str, MessageFactory](), dict[str, list[str]]()
        for name in filter(self._takes_part, names):
            if (edge := self._edge_of.get(name)) is None:
                requests[name] = partial(make_message, name)
            else:
                below.setdefault(edge, []).append(name)
        for edge, clients in below.items():
            requests[edge] = partial(self._edge_message, round_state, clients)
        for name, reply in self.rpc.call(kind, requests, is_enough):
            is_missing = isinstance(reply, Message) and reply_fields(reply).get("missing")
            if is_missing and name not in below and not round_state.cohort[name].full:
                self.server.resend_all(round_state, name)
                log.warning("%s has lost the values it was sent before; all are sent again", name)
                requests[name] = partial(make_message, name)
            else:
                yield name, reply
            del reply  # else it would stay in memory while the next one is fetched

    def _edge_message(
        self, round_state: RoundState, clients: list[str]
    ) -> tuple[Message, BlobRecord | None]:
        late, study = [n for n in clients if n in self.late], self._study
        fields: dict[str, JSON] = {"run": self.server.agreement.run, "late": [*late]}
        fields["study"] = study.model_dump(mode="json") if study is not None else None
        return edge_request_message(self.server, round_state, clients, fields), None

    def _accept_sum(self, round_state: RoundState, edge: str, reply: Message) -> None:
        """Check an edge's reply, and merge its sum into the round, or reject its clients."""
        try:
            report = read_sum(reply, sum_limit(self.server))
        except FedplanError as error:
            return self._reject(round_state, edge, str(error), SiteState.FAILED)
        self.rpc.sent.update(accept_sum(self.server, round_state, edge, *report))
        for name in self.edges[edge]:
            if name in round_state.responded:
                self.events.emit(ClientChanged(name, SiteState.RESPONDED))
            elif reason := round_state.rejected.get(name):
                self.events.emit(ClientChanged(name, SiteState.FAILED, reason))

    def _reject(self, round_state: RoundState, name: str, reason: str, state: str) -> None:
        """Note why a site has no update in the round, or no client of an edge."""
        reason = printable(reason.splitlines()[0])
        for client in round_state.cohort.keys() & set(self.edges.get(name, [name])):
            round_state.rejected.setdefault(client, reason)
        self.events.emit(ClientChanged(name, state, reason))

    def _accept_reply(self, round_state: RoundState, name: str, reply: Message) -> None:
        """Check a training reply; add update or rejection to the round, or keep the key advert."""
        fields = reply_fields(reply)
        if text := refusal_text(fields):
            log.warning("%s %s", name, text)
            return self._reject(round_state, name, text, site_state_from_reason(text))
        if name in self.edges:
            return self._accept_sum(round_state, name, reply)
        try:
            aux_kinds = self.server.agreement.method.aux
            update = read_update(reply, aux_kinds=aux_kinds, limit=self._update_limit)
            if update.client != name:
                raise FedplanError(f"{name} answers for {update.client[:80]!r}")
        except FedplanError as error:
            log.warning("the update of %s is rejected: %s", name, printable(str(error)))
            return self._reject(round_state, name, str(error), SiteState.FAILED)
        agreement, state = self.server.agreement, self.server.global_state
        if agreement.secagg.active:
            if accept_masked_report(agreement, state, round_state, update):
                self._adverts[name] = fields.get("advert")
                self.events.emit(ClientChanged(name, SiteState.RESPONDED))
            return
        self.server.take(round_state, update, late=name in self.late)
        self.events.emit(ClientChanged(name, SiteState.RESPONDED))

    def _choose_blocks(self, round_state: RoundState) -> None:
        """Put the joint choice of blocks, if the plan has one, into the round's requests."""
        voters = self.server.voters(round_state)
        if voters is None:
            return
        if self.server.agreement.secagg.active:
            return self._choose_blocks_by_secagg(round_state, voters)
        scores, reasons = dict[str, Any](), dict[str, str]()
        enough = min(self.quorum, len(voters))
        replies = self._call_clients(POLL, round_state, voters, lambda: len(scores) >= enough)
        for name, reply in replies:
            fields = reply_fields(reply) if isinstance(reply, Message) else dict[str, Any]()
            try:
                scores[name] = block_scores_from_json(fields.get("scores"))
            except FedplanError as error:
                text = refusal_text(fields) or (reply if isinstance(reply, str) else str(error))
                reasons[name] = printable(text.splitlines()[0])
                log.warning("%s sent no layer scores in this round: %s", name, reasons[name])
        if len(scores) < enough:  # never where noise hides who votes: there is no quorum
            raise FedplanError(
                f"round {self.server.global_state.round + 1} has layer scores of {len(scores)} "
                f"sites and needs {enough}: "
                f"{'; '.join(f'{name}: {why}' for name, why in sorted(reasons.items()))}; start "
                "the run again to go on with it"
            )
        self.server.choose_blocks(round_state, scores)
        for name in scores:
            # The site has the values of the poll: do not send them again. A full one has them all.
            request = round_state.cohort[name]
            if request.full:
                round_state.wasted_bytes += request.nbytes  # it goes out twice
            else:
                round_state.cohort[name] = replace(request, values={})

    def _choose_blocks_by_secagg(self, round_state: RoundState, voters: Sequence[str]) -> None:
        """Set the joint choice by a secure sum of layer scores; FedplanError if it fails."""
        from fedplan.runners.flower.secagg import open_layer_scoring  # optional dependency

        secagg = open_layer_scoring(self.rpc, self.server, round_state)
        while secagg.begin_attempt():
            replies = self._call_clients(POLL, round_state, voters, lambda: True)
            answers = {n: reply_fields(each) for n, each in replies if isinstance(each, Message)}
            adverts = {name: fields.get("advert") for name, fields in answers.items()}
            secagg.run_attempt({name: advert for name, advert in adverts.items() if advert})
        total = secagg.total
        if not total.scores:
            raise FedplanError(
                f"round {total.round_number}: the layer scores were not summed: "
                f"{total.failure}; start the run again to go on with this round"
            )
        self.server.choose_blocks(round_state, {"all": total.scores})


def hello_message(
    run: str, study: Study | None, committed: int | None = None, evaluated: int | None = None
) -> Message:
    """Return the first message to a site: the run id, and the study if given.

    `committed`, `evaluated`: under secure aggregation the last committed round, and the last one of
    which the server needs no more score counts.
    """
    fields: dict[str, JSON] = {"run": run}
    fields |= {COMMITTED_ROUND: committed} if committed is not None else {}
    fields |= {EVALUATED_ROUND: evaluated} if evaluated is not None else {}
    fields |= {"study": study.model_dump(mode="json")} if study is not None else {}
    return pack_message({}, fields)


def _round_summary(closed: CommittedRound, primary: str) -> str:
    record, loss = closed.record, closed.row.get("loss", 0.0)
    missing = f", not aggregated: {', '.join(record.rejected)}" if record.rejected else ""
    names = (f"{kind}.{primary}" for kind in ("global", "sites.global", "sites.personal"))
    scores = "".join(f"{name} {closed.row[name]:.3f}, " for name in names if name in closed.row)
    return (
        f"round {closed.round} of {closed.total_rounds}: loss {loss:.3f}, {scores}"
        f"{len(record.aggregated)} updates aggregated{missing}, "
        f"{record.upload_bytes} bytes uploaded, {record.download_bytes} downloaded"
    )
