# SPDX-License-Identifier: Apache-2.0
"""Evaluation at the sites after a committed round, over Flower's grid: metrics or score counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from fedplan.errors import FedplanError, printable
from fedplan.federation.evaluation import (
    EvalConfig,
    Scores,
    combine_scores,
    make_eval_request,
    metrics_from_json,
)
from fedplan.federation.global_state import METRICS
from fedplan.federation.messages import Request, request_header
from fedplan.federation.score_sums import SENDERS, ScoreVector
from fedplan.federation.server import Server
from fedplan.runners.flower.records import BlobRecord, refusal_text, reply_fields
from fedplan.runners.flower.rpc import MessageFactory, SiteRpc
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

T = TypeVar("T")
log = logging.getLogger("fedplan")


class SiteEvaluation:
    """Evaluation of the models at the sites, by requests of `rpc`; one object serves a whole run.

    `blobs` converts a request's values to a record. `received_versions` are the versions of the
    global values that each site got in the last evaluation.
    """

    def __init__(
        self, rpc: SiteRpc, server: Server, blobs: Callable[[Request], BlobRecord]
    ) -> None:
        self.rpc, self.server, self.blobs = rpc, server, blobs
        self.received_versions: dict[str, dict[str, int]] = {}

    def evaluate_sites(
        self, excluded: Mapping[str, str], scoring: EvalConfig
    ) -> tuple[dict[str, Any], dict[str, Scores]]:
        """Evaluate the models of the last round at the sites that are online, and wait for replies.

        `excluded` are sites that get no request, with the reason. Returns (scores of all sites
        together, scores by site); if sites send counts, there are none by site. The key "silent"
        has the reason for each site of the roster without scores.
        """
        failures = {name: f"not requested: it {reason}" for name, reason in excluded.items()}
        present = [name for name in self.rpc.present_sites() if name not in failures]
        requests = {name: self._make_request(name) for name in present}
        self.received_versions, vector = {}, scoring.vector
        if vector is not None and self.server.agreement.secagg.active:
            return self._sum_counts(requests, failures, vector), {}
        if vector is None:
            scores = self._collect(
                requests, failures, lambda fields: metrics_from_json(fields.get("scores"))
            )
            silent = failures | self._without_reply({*scores, *failures})
            return combine_scores(scores, silent, scoring), scores
        counts = self._collect(
            requests, failures, lambda fields: vector.from_json(fields.get("counts"))
        )
        total = sum(counts.values(), np.zeros(vector.size, np.int64))
        silent = failures | self._without_reply({*counts, *failures})
        return vector.combine(total, counts, silent), {}

    def _sum_counts(
        self, requests: dict[str, Request], failures: dict[str, str], vector: ScoreVector
    ) -> dict[str, Any]:
        """Return the scores of the secure sum of score counts; changes `requests`, `failures`."""
        from fedplan.federation.aggregation.secure import open_counts_sum  # optional dependency
        from fedplan.runners.flower.secagg import GONE, SecAggTransport
        from fedplan.secagg.round import EVALUATION_CHECKPOINT

        server = self.server
        # Without noise sites refuse to unmask a sum of other sites than the first.
        lines = read_json_lines(server.folder / METRICS)
        sums = filter(None, (line.get("sites", {}).get(SENDERS) for line in lines))
        noisy = server.agreement.guarantee is not None
        for name in requests.keys() - set((not noisy and next(sums, None)) or server.roster):
            failures[name] = "not requested: the first sum of scores was of other sites"
            del requests[name]
        state, clients = server.global_state, len(server.roster)
        total = open_counts_sum(server.agreement, state, clients, vector.size)
        file = server.folder / EVALUATION_CHECKPOINT
        secagg, adverts = SecAggTransport(self.rpc, total, requests, file), dict[str, Any]()
        while secagg.begin_attempt():
            adverts = self._collect(requests, failures, lambda fields: fields.get("advert"))
            secagg.run_attempt(adverts)
        reasons = {
            name: secagg.dropouts.get(name, GONE)
            if total.unmasked is not None
            else f"not summed: {total.failure}"[:300]
            for name in adverts
            if name not in total.sites
        }
        silent = failures | reasons
        silent |= self._without_reply({*total.sites, *silent})
        return vector.combine(total.counts, total.sites, silent)

    def _without_reply(self, others: Collection[str]) -> dict[str, str]:
        return {name: "no answer" for name in self.server.roster if name not in others}

    def _collect(
        self,
        requests: dict[str, Request],
        failures: dict[str, str],
        read: Callable[[Mapping[str, Any]], T],
    ) -> dict[str, T]:
        """Send requests; return what `read` finds in replies, or add reasons to `failures`."""
        messages = {name: self._message_factory(requests, name) for name in requests}
        answers, timeout = dict[str, T](), self.rpc.timeouts.evaluations
        for name, reply in self.rpc.call("evaluate", messages, lambda: True, timeout=timeout):
            is_missing = isinstance(reply, Message) and "missing" in reply_fields(reply)
            if is_missing and not requests[name].full:
                full = self._make_request(name, full=True)
                digests, attempt = requests[name].base_digests, requests[name].attempt
                requests[name] = replace(full, base_digests=digests, attempt=attempt)
                messages[name] = self._message_factory(requests, name)
                continue
            try:
                if isinstance(reply, str):
                    raise FedplanError(reply)
                fields = unpack_message(Message(reply.header))[1]
                if reason := refusal_text(fields):
                    raise FedplanError(reason)
                answers[name] = read(fields)
                self.received_versions[name] = requests[name].versions
                failures.pop(name, None)  # of an earlier attempt
            except FedplanError as error:
                failures[name] = printable(str(error).splitlines()[0])
                log.warning("%s has no scores: %s", name, failures[name])
        return answers

    def missing_values(self, request: Request) -> dict[str, Any]:
        """Return the values of a request that the site did not receive for its evaluation."""
        received = {} if request.full else self.received_versions.get(request.turn.client, {})
        missing = [k for k in request.values if received.get(k, -1) != request.versions.get(k)]
        return {k: request.values[k] for k in missing}

    def _make_request(self, name: str, *, full: bool = False) -> Request:
        state, traits = self.server.global_state, self.server.roster[name]
        return make_eval_request(self.server.agreement, state, name, traits, full=full)

    def _message_factory(self, requests: Mapping[str, Request], name: str) -> MessageFactory:
        return lambda: (
            pack_message({}, request_header(requests[name])),
            self.blobs(requests[name]),
        )
