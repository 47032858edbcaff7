# SPDX-License-Identifier: Apache-2.0
"""Evaluation of the models at the sites, over Flower's grid, after a round is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord

from fedplan.errors import FedplanError
from fedplan.federation.error_codes import KINDS, describe_code
from fedplan.federation.evaluation import Scores, make_eval_request, metrics_from_json
from fedplan.federation.messages import Request, request_header
from fedplan.federation.server import Server
from fedplan.runners.flower.rpc import MessageFactory, SiteRpc
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import pack_message, unpack_message

log = logging.getLogger("fedplan")
Arrays = Callable[[Request], ArrayRecord]
"""Returns the values of a request as Flower arrays."""


class SiteEvaluation:
    """Evaluation requests to the sites that are online.

    `received_versions` are the versions of global values that each site received with its last
    answered evaluation request; they need not be sent again.
    """

    def __init__(self, rpc: SiteRpc, server: Server, arrays: Arrays) -> None:
        self.rpc, self.server, self.arrays = rpc, server, arrays
        self.received_versions: dict[str, dict[str, int]] = {}

    def evaluate_sites(
        self, excluded: Mapping[str, str]
    ) -> tuple[dict[str, Scores], dict[str, str]]:
        """Evaluate the models of the last round at the sites that are online.

        `excluded` are sites that get no request, with the reason. Returns the scores by site, and
        the reason by site without scores.
        """
        failures = {name: f"not asked: it {reason}" for name, reason in excluded.items()}
        present = [name for name in self.rpc.present_sites() if name not in failures]
        requests = {name: self._make_request(name) for name in present}
        messages = {name: self._message_factory(requests, name) for name in requests}
        scores, self.received_versions = dict[str, Scores](), {}
        timeout = self.rpc.timeouts.evaluations
        for name, reply in self.rpc.call("evaluate", messages, lambda: True, timeout=timeout):
            if _is_missing_values(reply) and not requests[name].full:
                requests[name] = self._make_request(name, full=True)
                messages[name] = self._message_factory(requests, name)
                continue
            try:
                scores[name] = _read_scores(reply)
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
        server = self.server
        return make_eval_request(
            server.agreement, server.global_state, name, server.roster[name], full=full
        )

    def _message_factory(self, requests: Mapping[str, Request], name: str) -> MessageFactory:
        def make_message() -> tuple[Message, ArrayRecord | None]:
            return pack_message({}, request_header(requests[name])), self.arrays(requests[name])

        return make_message


def _is_missing_values(reply: Message | str) -> bool:
    try:
        fields = unpack_message(Message(reply.header))[1] if isinstance(reply, Message) else {}
    except FedplanError:
        return False
    return "lacking" in fields


def _read_scores(reply: Message | str) -> Scores:
    """Return the scores of a reply; FedplanError with the reason if it has none."""
    if isinstance(reply, str):
        raise FedplanError(reply)
    fields = unpack_message(Message(reply.header))[1]
    if kind := next((kind for kind in KINDS if kind in fields), ""):
        raise FedplanError(describe_code(kind, str(fields[kind])))
    return metrics_from_json(fields.get("scores"))
