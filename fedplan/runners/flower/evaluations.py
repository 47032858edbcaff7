# SPDX-License-Identifier: Apache-2.0
"""Evaluations over Flower's grid: sites are asked for scores once a round is committed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ArrayRecord

from fedplan.errors import FedplanError
from fedplan.federation.codes import KINDS, meant
from fedplan.federation.evaluation import Scores, question, scores_of
from fedplan.federation.messages import Request, request_header
from fedplan.federation.server import Server
from fedplan.runners.flower.calls import Calls, Letter
from fedplan.tensors.message import Message
from fedplan.tensors.serialization import packed, unpacked

log = logging.getLogger("fedplan")
Arrays = Callable[[Request], ArrayRecord]
"""The values of a request as Flower carries them."""


class Evaluations:
    """Questions for scores, and what sites then have of the world.

    Nobody is waited for who is not there. `had` are the versions that a site took with the last
    question that it answered: they need not come again.
    """

    def __init__(self, calls: Calls, server: Server, arrays: Arrays) -> None:
        self.calls, self.server, self.arrays = calls, server, arrays
        self.had: dict[str, dict[str, int]] = {}

    def ask(self, unfit: Mapping[str, str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """What each site says of the models of the last round; who says nothing, and why."""
        silent = {name: f"not asked: it {why}" for name, why in unfit.items()}
        asked = {n: self._question(n) for n in self.calls.present() if n not in silent}
        letters = {name: self._letter(asked, name) for name in asked}
        said, self.had = dict[str, Scores](), {}
        wait = self.calls.patience.scores
        for name, answer in self.calls.ask("evaluate", letters, lambda: True, wait=wait):
            if _lacks(answer) and not asked[name].anew:
                asked[name] = self._question(name, anew=True)
                letters[name] = self._letter(asked, name)
                continue
            try:
                said[name] = _scores(answer)
                self.had[name] = asked[name].versions
            except FedplanError as error:
                silent[name] = str(error).splitlines()[0]
                log.warning("%s has no scores: %s", name, silent[name])
        missing = [n for n in self.server.roster if n not in said and n not in silent]
        return said, silent | dict.fromkeys(missing, "no answer")

    def lacking(self, request: Request) -> dict[str, Any]:
        """Of the values of a request, those that did not come with a question for scores."""
        had = {} if request.anew else self.had.get(request.turn.client, {})
        fresh = [k for k in request.values if had.get(k, -1) != request.versions.get(k)]
        return {k: request.values[k] for k in fresh}

    def _question(self, name: str, *, anew: bool = False) -> Request:
        server = self.server
        return question(server.agreement, server.world, name, server.roster[name], anew=anew)

    def _letter(self, asked: Mapping[str, Request], name: str) -> Letter:
        def letter() -> tuple[Message, ArrayRecord | None]:
            return packed({}, request_header(asked[name])), self.arrays(asked[name])

        return letter


def _lacks(answer: Message | str) -> bool:
    try:
        said = unpacked(Message(answer.header))[1] if isinstance(answer, Message) else {}
    except FedplanError:
        return False
    return "lacking" in said


def _scores(answer: Message | str) -> Scores:
    """The scores of an answer; what it says instead of them is an error in our own words."""
    if isinstance(answer, str):
        raise FedplanError(answer)
    said = unpacked(Message(answer.header))[1]
    if kind := next((kind for kind in KINDS if kind in said), ""):
        raise FedplanError(meant(kind, str(said[kind])))
    return scores_of(said.get("scores"))
