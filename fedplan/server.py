# SPDX-License-Identifier: Apache-2.0
"""Servers: the federation's side of a run, in a folder. No transport is in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from fedplan.agreement import Setup
from fedplan.attendance import Attendance
from fedplan.exchange import Update, listed, scored
from fedplan.failpoints import reach
from fedplan.ledger import Digests, Ledger
from fedplan.params import Block
from fedplan.plan import Role
from fedplan.privacy.guard import Veil
from fedplan.resolution import permitted, resolve
from fedplan.rounds import Tally, World, announced, close, hear, pull, push, settle, summed
from fedplan.store import Store
from fedplan.turn import Turn

Roster = Mapping[str, Mapping[str, str]]
"""Every client's name, with its traits."""


class Server:
    """A world and its ledger. What it has committed survives any kill.

    `start` are the values that the model starts with, of every param.
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
    ) -> None:
        self.setup, self.start, self.folder, self.rounds = setup, start, folder, rounds
        self.attendance = attendance or Attendance()
        self.roster: dict[str, Mapping[str, str]] = dict(roster)
        self.digests = Digests()
        promise, place = setup.promise, folder / "privacy"
        self.veil = Veil(promise, place) if promise and promise.unit == "client" else None
        self.store = Store(folder / "world")
        self.store.claim()
        found = self.store.read()
        self.world = _world_of(found.tensors, found.meta) if found else World.start(setup, start)
        if self.veil is not None:
            self.veil.require_paid(found.meta["charges"] if found else 0)
        lengths: dict[str, int] = found.meta["lengths"] if found else {}
        self.ledger = Ledger(folder / "ledger.jsonl", length=lengths.get("ledger", 0))
        self.metrics = Ledger(folder / "metrics.jsonl", length=lengths.get("metrics", 0))

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
        tally = Tally({n: push(self.setup, self.world, n, self.roster[n]) for n in asked})
        tally.rejected |= {n: fate for n, fate in fates.items() if fate != "answers"}
        self._settle(tally, self.world.choice or None)
        return tally

    def voters(self, tally: Tally) -> list[str] | None:
        """The clients of a round that say first what they would choose: those whose plan does.

        None if nobody is asked. A vote is held even if nobody is there: its noise hides that.
        """
        promise = self.setup.promise
        if promise is not None and promise.vote:
            return list(tally.cohort) if promise.votes(self.world.round + 1) else None
        together, chooses = self.setup.method.together, self.setup.chooses
        found = [name for name, down in tally.cohort.items() if together and chooses(down.turn)]
        return found or None

    def choose(self, tally: Tally, polled: Mapping[str, Mapping[Block, float]]) -> None:
        """Have all choose alike: by the sum of what was polled, or by what a vote makes of it."""
        promise, number = self.setup.promise, self.world.round + 1
        if promise is None or not promise.vote:
            return self._settle(tally, summed(polled.values()))
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

    def take(self, tally: Tally, update: Update) -> None:
        """Count an update, unless it came too late to count."""
        if tally.rejected.get(update.client) == "late":
            hear(tally, update)
        else:
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
    def _last_moves(self) -> dict[str, dict[str, int]]:
        """The last round that may move each key, in each phase."""
        phases = ("", *self.setup.method.announce.phases)
        return {phase: self._moves(phase) for phase in phases}

    def _moves(self, phase: str) -> dict[str, int]:
        plan, params = self.setup.method.plan, self.setup.params
        sayings = {
            plan.settle(turn): turn
            for number in range(1, self.rounds + 1)
            for turn in self._turns(number, phase)
        }
        found = dict[str, int]()
        for turn in sayings.values():
            roles = permitted(plan, params, turn)
            shared = [p.key for p in params if roles[p] is Role.SHARE]
            found |= {key: max(turn.round, found.get(key, 0)) for key in shared}
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
        lengths = {"ledger": self.ledger.append([*turns, {**whole, **(signs or {})}])}
        reach("round.ledger_written")
        lengths["metrics"] = self.metrics.append(
            [{"round": self.world.round, **scores}] if scores else []
        )
        reach("round.before_commit")
        tensors, meta = _written(self.world)
        meta |= {"lengths": lengths}
        if self.veil is not None:
            meta["charges"] = len(self.veil.budget.charges)
        self.store.write(tensors, meta, number=self.world.round)
        reach("round.committed")

    def _lines(self, tally: Tally) -> list[dict[str, Any]]:
        self.digests.only(self.world.values.values())
        moved = {k for k, v in self.world.versions.items() if v == self.world.round}
        whole = {
            "round": self.world.round,
            "phase": self.world.phase,
            "counted": sorted(tally.counted),
            "rejected": dict(sorted(tally.rejected.items())),
            "moved": {k: self.digests.of(self.world.values[k]) for k in sorted(moved)},
            "drift": self.world.drift,
            "up": sum(line["up"] for line in tally.lines.values()),
            "down": tally.vain
            + sum(self.setup.sizes[k] for down in tally.cohort.values() for k in down.versions),
        }
        return [*(tally.lines[c] for c in sorted(tally.lines)), whole]

    def world_values(self) -> dict[str, Tensor]:
        """The federation's model: its values, and the start's for what each client keeps."""
        trainable = self.setup.trainable
        return {p.key: self.world.values.get(p.key, self.start[p.key]) for p in trainable}


def _about(number: int) -> str:
    return f"round {number}"


def _written(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"value/{k}": v for k, v in world.values.items()}
    for key, memory in world.memory.items():
        tensors |= {f"memory/{name}/{key}": v for name, v in memory.items()}
    meta = {"round": world.round, "phase": world.phase, "versions": world.versions}
    drift = {kind: list(numbers) for kind, numbers in world.drift.items()}
    hidden = {"choice": listed(world.choice), "clip": world.clip}
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
    number, phase = meta["round"], meta["phase"]
    return World(values, versions, number, phase, known, memory, drift, heard, choice, clip)
