# SPDX-License-Identifier: Apache-2.0
"""Rounds: the server's side: push what each client lacks, pull what it hands back, close."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import fsum

import torch
from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.agreement import Agreement, basis
from fedplan.federation.claims import require_marks, require_turn
from fedplan.federation.drift import Drift
from fedplan.federation.messages import Rejected, Request, Update
from fedplan.federation.record import LARGEST_SCORE, TurnRecord, read_turn
from fedplan.federation.world import World
from fedplan.language.plan import Role
from fedplan.language.resolution import certain, permitted
from fedplan.language.turn import Turn
from fedplan.methods.phases import Sign
from fedplan.models.params import Block
from fedplan.privacy.mechanisms.gaussian import Mechanism
from fedplan.storage.failpoints import reach
from fedplan.tensors.named import Digests, Tensors, nbytes
from fedplan.tensors.sums import ExactSum


def announced(agreement: Agreement, world: World) -> World:
    """The world with the phase of the round to come."""
    return replace(
        world, phase=agreement.method.announce(Sign(world.round + 1, world.phase, world.drift))
    )


def push(
    agreement: Agreement,
    world: World,
    client: str,
    traits: Mapping[str, str],
    *,
    anew: bool = False,
) -> Request:
    """What a client lacks for the next round, and nothing else; `anew`, all that it needs."""
    number = world.round + 1
    turn = Turn(round=number, client=client, phase=world.phase, traits=dict(traits))
    known = world.known.get(client, {}) if not anew else {}
    wanted = agreement.wanted(turn, world.settled.get(client, 0) if not anew else 0)
    lacking = [k for k, first in wanted.items() if known.get(k, first) < world.versions[k]]
    return Request(
        name=agreement.request(number, client),
        agreed=agreement.fingerprint,
        turn=turn,
        values={k: world.values[k] for k in lacking},
        versions={k: world.versions[k] for k in lacking},
        basis=basis({k: world.versions[k] for k in wanted}),
        heard=world.heard.get(client, 0),
        anew=anew,
        run=agreement.run,
    )


@dataclass
class Tally:
    """An open round: the running sums, and who was counted or rejected, with the reason.

    `vain` are bytes that went down to sites that could not use them; what `late` clients say is
    heard and counts nowhere. A `mechanism` hides each client: what is summed are then clipped
    changes, and every client counts alike; `within` are those that were short enough. `marks` are
    the digests of what the model starts with.
    """

    cohort: dict[str, Request]
    mechanism: Mechanism | None = None
    late: frozenset[str] = frozenset()
    marks: Mapping[str, str] = field(default_factory=dict[str, str])
    digests: Digests = field(default_factory=Digests)
    sums: ExactSum = field(default_factory=ExactSum)
    drift: Drift = field(default_factory=Drift)
    riders: ExactSum = field(default_factory=ExactSum)
    weight: int = 0
    vain: int = 0
    within: int = 0
    counted: list[str] = field(default_factory=list[str])
    heard: list[str] = field(default_factory=list[str])
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    lines: dict[str, TurnRecord] = field(default_factory=dict[str, TurnRecord])


@dataclass(frozen=True)
class Sound:
    """An update of which everything was checked."""

    values: dict[str, Tensor]
    riders: dict[str, Tensor]
    record: TurnRecord


def summed(polled: Iterable[Mapping[Block, float]]) -> dict[Block, float]:
    """The sum of clients' scores; those that are not numbers, or too large to add, are left out."""
    sound = [s for s in polled if all(abs(score) <= LARGEST_SCORE for score in s.values())]
    blocks = dict.fromkeys(block for scores in sound for block in scores)
    return {block: fsum(s[block] for s in sound if block in s) for block in blocks}


def settle(tally: Tally, scores: Mapping[Block, float]) -> None:
    """Have all clients of a round choose by the same scores."""
    for client, request in tally.cohort.items():
        tally.cohort[client] = replace(request, turn=replace(request.turn, scores=scores))


def pull(agreement: Agreement, world: World, tally: Tally, update: Update) -> None:
    """Count one update, or write down why not: all of it is checked before any of it is added."""
    client = str(update.client)
    try:
        sound = _checked(agreement, world, tally, update)
        if client not in tally.late:
            _add(world, tally, sound, update.weight)
    except FedplanError as error:
        _reject(tally, client, str(error).splitlines()[0][:300])
        return
    tally.heard.append(client)
    tally.lines[client] = sound.record
    if client not in tally.late:
        tally.counted.append(client)
        tally.weight += update.weight
    reach("round.pulled")


def _reject(tally: Tally, client: str, reason: str) -> None:
    if client in tally.late and client not in tally.heard:
        tally.rejected[client] = f"late, and {reason}"
    else:
        tally.rejected.setdefault(client, reason)


def _add(world: World, tally: Tally, sound: Sound, weight: int) -> None:
    """Add values and riders, or neither: only the first of these calls can refuse anything."""
    if tally.mechanism is not None:
        tally.within += tally.mechanism.add(tally.sums, _change(sound.values, world.values))
    else:
        tally.sums.add(sound.values, weight)
        tally.drift.add(sound.values, world.values, weight)
    if sound.riders:
        tally.riders.add(sound.riders, 1)


def _change(values: Tensors, world: Tensors) -> dict[str, Tensor]:
    return {key: value.double() - world[key].double() for key, value in values.items()}


def _checked(agreement: Agreement, world: World, tally: Tally, update: Update) -> Sound:
    """An update's values, riders and record, if every one of them is what was asked for."""
    request = tally.cohort.get(update.client)
    if request is None:
        raise Rejected(f"{update.client!r} was not asked in this round")
    if update.client in tally.heard:
        raise Rejected(f"{update.client!r} was counted before")
    if (update.request, update.agreed) != (request.name, request.agreed):
        raise Rejected(f"it answers {update.request!r}, and {request.name!r} was asked")
    if type(update.weight) is not int or not 0 < update.weight < 2**40:
        raise Rejected(f"weight {update.weight!r} is not a positive whole number")
    budget = 2 * nbytes(world.values) + 2**20
    if update.nbytes > budget:
        raise Rejected(f"{update.nbytes} bytes are more than the {budget} that can be asked for")
    values, riders = _decoded(agreement, world, update)
    _require_asked(agreement, world, request.turn, values, riders)
    _require_added(world, tally, values, riders, update.weight)
    return Sound(values, riders, _record(agreement, world, tally, update, values))


def _decoded(
    agreement: Agreement, world: World, update: Update
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    suffixes = agreement.method.riders
    riders = {k: v for k, v in update.values.items() if k.endswith(suffixes) and suffixes}
    coded = {k: v for k, v in update.values.items() if k not in riders}
    sent = {k.partition("#")[0] for k in coded}
    if strange := sent - {k for k in world.values if "#" not in k}:
        raise Rejected(f"{min(strange)!r} is not among what travels")
    return agreement.method.wire.decode(coded, {k: world.values[k] for k in sent}), riders


def _record(
    agreement: Agreement, world: World, tally: Tally, update: Update, values: Tensors
) -> TurnRecord:
    """A client's record, if it fits all that the server knows."""
    request, record = tally.cohort[update.client], read_turn(update.line)
    roles = require_turn(agreement, request, update, record)
    if set(values) != {p.key for p, role in roles.items() if role is Role.SHARE}:
        raise Rejected("its record says that other params were shared than came")
    # An answer may be from before it was asked anew, or from when it was.
    if record.anew != request.anew:
        request = push(agreement, world, update.client, request.turn.traits, anew=record.anew)
    if record.down != (came := sum(agreement.sizes[key] for key in request.versions)):
        raise Rejected(f"its record says that {record.down} bytes came down, and {came} did")

    def known(key: str) -> str | None:
        held = world.values.get(key)
        return tally.marks.get(key) if held is None else tally.digests.of(held)

    require_marks(agreement, record, roles, values, known)
    return record


def _require_asked(
    agreement: Agreement, world: World, turn: Turn, values: Tensors, riders: Tensors
) -> None:
    most = permitted(agreement.method.plan, agreement.params, turn)
    least = certain(agreement.method.plan, agreement.params, turn)
    may = {p.key for p in agreement.params if most[p] is Role.SHARE}
    must = {p.key for p in agreement.params if least[p] is Role.SHARE}
    if extra := values.keys() - may:
        raise Rejected(f"{min(extra)!r} is not among what this client may share")
    if missing := must - values.keys():
        raise Rejected(f"{min(missing)!r} is missing")
    if set(riders) != {k + r for k in values for r in agreement.method.riders}:
        raise Rejected("the riders are not those of the shared params")
    for key, value in {**values, **riders}.items():
        wanted = world.values[key]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise Rejected(
                f"{key!r} is {value.dtype} {tuple(value.shape)}, "
                f"not {wanted.dtype} {tuple(wanted.shape)}"
            )


def _require_added(
    world: World, tally: Tally, values: Tensors, riders: Tensors, weight: int
) -> None:
    """Refuse what cannot be summed, or would make a rider of the world that is no number."""
    if tally.mechanism is None:
        tally.sums.require(values, weight)
    tally.riders.require(riders, 1)
    for key, change in riders.items():
        if not bool((world.values[key] + change).isfinite().all()):
            raise Rejected(f"{key!r} is too large to be added to what it was")


def close(
    agreement: Agreement,
    world: World,
    tally: Tally,
    *,
    roster: int,
    later: set[str],
    released: Tensors | None = None,
    clip: float = 0.0,
) -> World:
    """The world after a round: each param is the mean over its senders, then served.

    `later` are the keys that some later round may move: of others nothing is remembered.
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
        if agreement.method.absent and weights.get(key, tally.weight) < tally.weight:
            mean = torch.lerp(values[key], mean, weights[key] / tally.weight)
        values[key], fresh = agreement.method.server_optimiser(
            values[key], mean, world.memory.get(key, {})
        )
        versions[key] = number
        if fresh and key in later:
            memory[key] = fresh
    over = dict.fromkeys(tally.riders.weights(), roster)
    for key, change in tally.riders.mean(over).items():
        values[key], versions[key] = values[key] + change, number
    known, settled = dict(world.known), dict(world.settled)
    for client in tally.heard:
        request = tally.cohort[client]
        anew = request.anew or tally.lines[client].anew
        known[client] = {**({} if anew else known.get(client, {})), **request.versions}
        settled[client] = (0 if anew else settled.get(client, 0)) | agreement.owned(request.turn)
    heard = world.heard | dict.fromkeys(tally.heard, number)
    # How far clients were apart is a release of its own, that nobody has paid for.
    hidden = released is not None
    drift = {} if hidden else tally.drift.by_kind(agreement.params, world.values, means, weights)
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
