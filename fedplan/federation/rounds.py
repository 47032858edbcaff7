# SPDX-License-Identifier: Apache-2.0
"""Rounds: the server's side: push what each client lacks, pull what it hands back, close."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedplan.errors import FedplanError
from fedplan.federation.acquaintance import NOBODY, Met
from fedplan.federation.aggregation import OpenSum, Outcome
from fedplan.federation.agreement import Agreement, basis
from fedplan.federation.claims import require_marks, require_turn
from fedplan.federation.drift import Sizes
from fedplan.federation.messages import Rejected, Request, Update
from fedplan.federation.products import Errors
from fedplan.federation.record import Defended, MaskedRecord, TurnRecord, read_turn
from fedplan.federation.world import World
from fedplan.language.plan import Role, Roles
from fedplan.language.turn import Turn
from fedplan.methods.phases import Sign
from fedplan.models.params import Block
from fedplan.storage.failpoints import reach
from fedplan.tensors.named import Digests, Tensors, all_finite, nbytes
from fedplan.tensors.riders import param_of, riders_of


def announced(agreement: Agreement, world: World) -> World:
    """The world with the phase of the round to come."""
    sign = Sign(world.round + 1, world.phase, world.drift, Sizes(agreement.params, world.values))
    return replace(world, phase=agreement.method.announce(sign))


@dataclass(frozen=True)
class Parcel:
    """What goes down to all clients that lack the same: their requests share it."""

    values: dict[str, Tensor]
    versions: dict[str, int]
    basis: str


class Parcels:
    """The requests of the next round; what they carry is made once for clients that are alike."""

    def __init__(self, agreement: Agreement, world: World) -> None:
        self._agreement, self._world = agreement, world
        self._made: dict[tuple[object, ...], Parcel] = {}

    def request(self, client: str, traits: Mapping[str, str], *, anew: bool = False) -> Request:
        """What a client lacks, and nothing else; `anew`, all that it needs."""
        agreement, world, number = self._agreement, self._world, self._world.round + 1
        turn = Turn(round=number, client=client, phase=world.phase, traits=dict(traits))
        met = world.met.get(client, NOBODY)
        parcel = self._parcel(turn, NOBODY if anew else met)
        return Request(
            name=agreement.request(number, client),
            agreed=agreement.fingerprint,
            turn=turn,
            values=parcel.values,
            versions=parcel.versions,
            basis=parcel.basis,
            heard=met.round,
            anew=anew,
            run=agreement.run,
        )

    def _parcel(self, turn: Turn, met: Met) -> Parcel:
        # The world holds each group for as long as this is used: no other has its id.
        alike = (id(met), self._agreement.method.plan.settle(turn))
        if alike not in self._made:
            self._made[alike] = self._packed(turn, met)
        return self._made[alike]

    def _packed(self, turn: Turn, met: Met) -> Parcel:
        world, wanted = self._world, self._agreement.wanted(turn, met.settled)
        lacking = [
            k for k, first in wanted.items() if met.versions.get(k, first) < world.versions[k]
        ]
        return Parcel(
            values={k: world.values[k] for k in lacking},
            versions={k: world.versions[k] for k in lacking},
            basis=basis({k: world.versions[k] for k in wanted}),
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
    return Parcels(agreement, world).request(client, traits, anew=anew)


@dataclass
class Tally:
    """An open round: its sum, and who was counted or rejected, with the reason.

    `vain` are bytes that went down to sites that could not use them; `marks` are the digests of
    what the model starts with; `products` are the errors of LoRA's mean sides, and `defence` what
    was done against bad weights and values, once it is closed, and `masked` what of it was.
    """

    cohort: dict[str, Request]
    total: OpenSum
    marks: Mapping[str, str] = field(default_factory=dict[str, str])
    digests: Digests = field(default_factory=Digests)
    vain: int = 0
    counted: list[str] = field(default_factory=list[str])
    heard: list[str] = field(default_factory=list[str])
    rejected: dict[str, str] = field(default_factory=dict[str, str])
    lines: dict[str, TurnRecord] = field(default_factory=dict[str, TurnRecord])
    products: Errors | None = None
    defence: Defended | None = None
    masked: MaskedRecord | None = None

    def choose(self, scores: Mapping[Block, float]) -> None:
        """Have all clients of the round choose by the same scores."""
        for client, request in self.cohort.items():
            self.cohort[client] = replace(request, turn=replace(request.turn, scores=scores))


@dataclass(frozen=True)
class Sound:
    """An update of which everything was checked."""

    values: dict[str, Tensor]
    riders: dict[str, Tensor]
    record: TurnRecord


def pull(
    agreement: Agreement, world: World, tally: Tally, update: Update, *, late: bool = False
) -> None:
    """Count one update, or write down why not: all of it is checked before any of it is added.

    A `late` one is checked and heard, and counts nowhere.
    """
    client = str(update.client)
    try:
        sound = _checked(agreement, world, tally, update)
        if not late:
            tally.total.add(client, sound.values, sound.riders, update.weight)
    except FedplanError as error:
        reason = str(error).splitlines()[0][:300]
        tally.rejected.setdefault(client, f"late, and {reason}" if late else reason)
        return
    tally.heard.append(client)
    tally.lines[client] = sound.record
    if late:
        tally.rejected[client] = "late"
    else:
        tally.counted.append(client)
    reach("round.pulled")


def hear(agreement: Agreement, world: World, tally: Tally, update: Update) -> bool:
    """Note the turn of a client whose values come under masks, or why not.

    Of values nothing can be checked that nobody sees: each site does, of its own.
    """
    client = str(update.client)
    if client in tally.lines:
        return True  # its sum was begun anew, and its turn is the same
    try:
        request = _asked(tally, update)
        record, roles = _told(agreement, tally, update)
        _require_down(agreement, world, request, record)
        _require_known(agreement, world, tally, record, roles, {})
    except FedplanError as error:
        tally.rejected.setdefault(client, str(error).splitlines()[0][:300])
        return False
    tally.heard.append(client)
    tally.lines[client] = record
    return True


def _asked(tally: Tally, update: Update) -> Request:
    """What a client was asked for, if this is its answer."""
    request = tally.cohort.get(update.client)
    if request is None:
        raise Rejected(f"{update.client!r} was not asked in this round")
    if update.client in tally.lines:
        raise Rejected(f"{update.client!r} was counted before")
    if (update.request, update.agreed) != (request.name, request.agreed):
        raise Rejected(f"it answers {update.request!r}, and {request.name!r} was asked")
    return request


def _checked(agreement: Agreement, world: World, tally: Tally, update: Update) -> Sound:
    """An update's values, riders and record, if every one of them is what was asked for."""
    request = _asked(tally, update)
    if type(update.weight) is not int or not 0 < update.weight < 2**40:
        raise Rejected(f"weight {update.weight!r} is not a positive whole number")
    budget = 2 * nbytes(world.values) + 2**20
    if update.nbytes > budget:
        raise Rejected(f"{update.nbytes} bytes are more than the {budget} that can be asked for")
    values = _decoded(agreement, world, update)
    _require_asked(agreement, world, request.turn, values, update.riders)
    tally.total.require(values, update.riders, update.weight)
    return Sound(values, update.riders, _record(agreement, world, tally, update, values))


def _decoded(agreement: Agreement, world: World, update: Update) -> dict[str, Tensor]:
    sent = {param_of(name) for name in update.values}
    if strange := sent - {p.key for p in agreement.movable}:
        raise Rejected(f"{min(strange)!r} is not among what travels")
    return agreement.method.wire.decode(update.values, {k: world.values[k] for k in sent})


def _record(
    agreement: Agreement, world: World, tally: Tally, update: Update, values: Tensors
) -> TurnRecord:
    """A client's record, if it fits all that the server knows."""
    record, roles = _told(agreement, tally, update)
    if set(values) != {p.key for p, role in roles.items() if role is Role.SHARE}:
        raise Rejected("its record says that other params were shared than came")
    _require_down(agreement, world, tally.cohort[update.client], record)
    _require_known(agreement, world, tally, record, roles, values)
    return record


def _told(agreement: Agreement, tally: Tally, update: Update) -> tuple[TurnRecord, Roles]:
    record = read_turn(update.line)
    return record, require_turn(agreement, tally.cohort[update.client], update, record)


def _require_down(agreement: Agreement, world: World, request: Request, record: TurnRecord) -> None:
    # An answer may be from before it was asked anew, or from when it was.
    if record.anew != request.anew:
        request = push(agreement, world, record.client, request.turn.traits, anew=record.anew)
    if record.down != (came := sum(agreement.sizes[key] for key in request.versions)):
        raise Rejected(f"its record says that {record.down} bytes came down, and {came} did")


def _require_known(
    agreement: Agreement,
    world: World,
    tally: Tally,
    record: TurnRecord,
    roles: Roles,
    values: Tensors,
) -> None:
    def known(key: str) -> str | None:
        held = world.values.get(key)
        return tally.marks.get(key) if held is None else tally.digests.of(held)

    require_marks(agreement, record, roles, values, known, tally.digests)


def _require_asked(
    agreement: Agreement, world: World, turn: Turn, values: Tensors, riders: Tensors
) -> None:
    most, least = agreement.permitted(turn), agreement.certain(turn)
    may = {p.key for p in agreement.params if most[p] is Role.SHARE}
    must = {p.key for p in agreement.params if least[p] is Role.SHARE}
    if extra := values.keys() - may:
        raise Rejected(f"{min(extra)!r} is not among what this client may share")
    if missing := must - values.keys():
        raise Rejected(f"{min(missing)!r} is missing")
    if set(riders) != set(riders_of(values, agreement.method.riders)):
        raise Rejected("the riders are not those of the shared params")
    for key, value in {**values, **riders}.items():
        wanted = world.values[key]
        if value.shape != wanted.shape or value.dtype != wanted.dtype:
            raise Rejected(
                f"{key!r} is {value.dtype} {tuple(value.shape)}, "
                f"not {wanted.dtype} {tuple(wanted.shape)}"
            )


def close(
    agreement: Agreement, world: World, tally: Tally, outcome: Outcome, *, later: set[str]
) -> World:
    """The world after a round: each param as the server's optimiser makes it of the clients' mean.

    `later` are the keys that some later round may move: of others nothing is remembered.
    """
    number, optimised = world.round + 1, agreement.method.server_optimiser
    values, versions = dict(world.values), dict(world.versions)
    memory = {key: held for key, held in world.memory.items() if key in later}
    for key, mean in outcome.means.items():
        made, fresh = optimised(values[key], mean, world.memory.get(key, {}))
        _require_made(key, values[key], made, fresh)
        values[key] = made
        versions[key] = number
        if fresh and key in later:
            memory[key] = fresh
    for key, change in outcome.riders.items():
        values[key], versions[key] = values[key] + change, number
    return replace(
        world,
        values=values,
        versions=versions,
        round=number,
        met=_met(agreement, world, tally),
        memory=memory,
        drift=outcome.drift,
        clip=outcome.clip,
    )


def _require_made(key: str, old: Tensor, made: Tensor, memory: Mapping[str, Tensor]) -> None:
    """Refuse what no later round could go on with, before it is the world's."""
    if (made.shape, made.dtype) != (old.shape, old.dtype) or not all_finite(made):
        raise FedplanError(
            f"the server optimiser made {made.dtype} {tuple(made.shape)} of {key}, which is "
            f"{old.dtype} {tuple(old.shape)}, or it is no number"
        )
    if strange := [name for name in memory if not name.isidentifier()]:
        raise FedplanError(f"the server optimiser calls a memory {strange[0]!r}: give it a word")


def _met(agreement: Agreement, world: World, tally: Tally) -> dict[str, Met]:
    """What each client now has of the world, and which params are its own.

    Clients of one group that were sent the same and have the same roles are one group again: so
    there are as many as there are kinds of clients and rounds that somebody was last heard in.
    """
    met, number = dict(world.met), world.round + 1
    by_way, by_content = dict[tuple[object, ...], Met](), dict[tuple[object, ...], Met]()
    for client in tally.heard:
        request = tally.cohort[client]
        anew = request.anew or tally.lines[client].anew
        before = NOBODY if anew else met.get(client, NOBODY)
        said = agreement.method.plan.settle(request.turn)
        # Ids stand for what the old world and the cohort hold until all are through.
        way = (id(before), id(request.versions), said)
        if way not in by_way:
            versions = {**before.versions, **request.versions}
            settled = before.settled | agreement.owned(request.turn)
            content = (frozenset(versions.items()), settled)
            by_way[way] = by_content.setdefault(content, Met(number, versions, settled))
        met[client] = by_way[way]
    return met
