# SPDX-License-Identifier: Apache-2.0
"""Sites: a client's side of a round: it obeys its own copy of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedplan import streams
from fedplan.account import Account, Answer
from fedplan.agreement import Setup, basis
from fedplan.buffers import buffers_of, require_rest
from fedplan.errors import FedplanError
from fedplan.exchange import Down, Lacking, Refused, Update, listed, nbytes
from fedplan.fit import Done, Examples, Job, Loss
from fedplan.journal import Journal
from fedplan.ledger import Digests, digest, joined, spelled
from fedplan.marks import joint, keyed, mark_of, model_mark
from fedplan.params import Block
from fedplan.plan import Role, Roles
from fedplan.privacy.clipping import capped
from fedplan.privacy.guard import Cloak
from fedplan.privacy.secret import secret_of
from fedplan.privacy.vote import ballot
from fedplan.probe import Look, at_random, is_public
from fedplan.record import TURN, VERSION
from fedplan.resolution import permitted, resolve
from fedplan.state import Tensors, put, take
from fedplan.turn import Turn

KEY = "key"
"""The file beside a journal with what digests of a client's own values are keyed by."""


@dataclass
class Site:
    """One client: its rows, what it has seen of the world, and the journal of what it keeps.

    `held` are the versions of what it has seen. A `cloak` hides each of its rows in every step. The
    `account` is of all that it has answered, in other studies too; a simulated client has none.
    """

    name: str
    rows: Examples
    journal: Journal
    model: nn.Module
    start: dict[str, Tensor]
    marks: dict[str, str]
    loss: Loss
    traits: dict[str, str] = field(default_factory=dict[str, str])
    seen: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    held: dict[str, int] = field(default_factory=dict[str, int])
    digests: Digests = field(default_factory=Digests)
    cloak: Cloak | None = None
    account: Account | None = None
    marked: tuple[Examples, str] | None = None

    @cached_property
    def key(self) -> bytes:
        """What digests of its own values are keyed by: nobody else can check a guess at one."""
        return secret_of(self.journal.folder / KEY, self.journal.seal)

    def mark(self) -> str:
        """The digest of its rows, worked out once for as long as they are the same."""
        if self.marked is None or self.marked[0] is not self.rows:
            self.marked = self.rows, mark_of(self.rows)
        return self.marked[1]


def cloak_of(setup: Setup, folder: Path, account: Account | None = None) -> Cloak | None:
    """What hides a site's rows, if that was promised: in a folder of its own, or on its account."""
    promise = setup.promise
    if promise is None or promise.unit != "example":
        return None
    if account is None:
        return Cloak(promise, folder)
    limits = account.limits
    return Cloak(
        promise,
        account.folder,
        run=setup.prefix,
        limit=limits.epsilon,
        delta=limits.delta,
        seal=account.seal,
    )


def poll(setup: Setup, site: Site, down: Down) -> Mapping[Block, float]:
    """What a client's probe says of each block, for a choice that all make together."""
    home, notes = site.journal.home(down.request)
    _receive(setup, site, down, notes)
    turn = _own_turn(site, down)
    _require_poll(setup, site, turn)
    before = _values(setup, site, turn, home)
    promise, look = setup.promise, _look(setup, site, turn)
    roles = permitted(setup.method.plan, setup.params, turn)
    content = _content(setup, site, turn, roles, before, home)
    if site.cloak is not None and promise is not None and promise.vote:
        site.cloak.require_room(turn.round, down.request)
    _admit(setup, site, down, Answer("scores", down.request, content, 8 * len(setup.blocks)))
    if promise is None or not promise.vote:
        return setup.method.probe(look)
    if site.cloak is not None:
        said = down.request, content
        return site.cloak.vote(look, setup.method.probe, setup.most, *said)
    # Who has no rows votes too, by chance: that it has none is not told.
    named = ballot((setup.method.probe if len(site.rows) else at_random)(look), setup.most)
    return {block: float(block in named) for block in look.blocks}


def _require_poll(setup: Setup, site: Site, turn: Turn) -> None:
    """Refuse a poll where nothing is chosen together, or where nobody pays for what it tells."""
    promise, method = setup.promise, setup.method
    if promise is not None and promise.vote:
        asked = promise.votes(turn.round)
    else:
        asked = setup.chooses(turn) and (promise is None or is_public(method.probe))
    if not method.together or not asked:
        raise Refused(
            f"{site.name} is polled in round {turn.round}, where its plan chooses nothing together "
            "or nobody pays for the choice"
        ).coded("poll")


def local(setup: Setup, site: Site, down: Down) -> Update:
    """A client's turn: it obeys its own copy of the plan, and answers the same request the same."""
    answered = site.journal.answered(down.request)
    home, notes = site.journal.home("" if answered else down.request)
    _receive(setup, site, down, notes)
    if answered:
        values, line = answered
        _admit(setup, site, down, Answer("update", down.request, "", nbytes(values)))
    else:
        values, line = _train(setup, site, down, home, notes)
    return Update(site.name, down.request, setup.fingerprint, values, line["weight"], line)


def _receive(setup: Setup, site: Site, down: Down, notes: Mapping[str, Any]) -> None:
    """Take what the server sends, if it is what was agreed and nothing is then lacking."""
    request = setup.request(down.turn.round, site.name)
    if down.run != setup.run:
        raise Refused(f"{site.name} is in run {setup.run}, and is asked in run {down.run[:40]!r}")
    if (down.agreed, down.request) != (setup.fingerprint, request):
        raise Refused(
            f"{site.name} agreed to {setup.fingerprint}, and is asked for {down.request[:120]!r}: "
            "both ends must run the same study"
        ).coded("another-study")
    wanted = setup.wanted(_own_turn(site, down), _bits(_settled(down, notes)))
    _require_wanted(site, down, wanted)
    held = {} if down.anew else site.held
    held = held | down.versions
    if basis({k: held.get(k, first) for k, first in wanted.items()}) != down.basis:
        raise Lacking(f"{site.name} does not have what it was sent before: it needs all of it")
    site.seen, site.held = site.seen | down.values, held


def _settled(down: Down, notes: Mapping[str, Any]) -> dict[str, str]:
    """What became the client's own, by rounds: as far as the server has heard of it."""
    found: dict[str, str] = {} if down.anew else notes.get("settled", {})
    return {number: bits for number, bits in found.items() if int(number) <= down.heard}


def _bits(settled: Mapping[str, str]) -> int:
    return reduce(lambda found, bits: found | int(bits, 16), settled.values(), 0)


def _require_wanted(site: Site, down: Down, wanted: Mapping[str, int]) -> None:
    """Refuse values that the plan does not have come down, or that are of another kind."""
    if strange := (down.values.keys() | down.versions.keys()) - wanted.keys():
        raise Refused(
            f"{site.name} takes no {min(strange)!r} from the server: its plan says so"
        ).coded("values")
    for key, value in down.values.items():
        own = site.start[key.partition("#")[0]]
        if value.shape != own.shape or value.dtype != own.dtype:
            raise Refused(
                f"{site.name} was sent {key!r} as {value.dtype} {tuple(value.shape)}, "
                f"and it is {own.dtype} {tuple(own.shape)}"
            ).coded("values")


def _own_turn(site: Site, down: Down) -> Turn:
    """The turn as the client itself sees it: its name, its traits, and no scores but its own."""
    return replace(down.turn, client=site.name, traits=site.traits, scores=None)


def _train(
    setup: Setup, site: Site, down: Down, home: Tensors, notes: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    _require_forward(site, down.turn.round, notes)
    if site.cloak is not None:
        site.cloak.require_paid(notes.get("charges", 0))
    turn, still = _own_turn(site, down), buffers_of(site.model)
    before = _values(setup, site, turn, home)
    if setup.chooses(turn):
        alone = None if setup.method.together else setup.method.probe(_look(setup, site, turn))
        turn = replace(turn, scores=alone or down.turn.scores)
    roles = resolve(setup.method.plan, setup.params, turn)
    content = _content(setup, site, turn, roles, before, home)
    if site.cloak is not None:
        site.cloak.require_turn(turn.round, down.request, content)
    up = sum(setup.up(p) for p in setup.params if roles[p] is Role.SHARE)
    _admit(setup, site, down, Answer("update", down.request, content, up))
    done = _fit(setup, site, turn, roles, before, home, content)
    require_rest(site.model, still)
    after = take(site.model, setup.trainable)
    marks = _require_still(setup, site, roles, before, after, notes.get("marks", {}))
    shared = {p.key: after[p.key] for p in setup.trainable if roles[p] is Role.SHARE}
    if setup.promise is not None and setup.promise.cap:
        weight = capped(len(site.rows), setup.promise.cap)
        shared = {k: torch.lerp(before[k], value, weight) for k, value in shared.items()}
    stream = streams.generator(setup.experiment, "wire", turn.round, site.name)
    base = {k: before[k] for k in shared}
    coded = setup.method.wire.encode(shared, base, stream)
    sent = setup.method.wire.decode(coded, base)
    # A digest of more than was sent would tell what the wire, or the weight, left out.
    other = {k: v for k, v in sent.items() if v.data_ptr() != after[k].data_ptr()}
    marks[1].update({k: digest(v) for k, v in other.items()})
    reply = {**coded, **done.riders}
    own = {p.key: after[p.key] for p in setup.trainable if roles[p].own}
    line = _line(setup, site, down, roles, marks, done)
    line |= {"up": nbytes(reply), "scores": listed(turn.scores) if turn.scores else None}
    missed = [each for each in notes.get("lines", []) if each["round"] > down.heard]
    own_marks = notes.get("marks", {}) | {k: marks[1][k] for k in own}
    settled = _settled(down, notes)
    if fresh := setup.owned(turn) & ~_bits(settled):
        settled |= {str(turn.round): hex(fresh)}
    notes = {"marks": own_marks, "lines": [*missed, line], "settled": settled}
    if site.cloak is not None:
        notes["charges"] = len(site.cloak.budget.charges)
    line = line | {"missed": missed}
    kept = {k: v for k, v in home.items() if k not in own and k not in done.memory}
    site.journal.commit(down.request, {**kept, **own, **done.memory}, notes, reply, line)
    return reply, line


def _require_forward(site: Site, number: int, notes: Mapping[str, Any]) -> None:
    """Refuse a turn before the last one: what the client kept since would be lost, or mixed in."""
    last = max((line["round"] for line in notes.get("lines", ())), default=0)
    if last >= number:
        raise Refused(
            f"{site.name} has taken its turn in round {last} of this run, and is asked for round "
            f"{number}: the server has lost its world; put a copy back, or begin another run"
        )


def _values(setup: Setup, site: Site, turn: Turn, home: Tensors) -> dict[str, Tensor]:
    """Each trainable param's value at the start of a turn, put into the model.

    It is the client's own, or the world's: scores never change whose a param is. What becomes the
    client's own for the first time starts from the world's.
    """
    roles = permitted(setup.method.plan, setup.params, turn)
    own = {p.key: home[p.key] for p in setup.trainable if roles[p].own and p.key in home}
    values = {p.key: site.start[p.key] for p in setup.trainable}
    values |= {key: site.seen[key] for key in values if key in site.seen} | own
    put(site.model, values, setup.trainable)
    # A probe must not find the mode in which some other turn has left the model.
    site.model.eval()
    return values


def _look(setup: Setup, site: Site, turn: Turn) -> Look:
    """What the client's probe may look at."""
    seed = streams.seed(setup.experiment, "probe", turn.round, site.name)
    return Look(site.model, site.rows, setup.blocks, seed, site.loss)


def _admit(setup: Setup, site: Site, down: Down, answer: Answer) -> None:
    """Count an answer on the site's account, or refuse it, before any work is done for it."""
    if site.account is not None:
        polled = answer.kind == "scores"
        hidden = site.cloak is not None or (polled and is_public(setup.method.probe))
        site.account.admit(replace(answer, hidden=hidden))


def _fit(
    setup: Setup,
    site: Site,
    turn: Turn,
    roles: Roles,
    before: Tensors,
    home: Tensors,
    content: str,
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
    if site.cloak is not None:
        about = setup.request(turn.round, site.name)
        return site.cloak.fit(turn.round, about, content)(job)
    return setup.method.fit(job)


def _content(
    setup: Setup, site: Site, turn: Turn, roles: Roles, before: Tensors, home: Tensors
) -> str:
    """All that an answer is made of: of another content it is another answer, by any name.

    Of a client that nothing hides and nobody counts, nobody asks. The server chooses the values:
    digests are whole, so that it finds no two values of one content, which would share a noise.
    """
    if site.cloak is None and site.account is None:
        return ""
    riders = {k: v for k, v in site.seen.items() if "#" in k}
    memory = {k: v for k, v in home.items() if "#" in k}
    agreed = [setup.experiment, setup.fingerprint, setup.study, repr(setup.pace)]
    asked = [turn.round, turn.phase, site.name, site.traits, spelled(roles)]
    made_of = [site.mark(), len(site.rows), model_mark(site.model)]
    resting = {k: v for k, v in site.start.items() if k not in before}
    values = (resting, before, riders, memory)
    held = [{k: site.digests.whole(v) for k, v in each.items()} for each in values]
    return joint(agreed, repr(setup.promise), asked, made_of, held)


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
            raise FedplanError(f"{key} is {roles[p].name} and moved: the fit broke the plan").coded(
                "training"
            )
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
    """One turn of one client, as the ledger says it.

    What is its own is told by keyed digests: whether it moved can be seen, what it is cannot be
    guessed. Under a promise no number follows from the rows.
    """
    before, after = (
        {p.key: keyed(site.key, p.key, of[p.key]) if roles[p].own else of[p.key] for p in roles}
        for of in marks
    )
    return {
        "kind": TURN,
        "version": VERSION,
        "round": down.turn.round,
        "client": site.name,
        "phase": down.turn.phase,
        "traits": site.traits,
        "roles": spelled(roles),
        "before": joined(setup.params, before),
        "after": joined(setup.params, after),
        "down": sum(setup.sizes[key] for key in down.versions),
        "weight": 1 if setup.promise else len(site.rows),
        "steps": setup.pace.steps if setup.promise else done.steps,
        "loss": done.loss if isfinite(done.loss) and not setup.promise else None,
        "anew": down.anew,
        "missed": [],
    }
