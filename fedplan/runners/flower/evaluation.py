# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the models at the sites, over Flower's grid, after a round is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord

from fedplan.errors import FedplanError
from fedplan.federation.evaluation import Scores, make_eval_request, metrics_from_json
from fedplan.federation.messages import Request, request_header
from fedplan.federation.server import Server
from fedplan.runners.flower.records import refusal_text, reply_fields
from fedplan.runners.flower.rpc import MessageFactory, SiteRpc
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

log = logging.getLogger("fedplan")
Arrays = Callable[[Request], ArrayRecord]
"""Returns the values of a request as Flower arrays."""


class SiteEvaluation:
    """Evaluation of the models at the sites, by requests of `rpc`; one object serves a whole run.

    `server` has the global state and the roster, `arrays` converts a request's values to Flower
    arrays. Call `evaluate_sites` after a committed round. `received_versions` are the versions of
    the global values that each site got in the last evaluation: `missing_values` leaves these
    values out of the next training request.
    """

    def __init__(self, rpc: SiteRpc, server: Server, arrays: Arrays) -> None:
        self.rpc, self.server, self.arrays = rpc, server, arrays
        self.received_versions: dict[str, dict[str, int]] = {}

    def evaluate_sites(
        self, excluded: Mapping[str, str]
    ) -> tuple[dict[str, Scores], dict[str, str]]:
        """Evaluate the models of the last round at the sites that are online, and wait for replies.

        `excluded` are sites that get no request, with the reason. Returns the scores by site, and
        the reason for each other site of the roster: "no answer" if the site is offline or late.
        """
        failures = {name: f"not requested: it {reason}" for name, reason in excluded.items()}
        present = [name for name in self.rpc.present_sites() if name not in failures]
        requests = {name: self._make_request(name) for name in present}
        messages = {name: self._message_factory(requests, name) for name in requests}
        scores, self.received_versions = dict[str, Scores](), {}
        timeout = self.rpc.timeouts.evaluations
        for name, reply in self.rpc.call("evaluate", messages, lambda: True, timeout=timeout):
            is_missing = isinstance(reply, Message) and "missing" in reply_fields(reply)
            if is_missing and not requests[name].full:
                requests[name] = self._make_request(name, full=True)
                messages[name] = self._message_factory(requests, name)
                continue
            try:
                if isinstance(reply, str):
                    raise FedplanError(reply)
                fields = unpack_message(Message(reply.header))[1]
                if reason := refusal_text(fields):
                    raise FedplanError(reason)
                scores[name] = metrics_from_json(fields.get("scores"))
                self.received_versions[name] = requests[name].versions
            except FedplanError as error:
                failures[name] = str(error).splitlines()[0]
                log.warning("%s has no scores: %s", name, failures[name])
        missing = [n for n in self.server.roster if n not in scores and n not in failures]
        return scores, failures | dict.fromkeys(missing, "no answer")

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
            self.arrays(requests[name]),
        )
