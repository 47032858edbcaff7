# SPDX-License-Identifier: Apache-2.0
"""Testing: the laws that every method must keep, for ours and for anybody's."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from fedplan.audits.ledger import verify_lines
from fedplan.data.examples import Examples, Loss
from fedplan.federation.aggregation import PlainSum
from fedplan.federation.agreement import Agreement
from fedplan.federation.record import ROLES
from fedplan.federation.rounds import Tally, announced, close, pull, push
from fedplan.federation.turns import local
from fedplan.federation.world import World
from fedplan.language.crowds import Crowd
from fedplan.language.plan import Role, share
from fedplan.language.resolution import permitted, resolve
from fedplan.language.turn import Turn
from fedplan.methods.method import Method
from fedplan.methods.phases import Planned
from fedplan.methods.server_optimiser import mean
from fedplan.models.description import describe
from fedplan.models.values import take
from fedplan.reports.forecasts import forecast
from fedplan.runners.local import Federation
from fedplan.storage.lines import read_lines
from fedplan.tensors.devices import forked
from fedplan.tensors.named import digests, nbytes
from fedplan.tensors.riders import is_rider, param_of
from fedplan.tensors.sums import GRID
from fedplan.training.fit import Job, Pace, plain
from fedplan.training.optimisers import adamw

ROUNDS = 3
PACE = Pace(adamw(decay=0.1), rate=1e-2, batch=2, steps=2)


def check_method(
    method: Method, model: nn.Module, rows: Mapping[str, Examples], loss: Loss
) -> None:
    """Run a method for a few rounds on a model, and raise AssertionError where a law is broken.

    Give it two or more clients' rows. The model is not touched.
    """
    if len(rows) < 2:
        raise ValueError("the laws need two or more clients")
    before = {n: t.clone() for n, t in model.named_parameters()}
    for law in LAWS:
        with TemporaryDirectory() as folder:
            law(_Case(method, model, rows, loss, Path(folder)))
    for name, tensor in model.named_parameters():
        assert torch.equal(tensor, before[name]), f"the caller's model was touched at {name}"


class _Case:
    """A method on a copy of a model, ready to be played."""

    def __init__(
        self,
        method: Method,
        model: nn.Module,
        rows: Mapping[str, Examples],
        loss: Loss,
        folder: Path,
    ) -> None:
        self.method, self.rows, self.loss, self.folder = method, rows, loss, folder
        self.model = copy.deepcopy(model)
        if method.adapt is not None:
            with forked(seed=0):
                self.model = method.adapt(self.model)
        self.agreement = Agreement("laws", describe(self.model), method, PACE)

    def federation(
        self, where: str = "a", *, rows: Mapping[str, Examples] | None = None
    ) -> Federation:
        return Federation(
            self.agreement,
            copy.deepcopy(self.model),
            rows or self.rows,
            self.loss,
            self._folder(where),
            rounds=ROUNDS,
            replies=where != "b",
        )

    def _folder(self, where: str) -> Path:
        (self.folder / where).mkdir(exist_ok=True)
        return self.folder / where

    def roles(self, turn: Turn) -> dict[str, Role]:
        found = permitted(self.method.plan, self.agreement.params, turn)
        return {p.key: role for p, role in found.items()}


def law_sent_is_shared_and_own_is_in_no_message(case: _Case) -> None:
    """What goes up is SHARE; of what is a client's own, the federation's value comes down once."""
    federation, settled = case.federation(), {name: set[str]() for name in case.rows}
    for _ in range(ROUNDS):
        tally = federation.round()
        assert not tally.rejected, tally.rejected
        for client, request in tally.cohort.items():
            may, line = case.roles(request.turn), tally.lines[client]
            roles = dict(zip(may, (ROLES[letter] for letter in line.roles), strict=True))
            answered = federation.clients[client].journal.answered(request.name)
            assert answered is not None
            sent = {param_of(k) for k in answered[0]}
            assert sent == {k for k, role in roles.items() if role is Role.SHARE}
            assert sent <= {k for k, role in may.items() if role is Role.SHARE}
            own = {k for k, role in roles.items() if role.own}
            came = own & {param_of(k) for k in request.values}
            assert not came & settled[client] and all(request.versions[k] > 0 for k in came)
            settled[client] |= own
        federation.commit(tally)


def law_the_ledger_proves_what_rested(case: _Case) -> None:
    """Frozen and held params keep their bits, and the ledger shows it, with the bytes explained."""
    federation = case.federation()
    for _ in range(ROUNDS):
        federation.commit(federation.round())
    lines = read_lines(case.folder / "a" / "ledger.jsonl")
    assert not verify_lines(case.agreement, lines)


def law_a_param_is_the_mean_over_its_own_senders(case: _Case) -> None:
    """A param nobody sent keeps its value; one sent by one of two is that client's own."""
    federation = case.federation()
    one, *_ = federation.clients
    agreement = replace(federation.agreement, method=replace(case.method, server_optimiser=mean()))
    federation.server.agreement = agreement  # both ends agree on the server optimiser, too
    world = World.start(agreement, federation.server.start)
    tally = Tally({one: push(agreement, world, one, {})}, PlainSum(agreement, world.values, 2))
    federation.ask(tally)
    update = local(agreement, federation.clients[one], tally.cohort[one])
    pull(agreement, world, tally, update)
    after = close(agreement, world, tally, tally.total.close(), later=set())
    base = {k: world.values[k] for k in {param_of(k) for k in update.values}}
    sent = agreement.method.wire.decode(update.values, base)
    for key, value in world.values.items():
        if not is_rider(key):
            assert torch.allclose(after.values[key], sent.get(key, value), rtol=0, atol=GRID), key


def law_each_gets_what_it_lacks(case: _Case) -> None:
    """Who missed rounds gets every part it lacks; who is up to date gets nothing it has."""
    federation = case.federation()
    late, *rest = federation.clients
    sites = {name: federation.clients[name] for name in rest}
    world, agreement = federation.world, federation.agreement
    for _ in range(2):
        world = announced(agreement, world)
        total = PlainSum(agreement, world.values, len(rest) + 1)
        tally = Tally({name: push(agreement, world, name, {}) for name in rest}, total)
        federation.ask(tally)
        for name in rest:
            pull(
                agreement,
                world,
                tally,
                local(agreement, sites[name], tally.cohort[name]),
            )
        world = close(agreement, world, tally, total.close(), later=set())
    request = push(agreement, announced(agreement, world), late, {})
    roles, lacking = case.roles(request.turn), set(request.values)
    here = {p.key for p in agreement.folded}  # it has these from the start
    assert {k for k in lacking if not is_rider(k)} == {
        p.key
        for p in agreement.movable
        if not (roles[p.key].own or p.key in here) or world.versions[p.key]
    }
    for name in rest:
        for key, version in push(agreement, world, name, {}).versions.items():
            assert version > world.known_by(name).get(key, -1)


def law_one_client_that_shares_all_is_plain_training(case: _Case) -> None:
    """One client and share() are plain local training."""
    changed = case.method.wraps or case.method.loop is not plain
    if case.method.plan != share() or case.method.server_optimiser != mean() or changed:
        return
    name = next(iter(case.rows))
    federation = case.federation(rows={name: case.rows[name]})
    plain_model = copy.deepcopy(case.model)
    for number in (1, 2):
        federation.commit(federation.round())
        _train_plainly(case, plain_model, name, number)
    expected = take(plain_model, case.agreement.params)
    # Values below the sum's grid are rounded to it, which later steps may carry on.
    for key, value in federation.world_values().items():
        assert torch.allclose(value, expected[key], rtol=1e-5, atol=1e-7), key


def _train_plainly(case: _Case, model: nn.Module, name: str, number: int) -> None:
    from fedplan import seeds

    turn = Turn(round=number, client=name)
    plain(
        Job(
            model=model,
            roles=resolve(share(), case.agreement.params, turn),
            rows=case.rows[name],
            loss=case.loss,
            pace=PACE,
            seed=seeds.seed("laws", "fit", number, name),
            start={},
        )
    )


def law_the_same_again_is_the_same(case: _Case) -> None:
    """The same seed gives the same bits; the same request the same reply, home advanced once."""
    one, two = case.federation("a"), case.federation("b")
    for _ in range(ROUNDS):
        before = {name: one.clients[name] for name in one.clients}
        tally = one.round()
        for name, request in tally.cohort.items():
            site = before[name]
            home = digests(site.journal.home()[0])
            again = local(one.agreement, site, request)
            assert digests(site.journal.home()[0]) == home
            assert again.line == tally.lines[name].json()
        one.commit(tally)
        two.commit(two.round())
    assert digests(one.world.values) == digests(two.world.values)
    for name in one.clients:
        assert digests(one.clients[name].journal.home()[0]) == digests(
            two.clients[name].journal.home()[0]
        )


def law_bytes_are_those_explained(case: _Case) -> None:
    """The bytes of each message are those that the forecast says, or within its bounds."""
    announce = case.method.announce
    after = dict(announce.after) if isinstance(announce, Planned) else dict[str, int]()
    phases = {name: number for name, number in after.items() if number < ROUNDS}
    crowd = Crowd({name: {} for name in case.rows})
    plan, params, fare = case.method.plan, case.agreement.params, case.agreement.fare
    expected = forecast(plan, params, rounds=ROUNDS, phases=phases, crowd=crowd, fare=fare)
    view, *others = expected.views
    if not isinstance(announce, Planned) or others:
        return
    federation = case.federation()
    for up, request in zip(view.ups, view.downs, strict=True):
        tally = federation.round()
        for client, line in tally.lines.items():
            assert up[0] <= line.up <= up[1], (client, up, line.up)
            assert request[0] <= nbytes(tally.cohort[client].values) <= request[1], (
                client,
                request,
            )
        federation.commit(tally)


LAWS = (
    law_sent_is_shared_and_own_is_in_no_message,
    law_the_ledger_proves_what_rested,
    law_a_param_is_the_mean_over_its_own_senders,
    law_each_gets_what_it_lacks,
    law_one_client_that_shares_all_is_plain_training,
    law_the_same_again_is_the_same,
    law_bytes_are_those_explained,
)
