# SPDX-License-Identifier: Apache-2.0
"""Rounds: the server's side: push what each client lacks, pull what it hands back, close."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import fsum, isfinite
from typing import Any

import torch
from torch import Tensor

from fedplan.agreement import Setup, basis
from fedplan.drift import Drift
from fedplan.errors import FedplanError
from fedplan.exchange import Down, Rejected, Update, nbytes
from fedplan.failpoints import reach
from fedplan.params import Block
from fedplan.phases import Sign
from fedplan.plan import Role
from fedplan.privacy.aggregate import Mechanism
from fedplan.resolution import certain, permitted
from fedplan.state import Tensors
from fedplan.sums import ExactSum
from fedplan.turn import Turn


@dataclass(frozen=True)
class World:
    """The federation's values, each with the round that last changed it.

    `known` says which version of what each client has, `settled` which params it has as its own
    (`Setup.owned`), and `heard` when it last answered; `memory` is the serve's; `drift` that of the
    last round; `choice` are the scores of the last vote, and `clip` is the bound that follows the
    clients' changes, if any does. Version 0 is the value that a model starts with: of the
    federation's params it travels at first contact, riders start at zero.
    """

    values: dict[str, Tensor]
    versions: dict[str, int]
    round: int = 0
    phase: str = ""
    known: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    memory: dict[str, dict[str, Tensor]] = field(default_factory=dict[str, dict[str, Tensor]])
    drift: dict[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    heard: dict[str, int] = field(default_factory=dict[str, int])
    choice: dict[Block, float] = field(default_factory=dict[Block, float])
    clip: float = 0.0
    settled: dict[str, int] = field(default_factory=dict[str, int])

    @staticmethod
    def start(setup: Setup, values: Tensors) -> World:
        """The world as a model starts it: of its values, those that may travel."""
        values = {p.key: values[p.key] for p in setup.movable}
        riders = {
            k + r: torch.zeros_like(v) for k, v in values.items() for r in setup.method.riders
        }
        return World(values | riders, dict.fromkeys(values | riders, 0))


def announced(setup: Setup, world: World) -> World:
    """The world with the phase of the round to come."""
    return replace(
        world, phase=setup.method.announce(Sign(world.round + 1, world.phase, world.drift))
    )


def push(
    setup: Setup, world: World, client: str, traits: Mapping[str, str], *, anew: bool = False
) -> Down:
    """What a client lacks for the next round, and nothing else; `anew`, all that it needs."""
    number = world.round + 1
    turn = Turn(round=number, client=client, phase=world.phase, traits=dict(traits))
    known = world.known.get(client, {}) if not anew else {}
    wanted = setup.wanted(turn, world.settled.get(client, 0) if not anew else 0)
    lacking = [k for k, first in wanted.items() if known.get(k, first) < world.versions[k]]
    return Down(
        request=setup.request(number, client),
        agreed=setup.fingerprint,
        turn=turn,
        values={k: world.values[k] for k in lacking},
        versions={k: world.versions[k] for k in lacking},
        basis=basis({k: world.versions[k] for k in wanted}),
        heard=world.heard.get(client, 0),
        anew=anew,
    )


@dataclass
class Tally:
    """An open round: the running sums, and who was counted or rejected, with the reason.

    `vain` are bytes that went down to sites that could not use them. A `mechanism` hides each
    client: what is summed are then clipped changes, and every client counts alike; `within` are
    those that were short enough.
    """

    cohort: dict[str, Down]
    mechanism: Mechanism | None = None
    sums: ExactSum = field(default_factory=ExactSum)
    drift: Drift = field(default_factory=Drift)
    riders: ExactSum = field(default_factory=ExactSum)
    weight: int = 0
    vain: int = 0
    within: int = 0
    counted: list[str] = field(default_factory=list[str])
    heard: list[str] = field(default_factory=list[str])
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    lines: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


def summed(polled: Iterable[Mapping[Block, float]]) -> dict[Block, float]:
    """The sum of clients' scores; those that are not numbers are left out."""
    sound = [scores for scores in polled if all(map(isfinite, scores.values()))]
    blocks = dict.fromkeys(block for scores in sound for block in scores)
    return {block: fsum(s[block] for s in sound if block in s) for block in blocks}


def settle(tally: Tally, scores: Mapping[Block, float]) -> None:
    """Have all clients of a round choose by the same scores."""
    for client, down in tally.cohort.items():
        tally.cohort[client] = replace(down, turn=replace(down.turn, scores=scores))


def pull(setup: Setup, world: World, tally: Tally, update: Update) -> None:
    """Count one update, or write down why not."""
    try:
        values, riders = _checked(setup, world, tally, update)
        if tally.mechanism is not None:
            tally.within += tally.mechanism.add(tally.sums, _change(values, world.values))
        else:
            tally.sums.add(values, update.weight)
            tally.drift.add(values, world.values, update.weight)
        if riders:
            tally.riders.add(riders, 1)
    except FedplanError as error:
        tally.rejected.setdefault(str(update.client), str(error).splitlines()[0])
        return
    tally.counted.append(update.client)
    tally.weight += update.weight
    hear(tally, update)
    reach("round.pulled")


def _change(values: Tensors, world: Tensors) -> dict[str, Tensor]:
    return {key: value.double() - world[key].double() for key, value in values.items()}


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
    _require_line(update, world.round + 1)
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


def _require_line(update: Update, number: int) -> None:
    """A client's line goes into the ledger as it is: what is counted from it must be there."""
    line = update.line
    said = (line.get("round"), line.get("client"), line.get("weight"))
    if said != (number, update.client, update.weight):
        raise Rejected("its line is of another turn")
    if any(type(line.get(way)) is not int for way in ("up", "down", "steps")):
        raise Rejected("its line does not count bytes and steps")
    if type(line.get("loss")) not in (float, type(None)) or not isfinite(line["loss"] or 0.0):
        raise Rejected("its line has no loss that is a number")


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


def close(
    setup: Setup,
    world: World,
    tally: Tally,
    *,
    roster: int,
    later: set[str],
    released: Tensors | None = None,
    clip: float = 0.0,
) -> World:
    """The world after a round: each param is the mean over its senders, then served.

    `later` are the keys that some later round may move: of others the serve remembers nothing.
    `released` are the changes of a round that hides its clients, and `clip` the next one's bound.
    """
    number = world.round + 1
    values, versions = dict(world.values), dict(world.versions)
    memory = {k: m for k, m in world.memory.items() if k in later}
    if released is not None:
        means, weights = {k: values[k] + change for k, change in released.items()}, {}
    else:
        means, weights = tally.sums.mean(), tally.sums.weights()
    for key, mean in means.items():
        if setup.method.absent and weights.get(key, tally.weight) < tally.weight:
            mean = torch.lerp(values[key], mean, weights[key] / tally.weight)
        values[key], fresh = setup.method.serve.step(values[key], mean, world.memory.get(key, {}))
        versions[key] = number
        if fresh and key in later:
            memory[key] = fresh
    over = dict.fromkeys(tally.riders.weights(), roster)
    for key, change in tally.riders.mean(over).items():
        values[key], versions[key] = values[key] + change, number
    known, settled = dict(world.known), dict(world.settled)
    for client in tally.heard:
        down = tally.cohort[client]
        known[client] = {**({} if down.anew else known.get(client, {})), **down.versions}
        before = 0 if down.anew else settled.get(client, 0)
        settled[client] = before | setup.owned(down.turn)
    heard = world.heard | dict.fromkeys(tally.heard, number)
    # How far clients were apart is a release of its own, that nobody has paid for.
    hidden = released is not None
    drift = {} if hidden else tally.drift.by_kind(setup.params, world.values, means, weights)
    return World(
        values,
        versions,
        number,
        world.phase,
        known,
        memory,
        drift,
        heard,
        world.choice,
        clip,
        settled,
    )
