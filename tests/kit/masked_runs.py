# SPDX-License-Identifier: Apache-2.0
"""Masked runs over a grid in one process: sites with disks, diaries and node keys of their own."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import zoo
from clients import few, loss
from flwr.app import Context
from grids import InProcess
from masked import directory, node
from torch import nn

from fedplan.audits.ledger import verify_ledger
from fedplan.federation.agreement import Agreement
from fedplan.federation.client import Client, ClientPrivacy, TrainSetup, make_noise_guard
from fedplan.federation.endpoint import Endpoint, site_run_folder
from fedplan.federation.identity import read_identity
from fedplan.federation.ledger.digests import digest_initial_model
from fedplan.federation.ledger.egress import Account, Limits
from fedplan.federation.participation import Timeouts
from fedplan.federation.secure_client import SecAggClient
from fedplan.federation.server import Server
from fedplan.methods.method import Method
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.privacy.guarantee import Guarantee
from fedplan.runners.flower.apps import client_app
from fedplan.runners.flower.server import ServerLoop
from fedplan.secagg.config import SecAggConfig
from fedplan.storage.append_log import read_json_lines
from fedplan.storage.journal import Journal, client_state_folder
from fedplan.tensors.message import Message
from fedplan.training.fit import TrainArguments

NAMES = ("client-0", "client-1", "client-2")
PACE = TrainArguments(lr=1e-2, batch_size=2, steps=2)
MASKED = SecAggConfig("secure", threshold=2, min_contributors=2)
SOON = Timeouts(sites=2.0, updates=60.0, reconnect=1.0, poll_interval=0.01)
TRAITS = {"client-1": {"site": "a"}}
Answer = Callable[[str, str, Message], Message]
"""The answer of a site, by its name, to a request of a kind."""


def model_of(made: Method) -> nn.Module:
    """The same at every end."""
    torch.manual_seed(0)
    return made.adapt(zoo.build("bert")) if made.adapt else zoo.build("bert")


class MaskedRun:
    """A run over an in-process grid. Sites are there again after each as after a kill.

    With `accounts` sites have one each, beside all their runs, and `limits` on it.
    """

    def __init__(
        self,
        made: Method,
        folder: Path,
        secagg: SecAggConfig = MASKED,
        *,
        rounds: int = 2,
        accounts: Path | None = None,
        guarantee: Guarantee | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.folder, self.made, model = folder, made, model_of(made)
        self.accounts, self.limits = accounts, limits
        agreement = Agreement("flower", describe(model), made, PACE, guarantee, secagg=secagg)
        folder.mkdir(exist_ok=True)
        self.server = Server(
            agreement,
            get_values(model, agreement.params),
            folder,
            rounds=rounds,
            roster={name: TRAITS.get(name, {}) if guarantee else {} for name in NAMES},
        )
        self.endpoints = {name: self.endpoint(name) for name in NAMES}
        self.said = list[bytes]()
        nodes = [{"name": name} for name in reversed(NAMES)]
        self.grid = InProcess(client_app(self._answered), nodes)
        self.answer: Answer = lambda name, kind, asked: self.endpoints[name].answer(kind, asked)

    def endpoint(self, name: str) -> Endpoint:
        """A site as it starts: with what lies on its disk, and nothing else."""
        run, model = read_identity(self.folder).id, model_of(self.made)
        agreement = replace(self.server.agreement, run=run)
        start = get_values(model, agreement.params)
        account = Account(self.accounts / name, self.limits) if self.accounts else None
        site = Client(
            name=name,
            examples=few("bert", 3)[name],
            journal=Journal(client_state_folder(self.folder, name), keep_replies=True),
            setup=TrainSetup(
                model, loss, start, digest_initial_model(model, agreement.params, start)
            ),
            traits=TRAITS.get(name, {}),
            privacy=ClientPrivacy(
                account=account,
                noise_guard=make_noise_guard(agreement, account) if account else None,
            ),
        )
        place, masker = site_run_folder(self.folder / "sites" / name, run), None
        if agreement.secagg.active:
            known = directory(NAMES)
            masker = SecAggClient(
                agreement, site, node(name), known, place, cohort=lambda number: NAMES
            )
        return Endpoint(agreement, site, self.folder / "sites" / name, secagg_client=masker)

    def restart(self, name: str) -> None:
        """A site as after a kill."""
        del self.endpoints[name]
        gc.collect()
        self.endpoints[name] = self.endpoint(name)

    def _answered(self, context: Context, kind: str, message: Message) -> Message:
        found = self.answer(str(context.node_config["name"]), kind, message)
        self.said += [found.header, *found.blobs]
        return found

    def carry(self, patience: Timeouts = SOON) -> Server:
        ServerLoop(self.grid, self.server, patience).run()
        return self.server

    def lines(self) -> list[dict[str, Any]]:
        return read_json_lines(self.folder / "ledger.jsonl")

    def rounds(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if line["kind"] == "round"]

    def faults(self) -> list[str]:
        return verify_ledger(self.server.agreement, self.lines())
