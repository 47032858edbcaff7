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
from fedplan.federation.aggregation.mean import MeanAggregator
from fedplan.federation.agreement import Agreement
from fedplan.federation.client_round import train_round
from fedplan.federation.global_state import GlobalState
from fedplan.federation.ledger.records import ROLE_BY_LETTER
from fedplan.federation.rounds import (
    RoundState,
    accept_update,
    announce_phase,
    close_round,
    make_request,
)
from fedplan.language.plan import Role, share
from fedplan.language.predicates import Turn
from fedplan.language.resolution import Participants, permitted_roles, resolve
from fedplan.methods.method import Method
from fedplan.methods.phases import PlannedPhases
from fedplan.methods.server_optimizer import mean
from fedplan.models.description import describe
from fedplan.models.values import get_values
from fedplan.reports.forecasts import forecast
from fedplan.runners.local import Federation
from fedplan.storage.append_log import read_json_lines
from fedplan.tensors.devices import fork_rng_state
from fedplan.tensors.named import digests, is_aux, nbytes, param_key
from fedplan.tensors.sums import GRID
from fedplan.training.fit import Job, TrainArguments, plain_fit
from fedplan.training.optimizers import adamw

ROUNDS = 3
"""Rounds that each check runs."""
TRAIN_CONFIG = TrainArguments(adamw(weight_decay=0.1), lr=1e-2, batch_size=2, steps=2)


def check_method(
    method: Method, model: nn.Module, examples: Mapping[str, Examples], loss: Loss
) -> None:
    """Run a method for a few rounds; raise AssertionError if it breaks a guarantee of fedplan.

    Trains copies of the model in temporary folders; the model itself is not changed. `examples` is
    the training data of two or more clients by name (with fewer, raises ValueError); `loss` is
    called with the model and a batch.
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
    """A method under test: a deep copy of the model with the method's adapters, and an agreement.

    `examples` and `loss` are as in `check_method`; `folder` is an existing temporary folder for
    runs. Checks call `federation` for a new federation, and `roles` for the roles that the plan
    permits.
    """

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
        """Return a new federation on the examples, all by default, in the subfolder `run`.

        The subfolder is created if missing. Run "b" stores no replies of clients.
        """
        (self.folder / run).mkdir(exist_ok=True)
        return Federation(
            self.agreement,
            copy.deepcopy(self.model),
            examples or self.examples,
            self.loss,
            self.folder / run,
            rounds=ROUNDS,
            keep_replies=run != "b",
        )

    def roles(self, turn: Turn) -> dict[str, Role]:
        """Return the role that the plan permits in a turn, by param key."""
        roles = permitted_roles(self.method.plan, self.agreement.params, turn)
        return {p.key: role for p, role in roles.items()}


def check_only_shared_params_are_sent(case: _MethodCase) -> None:
    """Check that a client sends exactly its SHARE params, and gets no param that it owns.

    A client owns a param after the first round in which the param is personal. In that round the
    server may send the global value, if this is newer than the initial value.
    """
    federation, owned = case.federation(), {name: set[str]() for name in case.examples}
    for _ in range(ROUNDS):
        round_state = federation.run_round()
        assert not round_state.rejected, round_state.rejected
        for client, request in round_state.cohort.items():
            permitted, record = case.roles(request.turn), round_state.records[client]
            letters = (ROLE_BY_LETTER[letter] for letter in record.roles)
            roles = dict(zip(permitted, letters, strict=True))
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
    """Check that the ledger of a run verifies: frozen params are unchanged, bytes as forecast."""
    federation = case.federation()
    for _ in range(ROUNDS):
        federation.commit(federation.run_round())
    lines = read_json_lines(case.folder / "a" / "ledger.jsonl")
    assert not verify_ledger(case.agreement, lines)


def check_mean_over_senders(case: _MethodCase) -> None:
    """Check a round with one client: sent params get the sent values, others are unchanged.

    The method's server optimizer is replaced by `mean`; auxiliary values are not checked. Raises
    AssertionError if the check fails.
    """
    federation = case.federation()
    client, *_ = federation.clients
    agreement = replace(federation.agreement, method=replace(case.method, server_optimizer=mean()))
    federation.server.agreement = agreement  # server and clients must agree on the server optimizer
    state = GlobalState.initial(agreement, federation.server.start)
    cohort = {client: make_request(agreement, state, client, {})}
    round_state = RoundState(cohort, MeanAggregator(agreement, state.values, 2))
    federation.poll_clients(round_state)
    update = train_round(agreement, federation.clients[client], round_state.cohort[client])
    accept_update(agreement, state, round_state, update)
    total = round_state.aggregator.close()
    values = close_round(agreement, state, round_state, total, later=set()).values
    base = {k: state.values[k] for k in {param_key(k) for k in update.values}}
    sent = agreement.method.compression.decode(update.values, base)
    for key, value in state.values.items():
        if not is_aux(key):
            assert torch.allclose(values[key], sent.get(key, value), rtol=0, atol=GRID), key


def check_clients_get_missing_updates(case: _MethodCase) -> None:
    """Check that a client that missed rounds is sent all params that it lacks.

    Clients that took part must be sent only params that are newer than their own.
    """
    federation = case.federation()
    late_client, *others = federation.clients
    clients = {name: federation.clients[name] for name in others}
    state, agreement = federation.global_state, federation.agreement
    for _ in range(2):
        state = announce_phase(agreement, state)
        aggregator = MeanAggregator(agreement, state.values, len(others) + 1)
        cohort = {name: make_request(agreement, state, name, {}) for name in others}
        round_state = RoundState(cohort, aggregator)
        federation.poll_clients(round_state)
        for name in others:
            update = train_round(agreement, clients[name], round_state.cohort[name])
            accept_update(agreement, state, round_state, update)
        state = close_round(agreement, state, round_state, aggregator.close(), later=set())
    request = make_request(agreement, announce_phase(agreement, state), late_client, {})
    roles, initial = case.roles(request.turn), {p.key for p in agreement.server_merged}
    assert {k for k in request.values if not is_aux(k)} == {
        p.key
        for p in agreement.exchanged
        if not (roles[p.key].is_personal or p.key in initial) or state.versions[p.key]
    }
    for name in others:
        for key, version in make_request(agreement, state, name, {}).versions.items():
            assert version > state.versions_of(name).get(key, -1)


def check_single_client_equals_local_training(case: _MethodCase) -> None:
    """Check that one client with `share()` trains like plain local training, up to rounding.

    Methods with another plan, server optimizer or training loop are not checked.
    """
    from fedplan import seeds

    custom_training = case.method.client_hooks or case.method.loop is not plain_fit
    if case.method.plan != share() or case.method.server_optimizer != mean() or custom_training:
        return
    name, params = next(iter(case.examples)), case.agreement.params
    federation = case.federation(examples={name: case.examples[name]})
    local_model = copy.deepcopy(case.model)
    for number in (1, 2):
        federation.commit(federation.run_round())
        job = Job(
            model=local_model,
            roles=resolve(share(), params, Turn(round=number, client=name)),
            examples=case.examples[name],
            loss=case.loss,
            train_arguments=TRAIN_CONFIG,
            seed=seeds.seed("laws", "fit", number, name),
            start={},
        )
        plain_fit(job)
    expected = get_values(local_model, params)
    # The exact sum rounds small values to its grid, and later steps carry the rounding on.
    for key, value in federation.global_values().items():
        assert torch.allclose(value, expected[key], rtol=1e-5, atol=1e-7), key


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
        states = (run.clients[name].journal.client_state()[0] for run in (first, second))
        one, other = map(digests, states)
        assert one == other, name


def check_bytes_match_forecast(case: _MethodCase) -> None:
    """Check that the bytes of every request and update are within the forecast range.

    Methods whose phases do not start at planned rounds, or whose clients have different forecasts,
    are not checked.
    """
    phase_rule = case.method.phase_rule
    if not isinstance(phase_rule, PlannedPhases):
        return
    phases = {name: number for name, number in phase_rule.after.items() if number < ROUNDS}
    clients = Participants({name: {} for name in case.examples})
    plan, params, cost = case.method.plan, case.agreement.params, case.agreement.wire_cost
    expected, *other_forecasts = forecast(
        plan, params, rounds=ROUNDS, phases=phases, participants=clients, wire_cost=cost
    ).clients
    if other_forecasts:
        return
    federation = case.federation()
    for uploads, downloads in zip(expected.uploads, expected.downloads, strict=True):
        round_state = federation.run_round()
        for client, record in round_state.records.items():
            sent = nbytes(round_state.cohort[client].values)
            uploaded = record.upload_bytes
            assert uploads[0] <= uploaded <= uploads[1], (client, uploads, uploaded)
            assert downloads[0] <= sent <= downloads[1], (client, downloads, sent)
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
