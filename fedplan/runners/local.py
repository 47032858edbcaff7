# SPDX-License-Identifier: Apache-2.0
"""The local runner: a whole federation in one process, one client after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedplan import streams
from fedplan.agreement import Setup
from fedplan.failpoints import reach
from fedplan.fit import Examples, Loss
from fedplan.journal import Journal, home_of
from fedplan.ledger import Digests, Ledger, digests
from fedplan.plan import Role
from fedplan.resolution import permitted
from fedplan.rounds import Tally, World, announced, choose, close, hear, pull, push
from fedplan.site import Site, local, poll
from fedplan.state import take
from fedplan.store import Store
from fedplan.turn import Turn


@dataclass(frozen=True)
class Attendance:
    """Who takes part: a share of the roster each round; of those some drop out, some are late."""

    share: float = 1.0
    dropped: float = 0.0
    late: float = 0.0

    def cohort(self, experiment: str, number: int, roster: list[str]) -> list[str]:
        """The clients that are asked in a round, in the roster's order."""
        draw = torch.randperm(
            len(roster), generator=streams.generator(experiment, "cohort", number)
        )
        asked = max(1, round(self.share * len(roster)))
        chosen = {roster[int(i)] for i in draw[:asked]}
        return [name for name in roster if name in chosen]

    def fate(self, experiment: str, number: int, client: str) -> str:
        """What becomes of a client that is asked: it answers, it is late, or it drops out."""
        generator = streams.generator(experiment, "fate", number, client)
        drawn = torch.rand((), generator=generator, dtype=torch.float64).item()
        if drawn < self.dropped:
            return "dropped"
        return "late" if drawn < self.dropped + self.late else "answers"


def opened(setup: Setup, world: World, sites: Mapping[str, Site]) -> Tally:
    """Ask sites for a round; where all choose together, hear first what each one's probe says."""
    tally = Tally({name: push(setup, world, name, site.traits) for name, site in sites.items()})
    downs = tally.cohort
    if setup.method.together and any(setup.chooses(down.turn) for down in downs.values()):
        choose(tally, {name: poll(setup, site, downs[name]) for name, site in sites.items()})
    return tally


class Federation:
    """A server and its sites in one process. What it has committed survives any kill."""

    def __init__(
        self,
        setup: Setup,
        model: nn.Module,
        rows: Mapping[str, Examples],
        loss: Loss,
        folder: Path,
        *,
        rounds: int,
        attendance: Attendance | None = None,
        traits: Mapping[str, Mapping[str, str]] | None = None,
        replies: bool = False,
    ) -> None:
        self.setup, self.model, self.folder, self.rounds = setup, model, folder, rounds
        self.attendance = attendance or Attendance()
        self.start = take(model, setup.params)
        marks, self.digests = digests(self.start), Digests()
        self.sites = {
            name: Site(
                name=name,
                rows=held,
                journal=Journal(home_of(folder, name), replies=replies),
                model=model,
                start=self.start,
                marks=marks,
                loss=loss,
                digests=self.digests,
                traits=dict((traits or {}).get(name, {})),
            )
            for name, held in rows.items()
        }
        self.store = Store(folder / "world")
        self.store.claim()
        self.world, lengths = self._resumed()
        self.ledger = Ledger(folder / "ledger.jsonl", length=lengths.get("ledger", 0))
        self.metrics = Ledger(folder / "metrics.jsonl", length=lengths.get("metrics", 0))

    def _resumed(self) -> tuple[World, dict[str, int]]:
        """The world as it was last committed, or as the model starts it."""
        found = self.store.read()
        if found is None:
            return World.start(self.setup, self.model), {}
        world = _world_of(found.tensors, found.meta)
        for name, known in world.known.items():
            current = {k for k, version in known.items() if version == world.versions[k]}
            self.sites[name].seen = {k: world.values[k] for k in current}
        return world, found.meta["lengths"]

    def round(self) -> Tally:
        """Play the next round up to its close; `commit` makes it last."""
        number = self.world.round + 1
        self.world = announced(self.setup, self.world)
        experiment, roster = self.setup.experiment, list(self.sites)
        cohort = self.attendance.cohort(experiment, number, roster)
        fates = {name: self.attendance.fate(experiment, number, name) for name in cohort}
        asked = [name for name in cohort if fates[name] != "dropped"]
        tally = opened(self.setup, self.world, {n: self.sites[n] for n in asked})
        for name in asked:
            update = local(self.setup, self.sites[name], tally.cohort[name])
            reach("round.answered")
            if fates[name] == "late":
                tally.rejected[name] = "late"
                hear(tally, update)
            else:
                pull(self.setup, self.world, tally, update)
        tally.rejected |= {n: "dropped" for n in cohort if fates[n] == "dropped"}
        reach("round.before_close")
        self.world = close(
            self.setup, self.world, tally, roster=len(roster), later=self._later(number)
        )
        return tally

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

    def _turns(self, number: int, phase: str) -> Iterator[Turn]:
        return (Turn(number, name, phase, site.traits) for name, site in self.sites.items())

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
        self.store.write(tensors, meta | {"lengths": lengths}, number=self.world.round)
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
            "down": sum(tally.cohort[c].nbytes for c in tally.cohort),
        }
        return [*(tally.lines[c] for c in sorted(tally.lines)), whole]

    def world_values(self) -> dict[str, Tensor]:
        """The federation's model: its values, and the start's for what each client keeps."""
        trainable = self.setup.trainable
        return {p.key: self.world.values.get(p.key, self.start[p.key]) for p in trainable}

    def personal_values(self, name: str) -> dict[str, Tensor]:
        """One client's model: its own values over the federation's."""
        home, _ = self.sites[name].journal.home()
        turn = Turn(self.world.round, name, self.world.phase, self.sites[name].traits)
        roles = permitted(self.setup.method.plan, self.setup.params, turn)
        own = {p.key for p in self.setup.trainable if roles[p].own}
        return self.world_values() | {k: v for k, v in home.items() if k in own}


def _written(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"value/{k}": v for k, v in world.values.items()}
    for key, memory in world.memory.items():
        tensors |= {f"memory/{name}/{key}": v for name, v in memory.items()}
    meta = {"round": world.round, "phase": world.phase, "versions": world.versions}
    drift = {kind: list(numbers) for kind, numbers in world.drift.items()}
    return tensors, meta | {"known": world.known, "drift": drift}


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
    return World(values, versions, meta["round"], meta["phase"], known, memory, drift)
