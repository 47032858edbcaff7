# SPDX-License-Identifier: Apache-2.0
"""Checks of the guarantees that every method must keep; run them on your own method."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from fedplan.audits.ledger import verify_ledger
from fedplan.data.examples import Examples, Loss
from fedplan.federation.aggregation import MeanAggregator
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_round import train_round
from fedplan.federation.global_state import GlobalState
from fedplan.federation.record import ROLE_BY_LETTER
from fedplan.federation.rounds import (
    RoundState,
    accept_update,
    announce_phase,
    close_round,
    make_request,
)
from fedplan.language.client_classes import Participants
from fedplan.language.plan import Role, share
from fedplan.language.resolution import permitted_roles, resolve
from fedplan.language.turn import Turn
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.server_optimizer import mean
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.reports.forecasts import forecast
from fedplan.runners.local import Federation
from fedplan.storage.json_lines import read_json_lines
from fedplan.tensors.aux_tensors import is_aux, param_key
from fedplan.tensors.devices import fork_rng_state
from fedplan.tensors.named import digests, nbytes
from fedplan.tensors.sums import GRID
from fedplan.training.fit import Job, TrainConfig, plain_fit
from fedplan.training.optimizers import adamw

ROUNDS = 3
"""Rounds that each check runs."""
TRAIN_CONFIG = TrainConfig(adamw(weight_decay=0.1), lr=1e-2, batch_size=2, steps=2)


def check_method(
    method: Method, model: nn.Module, examples: Mapping[str, Examples], loss: Loss
) -> None:
    """Check a method for a few rounds; raise AssertionError if it breaks a guarantee.

    Trains a copy of the model; the model itself is not changed.
    `examples`: training data of two or more clients by name; with fewer, raises ValueError.
    `loss`: called with the model and a batch.
    """
    if len(examples) < 2:
        raise ValueError("give the examples of two or more clients")
    values_before = {n: t.clone() for n, t in model.named_parameters()}
    for check in CHECKS:
        with TemporaryDirectory() as folder:
            check(_MethodCase(method, model, examples, loss, Path(folder)))
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, values_before[name]), f"the caller's model was changed at {name}"


class _MethodCase:
    """A method on a copy of a model, with its agreement, and a temporary folder for its runs."""

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        examples: Mapping[str, Examples],
        loss: Loss,
        folder: Path,
    ) -> None:
        self.method, self.examples, self.loss, self.folder = method, examples, loss, folder
        self.model = copy.deepcopy(model)
        if method.adapt is not None:
            with fork_rng_state(seed=0):
                self.model = method.adapt(self.model)
        self.agreement = Agreement("laws", describe(self.model), method, TRAIN_CONFIG)

    def federation(
        self, run: str = "a", *, examples: Mapping[str, Examples] | None = None
    ) -> Federation:
        """Return a new federation in the folder of a run; run "b" stores no replies of clients."""
        return Federation(
            self.agreement,
            copy.deepcopy(self.model),
            examples or self.examples,
            self.loss,
            self._run_folder(run),
            rounds=ROUNDS,
            keep_replies=run != "b",
        )

    def _run_folder(self, run: str) -> Path:
        """Create and return the folder of a run."""
        (self.folder / run).mkdir(exist_ok=True)
        return self.folder / run

    def roles(self, turn: Turn) -> dict[str, Role]:
        """Return the role that the plan permits in a turn, by param key."""
        roles = permitted_roles(self.method.plan, self.agreement.params, turn)
        return {p.key: role for p, role in roles.items()}


def check_only_shared_params_are_sent(case: _MethodCase) -> None:
    """Check that a client sends exactly its SHARE params, and gets personal params at most once.
    ROLE_BY_LETTER
        The server sends the global value of a personal param only before the client first owns it.
    """
    federation, owned = case.federation(), {name: set[str]() for name in case.examples}
    for _ in range(ROUNDS):
        round_state = federation.run_round()
        assert not round_state.rejected, round_state.rejected
        for client, request in round_state.cohort.items():
            permitted, record = case.roles(request.turn), round_state.records[client]
            roles = dict(
                zip(permitted, (ROLE_BY_LETTER[letter] for letter in record.roles), strict=True)
            )
            reply = federation.clients[client].journal.reply_for(request.name)
            assert reply is not None
            sent = {param_key(k) for k in reply[0]}
            assert sent == {k for k, role in roles.items() if role is Role.SHARE}
            assert sent <= {k for k, role in permitted.items() if role is Role.SHARE}
            personal = {k for k, role in roles.items() if role.is_personal}
            received = personal & {param_key(k) for k in request.values}
            assert not received & owned[client] and all(request.versions[k] > 0 for k in received)
            owned[client] |= personal
        federation.commit(round_state)


def check_ledger_shows_frozen_params(case: _MethodCase) -> None:
    """Check that the ledger verifies: FREEZE and HOLD params are unchanged, bytes as forecast."""
    federation = case.federation()
    for _ in range(ROUNDS):
        federation.commit(federation.run_round())
    lines = read_json_lines(case.folder / "a" / "ledger.jsonl")
    assert not verify_ledger(case.agreement, lines)


def check_mean_over_senders(case: _MethodCase) -> None:
    """Check that a param sent by one client gets its value, and others keep theirs."""
    federation = case.federation()
    client, *_ = federation.clients
    agreement = replace(federation.agreement, method=replace(case.method, server_optimizer=mean()))
    federation.server.agreement = agreement  # server and clients must agree on the server optimizer
    global_state = GlobalState.initial(agreement, federation.server.start)
    round_state = RoundState(
        {client: make_request(agreement, global_state, client, {})},
        MeanAggregator(agreement, global_state.values, 2),
    )
    federation.poll_clients(round_state)
    update = train_round(agreement, federation.clients[client], round_state.cohort[client])
    accept_update(agreement, global_state, round_state, update)
    next_state = close_round(
        agreement, global_state, round_state, round_state.aggregator.close(), later=set()
    )
    base = {k: global_state.values[k] for k in {param_key(k) for k in update.values}}
    sent = agreement.method.compression.decode(update.values, base)
    for key, value in global_state.values.items():
        if not is_aux(key):
            assert torch.allclose(
                next_state.values[key], sent.get(key, value), rtol=0, atol=GRID
            ), key


def check_clients_get_missing_updates(case: _MethodCase) -> None:
    """Check that a client that missed rounds gets all it lacks, and others only newer params."""
    federation = case.federation()
    late_client, *other_clients = federation.clients
    clients = {name: federation.clients[name] for name in other_clients}
    global_state, agreement = federation.global_state, federation.agreement
    for _ in range(2):
        global_state = announce_phase(agreement, global_state)
        aggregator = MeanAggregator(agreement, global_state.values, len(other_clients) + 1)
        round_state = RoundState(
            {name: make_request(agreement, global_state, name, {}) for name in other_clients},
            aggregator,
        )
        federation.poll_clients(round_state)
        for name in other_clients:
            accept_update(
                agreement,
                global_state,
                round_state,
                train_round(agreement, clients[name], round_state.cohort[name]),
            )
        global_state = close_round(
            agreement, global_state, round_state, aggregator.close(), later=set()
        )
    request = make_request(agreement, announce_phase(agreement, global_state), late_client, {})
    roles, sent_keys = case.roles(request.turn), set(request.values)
    known_from_start = {p.key for p in agreement.server_merged}
    assert {k for k in sent_keys if not is_aux(k)} == {
        p.key
        for p in agreement.exchanged
        if not (roles[p.key].is_personal or p.key in known_from_start)
        or global_state.versions[p.key]
    }
    for name in other_clients:
        for key, version in make_request(agreement, global_state, name, {}).versions.items():
            assert version > global_state.versions_of(name).get(key, -1)


def check_single_client_equals_local_training(case: _MethodCase) -> None:
    """Check that one client with `share()` trains like plain local training, up to rounding."""
    custom_training = case.method.client_hooks or case.method.loop is not plain_fit
    if case.method.plan != share() or case.method.server_optimizer != mean() or custom_training:
        return
    name = next(iter(case.examples))
    federation = case.federation(examples={name: case.examples[name]})
    local_model = copy.deepcopy(case.model)
    for round_number in (1, 2):
        federation.commit(federation.run_round())
        _train_locally(case, local_model, name, round_number)
    expected = get_values(local_model, case.agreement.params)
    # The exact sum rounds small values to its grid, and later steps carry the rounding on.
    for key, value in federation.global_values().items():
        assert torch.allclose(value, expected[key], rtol=1e-5, atol=1e-7), key


def _train_locally(case: _MethodCase, model: nn.Module, name: str, round_number: int) -> None:
    """Train a model in place for one round on a client's examples, without a federation."""
    from fedplan import seeds

    turn = Turn(round=round_number, client=name)
    plain_fit(
        Job(
            model=model,
            roles=resolve(share(), case.agreement.params, turn),
            examples=case.examples[name],
            loss=case.loss,
            train_config=TRAIN_CONFIG,
            seed=seeds.seed("laws", "fit", round_number, name),
            start={},
        )
    )


def check_runs_are_reproducible(case: _MethodCase) -> None:
    """Check that two runs with one seed agree bit by bit.

    A repeated request must get the same reply, and must not change the client's state again.
    """
    first, second = case.federation("a"), case.federation("b")
    for _ in range(ROUNDS):
        clients = {name: first.clients[name] for name in first.clients}
        round_state = first.run_round()
        for name, request in round_state.cohort.items():
            client = clients[name]
            state = digests(client.journal.client_state()[0])
            repeated = train_round(first.agreement, client, request)
            assert digests(client.journal.client_state()[0]) == state
            assert repeated.ledger_line == round_state.records[name].json()
        first.commit(round_state)
        second.commit(second.run_round())
    assert digests(first.global_state.values) == digests(second.global_state.values)
    for name in first.clients:
        assert digests(first.clients[name].journal.client_state()[0]) == digests(
            second.clients[name].journal.client_state()[0]
        )


def check_bytes_match_forecast(case: _MethodCase) -> None:
    """Check that the bytes of every request and update are within the forecast range."""
    phase_rule = case.method.phase_rule
    phase_starts = (
        dict(phase_rule.after) if isinstance(phase_rule, PlannedPhases) else dict[str, int]()
    )
    phases = {name: number for name, number in phase_starts.items() if number < ROUNDS}
    clients = Participants({name: {} for name in case.examples})
    plan, params, wire_cost = case.method.plan, case.agreement.params, case.agreement.wire_cost
    forecasts = forecast(
        plan, params, rounds=ROUNDS, phases=phases, participants=clients, wire_cost=wire_cost
    )
    client_forecast, *other_forecasts = forecasts.clients
    if not isinstance(phase_rule, PlannedPhases) or other_forecasts:
        return
    federation = case.federation()
    for upload_range, download_range in zip(
        client_forecast.uploads, client_forecast.downloads, strict=True
    ):
        round_state = federation.run_round()
        for client, record in round_state.records.items():
            assert upload_range[0] <= record.up <= upload_range[1], (
                client,
                upload_range,
                record.up,
            )
            assert (
                download_range[0] <= nbytes(round_state.cohort[client].values) <= download_range[1]
            ), (
                client,
                download_range,
            )
        federation.commit(round_state)


CHECKS = (
    check_only_shared_params_are_sent,
    check_ledger_shows_frozen_params,
    check_mean_over_senders,
    check_clients_get_missing_updates,
    check_single_client_equals_local_training,
    check_runs_are_reproducible,
    check_bytes_match_forecast,
)
