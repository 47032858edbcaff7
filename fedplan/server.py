# SPDX-License-Identifier: Apache-2.0
"""Servers: the federation's side of a run, in a folder. No transport is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from fedplan import streams
from fedplan.agreement import Setup
from fedplan.attendance import Attendance
from fedplan.errors import FedplanError
from fedplan.exchange import Update, listed, scored
from fedplan.failpoints import reach
from fedplan.files import mark_of_file
from fedplan.horizon import rounds_ahead
from fedplan.identity import RUN, Identity, identified, read_identity
from fedplan.ledger import Digests, Ledger, digests, joined
from fedplan.params import Block
from fedplan.plan import Role
from fedplan.privacy.guard import CHARGES, SECRET, Veil
from fedplan.probe import public_scores
from fedplan.record import RoundRecord, read_round
from fedplan.remains import require_newest, require_secrets
from fedplan.resolution import permitted, resolve
from fedplan.rounds import Tally, World, announced, close, pull, push, settle, summed
from fedplan.store import Generation, Store
from fedplan.turn import Turn

WORLD, LEDGER, METRICS = "world", "ledger.jsonl", "metrics.jsonl"
STUDY = "study.json"
SMALL = (STUDY, "manifest.json", "task.json", RUN)
"""Files of a run's folder that are written once, before its first round; a study may grow."""
Roster = Mapping[str, Mapping[str, str]]
"""Every client's name, with its traits."""


class Server:
    """A world and its ledger. What it has committed survives any kill.

    `start` are the values that the model starts with, of every param, and `marks` the digest of
    each; `rows` are the digests of clients' rows, where they are seen.
    """

    def __init__(
        self,
        setup: Setup,
        start: Mapping[str, Tensor],
        folder: Path,
        *,
        rounds: int,
        roster: Roster,
        attendance: Attendance | None = None,
        marks: Mapping[str, str] | None = None,
        rows: Mapping[str, str] | None = None,
    ) -> None:
        self.start, self.folder, self.rounds = start, folder, rounds
        self.attendance = attendance or Attendance()
        self.roster: dict[str, Mapping[str, str]] = dict(roster)
        self.digests = Digests()
        self.marks = dict(marks) if marks is not None else digests(start)
        self.store = Store(folder / WORLD)
        self.store.claim()
        found = self.store.read()
        self.identity = _identity(folder, setup, self.marks, rows or {}, found)
        self.setup = setup = replace(setup, run=self.identity.id)
        files: dict[str, Any] = found.meta["files"] if found else {}
        require_secrets(folder, files)
        promise, place = setup.promise, folder / "privacy"
        self.veil = Veil(promise, place) if promise and promise.unit == "client" else None
        self.world = _world_of(found.tensors, found.meta) if found else World.start(setup, start)
        if self.veil is not None:
            self.veil.require_paid(found.meta["charges"] if found else 0)
        self._agreed: list[int | str] | None = files.get(STUDY)
        require_newest(folder / LEDGER, self.world.round, files.get(LEDGER, (0, ""))[0])
        self.ledger = _ledger(folder / LEDGER, files)
        self.metrics = _ledger(folder / METRICS, files)

    def agree(self) -> None:
        """Stand by the study as it now is: rounds may be added to it, and places may change."""
        now = mark_of_file(self.folder / STUDY)
        found = self.store.read() if self._agreed != now else None
        if found is not None:
            meta = found.meta | {"files": found.meta["files"] | {STUDY: now}}
            self.store.write(found.tensors, meta, number=found.number)

    def begin(self) -> Tally:
        """Announce the phase of the next round, and say who is asked for what."""
        self.world = announced(self.setup, self.world)
        number, experiment = self.world.round + 1, self.setup.experiment
        if self.veil is not None:
            self.veil.require_room(number, _about(number))
            cohort = self.veil.cohort(self.roster, number)
        else:
            cohort = self.attendance.cohort(experiment, number, list(self.roster))
        fates = {name: self.attendance.fate(experiment, number, name) for name in cohort}
        asked = [name for name in cohort if fates[name] != "dropped"]
        tally = Tally(
            {n: push(self.setup, self.world, n, self.roster[n]) for n in asked},
            late=frozenset(name for name in asked if fates[name] == "late"),
            marks=self.marks,
            digests=self.digests,
        )
        tally.rejected |= {n: fate for n, fate in fates.items() if fate != "answers"}
        self._settle(tally, self._standing(number))
        return tally

    def _standing(self, number: int) -> Mapping[Block, float] | None:
        """The scores that all choose by before anybody is asked: the last vote's, if any.

        Where clients are hidden and choose together by what looks at no rows, it is said here: in
        a poll, who is there would decide what is released.
        """
        setup, turns = self.setup, self._turns(number, self.world.phase)
        alone = self.veil is None or self.veil.promise.vote or not setup.method.together
        if alone or not any(map(setup.chooses, turns)):
            return self.world.choice or None
        seed = streams.seed(setup.experiment, "probe", number)
        return public_scores(setup.method.probe, setup.blocks, seed)

    def voters(self, tally: Tally) -> list[str] | None:
        """The clients of a round that say first what they would choose: those whose plan does.

        None if nobody is asked. A vote is held even if nobody is there: its noise hides that.
        """
        promise, setup = self.setup.promise, self.setup
        if promise is not None and promise.vote:
            return list(tally.cohort) if promise.votes(self.world.round + 1) else None
        if not setup.method.together or self.veil is not None:
            return None
        return [n for n, down in tally.cohort.items() if setup.chooses(down.turn)] or None

    def choose(self, tally: Tally, polled: Mapping[str, Mapping[Block, float]]) -> None:
        """Have all choose alike: by the sum of what was polled, or by what a vote makes of it."""
        promise, number = self.setup.promise, self.world.round + 1
        there = set(self.setup.blocks)
        polled = {name: said for name, said in polled.items() if said.keys() <= there}
        if promise is None or not promise.vote:
            scores = summed(polled.values())
            if not scores:
                raise FedplanError(
                    f"round {number}: nobody who was asked gave scores that are numbers, so "
                    "nothing can be chosen; start the run again to go on with this round"
                )
            return self._settle(tally, scores)
        if self.veil is not None:
            ballots = [{b for b, named in each.items() if named} for each in polled.values()]
            blocks, most = self.setup.blocks, self.setup.most
            choice = self.veil.vote(ballots, blocks, most, _about(number))
        else:
            choice = summed(polled.values())
        self.world = replace(self.world, choice=choice)
        self._settle(tally, choice)

    def _settle(self, tally: Tally, scores: Mapping[Block, float] | None) -> None:
        """Have all choose by these scores, if any; what may then be shared is what is hidden."""
        if scores is not None:
            settle(tally, scores)
        if self.veil is not None:
            shared = self._shared(self.world.round + 1, scores)
            tally.mechanism = self.veil.mechanism(shared, len(self.roster), self.world.clip)

    def _shared(self, number: int, scores: Mapping[Block, float] | None) -> dict[str, Tensor]:
        """What any client may share in a round, whoever is asked: that is public."""
        plan, params = self.setup.method.plan, self.setup.params
        turns = {plan.settle(turn): turn for turn in self._turns(number, self.world.phase)}
        every = [
            resolve(plan, params, replace(turn, scores=scores))
            if scores
            else permitted(plan, params, turn)
            for turn in turns.values()
        ]
        shared = (p.key for p in params if any(roles[p] is Role.SHARE for roles in every))
        return {key: self.world.values[key] for key in shared}

    def anew(self, tally: Tally, client: str) -> None:
        """Ask a client again that has lost what it had of the world, and send it all of it."""
        vain = tally.cohort[client]
        tally.vain += vain.nbytes
        down = push(self.setup, self.world, client, self.roster[client], anew=True)
        tally.cohort[client] = replace(down, turn=replace(down.turn, scores=vain.turn.scores))

    def take(self, tally: Tally, update: Update) -> None:
        """Count an update, or write down why not."""
        pull(self.setup, self.world, tally, update)

    def end(self, tally: Tally) -> None:
        """Close a round with what has come; `commit` makes it last."""
        reach("round.before_close")
        number = self.world.round + 1
        released, clip = None, 0.0
        if self.veil is not None and tally.mechanism is not None:
            about, made = _about(number), tally.mechanism
            within = f"{tally.within} of {len(tally.counted)}"
            released = self.veil.release(made, tally.sums, number, about, within)
            clip = self.veil.moved(made, tally.within, len(tally.counted), about)
        self.world = close(
            self.setup,
            self.world,
            tally,
            roster=len(self.roster),
            later=self._later(number),
            released=released,
            clip=clip,
        )

    def _later(self, number: int) -> set[str]:
        """Keys that some later round may move, in this phase or in one that may still come."""
        phases = self.setup.method.announce.phases
        still = phases[phases.index(self.world.phase) :] if self.world.phase else ("", *phases)
        moves = (self._last_moves[phase] for phase in still)
        return {key for found in moves for key, last in found.items() if last > number}

    @cached_property
    def _last_moves(self) -> dict[str, dict[str, float]]:
        """The last round that may move each key, in each phase, if a run were never to end.

        A run that is given more rounds later must remember what a longer one would.
        """
        phases = ("", *self.setup.method.announce.phases)
        return {phase: self._moves(phase) for phase in phases}

    def _moves(self, phase: str) -> dict[str, float]:
        plan, params = self.setup.method.plan, self.setup.params
        ahead = rounds_ahead(plan)
        if ahead is None:
            return dict.fromkeys((p.key for p in self.setup.movable), inf)
        sayings = {
            plan.settle(turn): (turn, inf if ever else number)
            for number, ever in ahead
            for turn in self._turns(number, phase)
        }
        found = dict[str, float]()
        for turn, last in sayings.values():
            roles = permitted(plan, params, turn)
            shared = [p.key for p in params if roles[p] is Role.SHARE]
            found |= {key: max(last, found.get(key, 0)) for key in shared}
        return found

    def _turns(self, number: int, phase: str) -> list[Turn]:
        return [Turn(number, name, phase, traits) for name, traits in self.roster.items()]

    def commit(
        self,
        tally: Tally,
        scores: Mapping[str, Any] | None = None,
        signs: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a round down for good: its lines, then the world that it made.

        `scores` are kept beside the ledger, `signs` in the round's own line.
        """
        *turns, whole = self._lines(tally)
        self.ledger.append([*turns, read_round({**whole, **(signs or {})}).json()])
        reach("round.ledger_written")
        self.metrics.append([{"round": self.world.round, **scores}] if scores else [])
        reach("round.before_commit")
        tensors, meta = _written(self.world)
        meta |= {"run": self.identity.id, "files": self._files()}
        if self.veil is not None:
            meta["charges"] = len(self.veil.budget.charges)
        self.store.write(tensors, meta, number=self.world.round)
        reach("round.committed")

    def _lines(self, tally: Tally) -> list[dict[str, Any]]:
        self.digests.only(self.world.values.values())
        moved = {k for k, v in self.world.versions.items() if v == self.world.round}
        down = (self.setup.sizes[k] for down in tally.cohort.values() for k in down.versions)
        whole = RoundRecord(
            round=self.world.round,
            phase=self.world.phase,
            counted=tuple(sorted(tally.counted)),
            rejected=dict(sorted(tally.rejected.items())),
            moved={k: self.digests.of(self.world.values[k]) for k in sorted(moved)},
            drift=self.world.drift,
            up=sum(record.up for record in tally.lines.values()),
            down=tally.vain + sum(down),
        )
        return [*(tally.lines[client].json() for client in sorted(tally.lines)), whole.json()]

    def _files(self) -> dict[str, list[int | str]]:
        """The length and the digest of every file beside the world, for `verify`."""
        files = [self.folder / name for name in SMALL if (self.folder / name).exists()]
        for name in (SECRET, CHARGES) if self.setup.promise else ():
            files += sorted((self.folder / "privacy").rglob(name))
        marks = {str(file.relative_to(self.folder)): mark_of_file(file) for file in files}
        return marks | {LEDGER: self.ledger.mark, METRICS: self.metrics.mark}

    def world_values(self) -> dict[str, Tensor]:
        """The federation's model: its values, and the start's for what each client keeps."""
        return world_values(self.setup, self.world, self.start)


def world_values(setup: Setup, world: World, start: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The values of a federation's model, where it starts from `start`."""
    return {p.key: world.values.get(p.key, start[p.key]) for p in setup.trainable}


def personal_values(
    setup: Setup, world: World, start: Mapping[str, Tensor], turn: Turn, home: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The values of one client's model: its own, as of the turn, over the federation's."""
    roles = permitted(setup.method.plan, setup.params, turn)
    own = {p.key for p in setup.trainable if roles[p].own}
    return world_values(setup, world, start) | {k: v for k, v in home.items() if k in own}


def _identity(
    folder: Path,
    setup: Setup,
    marks: Mapping[str, str],
    rows: Mapping[str, str],
    found: Generation | None,
) -> Identity:
    """Which run this is; a world without its identity, or with another's, is refused."""
    if found and (not (folder / RUN).exists() or read_identity(folder).id != found.meta["run"]):
        raise FedplanError(
            f"{folder / RUN} is not that of the world beside it: put a copy of it back"
        )
    joint = joined(setup.params, marks)
    return identified(folder, Identity(setup.run, setup.study, setup.start, dict(rows), joint))


def _ledger(file: Path, files: Mapping[str, Any]) -> Ledger:
    length, sha256 = files.get(file.name, (0, ""))
    return Ledger(file, length=length, sha256=sha256)


def read_world(folder: Path) -> tuple[World, dict[str, Any]] | None:
    """The world that a run last committed and its meta, read without a lock; None before round 1.

    Nothing is written, so it may be read while the run goes on.
    """
    found = Store(folder / WORLD, reading=True).read()
    return (_world_of(found.tensors, found.meta), found.meta) if found else None


def _about(number: int) -> str:
    return f"round {number}"


def _written(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"value/{k}": v for k, v in world.values.items()}
    for key, memory in world.memory.items():
        tensors |= {f"memory/{name}/{key}": v for name, v in memory.items()}
    meta = {"round": world.round, "phase": world.phase, "versions": world.versions}
    drift = {kind: list(numbers) for kind, numbers in world.drift.items()}
    hidden = {"choice": listed(world.choice), "clip": world.clip}
    meta |= {"settled": {client: hex(bits) for client, bits in world.settled.items()}}
    return tensors, meta | {"known": world.known, "heard": world.heard, "drift": drift} | hidden


def _world_of(tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> World:
    values, memory = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        sort, _, rest = name.partition("/")
        if sort == "value":
            values[rest] = tensor
        else:
            which, _, key = rest.partition("/")
            memory.setdefault(key, {})[which] = tensor
    known = {client: dict(held) for client, held in meta["known"].items()}
    versions = {k: int(v) for k, v in meta["versions"].items()}
    drift = {kind: (apart, step) for kind, (apart, step) in meta["drift"].items()}
    heard = dict(meta["heard"])
    choice, clip = scored(meta["choice"]), float(meta["clip"])
    settled = {client: int(bits, 16) for client, bits in meta["settled"].items()}
    number, phase = meta["round"], meta["phase"]
    return World(
        values, versions, number, phase, known, memory, drift, heard, choice, clip, settled
    )
