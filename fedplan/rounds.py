# SPDX-License-Identifier: Apache-2.0
"""Rounds: push, local, pull. One round of a federation, without any transport."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from fedplan import streams
from fedplan.agreement import Setup
from fedplan.errors import FedplanError
from fedplan.failpoints import reach
from fedplan.fit import Done, Examples, Job
from fedplan.journal import Journal
from fedplan.ledger import Digests, digest, joined, spelled
from fedplan.params import Block
from fedplan.plan import Best, Role, Roles
from fedplan.probe import Look
from fedplan.resolution import certain, permitted, resolve
from fedplan.state import Tensors, put, take
from fedplan.sums import ExactSum
from fedplan.turn import Turn


class Refused(FedplanError):
    """A client's answer to a server that asks for what was not agreed."""


class Rejected(FedplanError):
    """A server's reason not to count one update. The round goes on with the others."""


@dataclass(frozen=True)
class World:
    """The federation's values, each with the round that last changed it.

    `known` says which version of what each client has; `memory` is the serve's. Version 0 is the
    value that a model starts with: of params it travels at first contact, riders start at zero.
    """

    values: dict[str, Tensor]
    versions: dict[str, int]
    round: int = 0
    phase: str = ""
    known: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])

    @staticmethod
    def start(setup: Setup, model: nn.Module) -> World:
        """The world as a model starts it."""
        values = take(model, setup.movable)
        riders = {
            k + r: torch.zeros_like(v) for k, v in values.items() for r in setup.method.riders
        }
        return World(values | riders, dict.fromkeys(values | riders, 0))


@dataclass(frozen=True)
class Down:
    """What the server sends one client: what it asks, and the values that the client lacks."""

    request: str
    agreed: str
    turn: Turn
    values: dict[str, Tensor]
    versions: dict[str, int]

    @property
    def nbytes(self) -> int:
        return nbytes(self.values)


@dataclass(frozen=True)
class Update:
    """What a client hands back: coded values, its weight, and its line of the ledger."""

    client: str
    request: str
    agreed: str
    values: dict[str, Tensor]
    weight: int
    line: dict[str, Any]

    @property
    def nbytes(self) -> int:
        return nbytes(self.values)


def nbytes(values: Tensors) -> int:
    """The bytes of some values, without any header."""
    return sum(v.numel() * v.element_size() for v in values.values())


def push(setup: Setup, world: World, client: str, traits: Mapping[str, str]) -> Down:
    """What a client lacks for the next round, and nothing else."""
    number = world.round + 1
    turn = Turn(round=number, client=client, phase=world.phase, traits=dict(traits))
    roles = permitted(setup.method.plan, setup.params, turn)
    known = world.known.get(client, {})
    wanted = {p.key: -1 for p in setup.movable if not roles[p].own}
    wanted |= {
        p.key + rider: 0
        for p in setup.movable
        for rider in setup.method.riders
        if roles[p] is Role.SHARE
    }
    lacking = [k for k, first in wanted.items() if known.get(k, first) < world.versions[k]]
    return Down(
        request=setup.request(number, client),
        agreed=setup.fingerprint,
        turn=turn,
        values={k: world.values[k] for k in lacking},
        versions={k: world.versions[k] for k in lacking},
    )


@dataclass
class Site:
    """One client: its rows, what it has seen of the world, and the journal of what it keeps."""

    name: str
    rows: Examples
    journal: Journal
    model: nn.Module
    start: dict[str, Tensor]
    marks: dict[str, str]
    loss: Any
    traits: dict[str, str] = field(default_factory=dict[str, str])
    seen: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    digests: Digests = field(default_factory=Digests)


def local(setup: Setup, site: Site, down: Down) -> Update:
    """A client's turn: it obeys its own copy of the plan, and answers the same request the same."""
    if down.agreed != setup.fingerprint or down.request != setup.request(
        down.turn.round, site.name
    ):
        raise Refused(f"{site.name} agreed to {setup.fingerprint}, and is asked for {down.request}")
    site.seen |= down.values
    values, line = site.journal.answered(down.request) or _train(setup, site, down)
    return Update(site.name, down.request, setup.fingerprint, values, line["weight"], line)


def _train(setup: Setup, site: Site, down: Down) -> tuple[dict[str, Tensor], dict[str, Any]]:
    home, notes = site.journal.home(down.request)
    turn = replace(down.turn, client=site.name, traits=site.traits)
    # Scores never change whose a param is, so the values to start from are known before them.
    before = _values(setup, site, permitted(setup.method.plan, setup.params, turn), home)
    put(site.model, before, setup.trainable)
    turn = replace(turn, scores=_scores(setup, site, turn))
    roles = resolve(setup.method.plan, setup.params, turn)
    done = _fit(setup, site, turn, roles, before, home)
    after = take(site.model, setup.trainable)
    marks = _require_still(setup, site, roles, before, after, notes.get("marks", {}))
    shared = {p.key: after[p.key] for p in setup.trainable if roles[p] is Role.SHARE}
    stream = streams.generator(setup.experiment, "wire", turn.round, site.name)
    coded = setup.method.wire.encode(shared, {k: before[k] for k in shared}, stream)
    reply = {**coded, **done.riders}
    own = {p.key: after[p.key] for p in setup.trainable if roles[p].own}
    line = _line(setup, site, down, roles, marks, done)
    line |= {"up": nbytes(reply), "scores": _listed(turn)}
    notes = {"marks": notes.get("marks", {}) | {k: marks[1][k] for k in own}}
    kept = {k: v for k, v in home.items() if k not in own and k not in done.memory}
    site.journal.commit(down.request, {**kept, **own, **done.memory}, notes, reply, line)
    return reply, line


def _values(setup: Setup, site: Site, roles: Roles, home: Tensors) -> dict[str, Tensor]:
    """Each trainable param's value at the start of a turn: the client's own, or the world's."""
    return {
        p.key: home.get(p.key, site.start[p.key])
        if roles[p].own
        else site.seen.get(p.key, site.start[p.key])
        for p in setup.trainable
    }


def _scores(setup: Setup, site: Site, turn: Turn) -> Mapping[Block, float] | None:
    """What the client's probe says of each block, if the plan asks in this turn."""
    if not any(isinstance(step, Best) for step in setup.method.plan.settle(turn)):
        return None
    blocks = tuple(dict.fromkeys(p.at for p in setup.params if p.at))
    seed = streams.seed(setup.experiment, "probe", turn.round, site.name)
    return setup.method.probe(Look(site.model, site.rows, blocks, seed))


def _listed(turn: Turn) -> list[Any] | None:
    return [[*block, score] for block, score in turn.scores.items()] if turn.scores else None


def _fit(
    setup: Setup, site: Site, turn: Turn, roles: Roles, before: Tensors, home: Tensors
) -> Done:
    job = Job(
        model=site.model,
        roles=roles,
        rows=site.rows,
        loss=site.loss,
        pace=setup.pace,
        seed=streams.seed(setup.experiment, "fit", turn.round, site.name),
        start=before,
        riders={k: v for k, v in site.seen.items() if "#" in k},
        memory={k: v for k, v in home.items() if "#" in k},
    )
    return setup.method.fit(job)


def _require_still(
    setup: Setup,
    site: Site,
    roles: Roles,
    before: Tensors,
    after: Tensors,
    own_marks: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Digests of every param before and after a turn; one that rested and moved is a fault."""
    was, now = dict(site.marks), dict(site.marks)
    for p in setup.trainable:
        key = p.key
        if before[key] is not site.start[key]:
            was[key] = (
                own_marks[key]
                if roles[p].own and key in own_marks
                else site.digests.of(before[key])
            )
        now[key] = digest(after[key]) if roles[p].trained else was[key]
        if not roles[p].trained and not torch.equal(before[key], after[key]):
            raise FedplanError(f"{key} is {roles[p].name} and moved: the fit broke the plan")
    resting = [p for p in setup.params if p.key not in before]
    tensors = dict(site.model.named_parameters())
    for p in resting:
        if not torch.equal(p.view(tensors[p.name]), site.start[p.key]):
            raise FedplanError(f"{p.key} is trained by no turn of the plan, and moved")
    return was, now


def _line(
    setup: Setup,
    site: Site,
    down: Down,
    roles: Roles,
    marks: tuple[dict[str, str], dict[str, str]],
    done: Done,
) -> dict[str, Any]:
    """One turn of one client, as the ledger says it."""
    return {
        "round": down.turn.round,
        "client": site.name,
        "phase": down.turn.phase,
        "traits": site.traits,
        "roles": spelled(roles),
        "before": joined(setup.params, marks[0]),
        "after": joined(setup.params, marks[1]),
        "down": down.nbytes,
        "weight": len(site.rows),
        "steps": done.steps,
        "loss": done.loss if isfinite(done.loss) else None,
    }


@dataclass
class Tally:
    """An open round: the running sums, and who was counted or rejected, with the reason."""

    cohort: dict[str, Down]
    sums: ExactSum = field(default_factory=ExactSum)
    riders: ExactSum = field(default_factory=ExactSum)
    counted: list[str] = field(default_factory=list[str])
    heard: list[str] = field(default_factory=list[str])
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    lines: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


def pull(setup: Setup, world: World, tally: Tally, update: Update) -> None:
    """Count one update, or write down why not."""
    try:
        values, riders = _checked(setup, world, tally, update)
        tally.sums.add(values, update.weight)
        if riders:
            tally.riders.add(riders, 1)
    except FedplanError as error:
        tally.rejected.setdefault(str(update.client), str(error).splitlines()[0])
        return
    tally.counted.append(update.client)
    hear(tally, update)
    reach("round.pulled")


def hear(tally: Tally, update: Update) -> None:
    """Note that a client has received what it was sent, whether or not its update counts."""
    tally.heard.append(update.client)
    tally.lines[update.client] = update.line


def _checked(
    setup: Setup, world: World, tally: Tally, update: Update
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """An update's values and riders, if every one of them is what was asked for."""
    down = tally.cohort.get(update.client)
    if down is None:
        raise Rejected(f"{update.client!r} was not asked in this round")
    if update.client in tally.counted:
        raise Rejected(f"{update.client!r} was counted before")
    if (update.request, update.agreed) != (down.request, down.agreed):
        raise Rejected(f"it answers {update.request!r}, and {down.request!r} was asked")
    if type(update.weight) is not int or not 0 < update.weight < 2**40:
        raise Rejected(f"weight {update.weight!r} is not a positive whole number")
    budget = 2 * nbytes(world.values) + 2**20
    if update.nbytes > budget:
        raise Rejected(f"{update.nbytes} bytes are more than the {budget} that can be asked for")
    suffixes = setup.method.riders
    riders = {k: v for k, v in update.values.items() if k.endswith(suffixes) and suffixes}
    coded = {k: v for k, v in update.values.items() if k not in riders}
    sent = {k.partition("#")[0] for k in coded}
    if strange := sent - world.values.keys():
        raise Rejected(f"{min(strange)!r} is not among what travels")
    values = setup.method.wire.decode(coded, {k: world.values[k] for k in sent})
    _require_asked(setup, world, down.turn, values, riders)
    return values, riders


def _require_asked(
    setup: Setup, world: World, turn: Turn, values: Tensors, riders: Tensors
) -> None:
    most = permitted(setup.method.plan, setup.params, turn)
    least = certain(setup.method.plan, setup.params, turn)
    may = {p.key for p in setup.params if most[p] is Role.SHARE}
    must = {p.key for p in setup.params if least[p] is Role.SHARE}
    if extra := values.keys() - may:
        raise Rejected(f"{min(extra)!r} is not among what this client may share")
    if missing := must - values.keys():
        raise Rejected(f"{min(missing)!r} is missing")
    if set(riders) != {k + r for k in values for r in setup.method.riders}:
        raise Rejected("the riders are not those of the shared params")
    for key, value in {**values, **riders}.items():
        wanted = world.values[key]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise Rejected(
                f"{key!r} is {value.dtype} {tuple(value.shape)}, "
                f"not {wanted.dtype} {tuple(wanted.shape)}"
            )


def close(setup: Setup, world: World, tally: Tally, *, roster: int, later: set[str]) -> World:
    """The world after a round: each param is the mean over its own senders, then served.

    `later` are the keys that some later round may move: of others the serve remembers nothing.
    """
    number = world.round + 1
    values, versions = dict(world.values), dict(world.versions)
    memory = {k: m for k, m in world.memory.items() if k in later}
    for key, mean in tally.sums.mean().items():
        values[key], fresh = setup.method.serve.step(values[key], mean, world.memory.get(key, {}))
        versions[key] = number
        if fresh and key in later:
            memory[key] = fresh
    over = dict.fromkeys(tally.riders.weights(), roster)
    for key, change in tally.riders.mean(over).items():
        values[key], versions[key] = values[key] + change, number
    known = dict(world.known)
    for client in tally.heard:
        known[client] = {**known.get(client, {}), **tally.cohort[client].versions}
    return World(values, versions, number, world.phase, known, memory)
