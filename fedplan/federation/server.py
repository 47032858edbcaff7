# SPDX-License-Identifier: Apache-2.0
"""Servers: the federation's side of a run, in a folder. No transport is in it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import Any

from torch import Tensor

from fedplan import seeds
from fedplan.errors import FedplanError
from fedplan.federation.aggregation import OpenSum
from fedplan.federation.agreement import Agreement
from fedplan.federation.callbacks import Closed
from fedplan.federation.history import Metrics, Past, row_of
from fedplan.federation.identity import RUN, Identity, identified, read_identity
from fedplan.federation.messages import Update
from fedplan.federation.participation import Participation
from fedplan.federation.record import RoundRecord, TurnRecord, joined, read_round
from fedplan.federation.remains import require_secrets
from fedplan.federation.rounds import Parcels, Tally, announced, close, pull, push
from fedplan.federation.segments import next_segment, open_ledger, read_past, read_segment
from fedplan.federation.warnings import warnings_of
from fedplan.federation.ways import aggregation_of
from fedplan.federation.world import BEST, METRICS, WORLD, World, world_values
from fedplan.language.crowds import told_apart
from fedplan.language.horizon import rounds_ahead
from fedplan.language.plan import Role
from fedplan.language.resolution import permitted
from fedplan.language.turn import Turn
from fedplan.models.params import Block
from fedplan.privacy.guard import CHARGES, SECRET
from fedplan.storage.failpoints import reach
from fedplan.storage.files import mark_of_file
from fedplan.storage.generations import Generation
from fedplan.storage.lines import Lines, read_lines
from fedplan.storage.store import Store
from fedplan.tensors.named import Digests, digests
from fedplan.training.probes import public_look

log = logging.getLogger("fedplan")

STUDY = "study.json"

SMALL = (STUDY, "manifest.json", "task.json", RUN)
"""Files of a run's folder that are written once, before its first round; a study may grow."""

Roster = Mapping[str, Mapping[str, str]]
"""Every client's name, with its traits."""


class Server:
    """A world and its ledger. What it has committed survives any kill.

    `start` are the values that the model starts with, of every param that may change, and `marks`
    the digest of each param; without these it takes the values of all. What the world has moved
    for good is let go of. `rows` are the digests of clients' rows, where they are seen.
    """

    def __init__(
        self,
        agreement: Agreement,
        start: Mapping[str, Tensor],
        folder: Path,
        *,
        rounds: int,
        roster: Roster,
        participation: Participation | None = None,
        marks: Mapping[str, str] | None = None,
        rows: Mapping[str, str] | None = None,
    ) -> None:
        self.start, self.folder, self.rounds = dict(start), folder, rounds
        self.roster: dict[str, Mapping[str, str]] = dict(roster)
        self.digests = Digests()
        self.marks = dict(marks) if marks is not None else digests(start)
        self.store = Store(folder / WORLD)
        self.store.claim()
        found = self.store.read()
        self.identity = _identity(folder, agreement, self.marks, rows or {}, found)
        self.agreement = agreement = replace(agreement, run=self.identity.id)
        files: dict[str, Any] = found.meta["files"] if found else {}
        require_secrets(folder, files)
        self.world = (
            World.loaded(found.tensors, found.meta) if found else World.start(agreement, start)
        )
        self.aggregation = aggregation_of(
            agreement,
            folder / "privacy",
            participation or Participation(),
            found.meta if found else {},
        )
        self._marked = dict[Path, tuple[tuple[int, int, int], list[int | str]]]()
        self._let_go()
        self._agreed: list[int | str] | None = files.get(STUDY)
        self.ledger = open_ledger(folder, files, self.world.round)
        length, sha256 = files.get(METRICS, (0, ""))
        self.metrics = Lines(folder / METRICS, length=length, sha256=sha256)

    def agree(self) -> None:
        """Stand by the study as it now is: rounds may be added to it, and places may change."""
        now = mark_of_file(self.folder / STUDY)
        found = self.store.read() if self._agreed != now else None
        if found is not None:
            meta = found.meta | {"files": found.meta["files"] | {STUDY: now}}
            self.store.write(found.tensors, meta, number=found.number)

    def begin(self) -> Tally:
        """Announce the phase of the next round, and say who is asked for what."""
        self.world = announced(self.agreement, self.world)
        number = self.world.round + 1
        cohort = self.aggregation.cohort(number, list(self.roster))
        parcels = Parcels(self.agreement, self.world)
        tally = Tally(
            {name: parcels.request(name, self.roster[name]) for name in cohort},
            self._total(number, None),
            marks=self.marks,
            digests=self.digests,
        )
        self._settle(tally, self._standing(number))
        return tally

    def _standing(self, number: int) -> Mapping[Block, float] | None:
        """The scores that all choose by before anybody is asked: the last vote's, if any.

        Where clients are hidden and choose together by what looks at no rows, it is said here: in
        a poll, who is there would decide what is released.
        """
        agreement, turns = self.agreement, self._turns(number, self.world.phase)
        guarantee, together = agreement.guarantee, agreement.method.together
        alone = not self.aggregation.hides or (guarantee and guarantee.vote) or not together
        if alone or not any(map(agreement.chooses, turns)):
            return self.world.choice or None
        seed = seeds.seed(agreement.experiment, "probe", number)
        return agreement.method.probe(public_look(agreement.blocks, seed))

    def voters(self, tally: Tally) -> list[str] | None:
        """The clients of a round that say first what they would choose: those whose plan does.

        None if nobody is asked. A vote is held even if nobody is there: its noise hides that.
        """
        guarantee, agreement = self.agreement.guarantee, self.agreement
        if guarantee is not None and guarantee.vote:
            return list(tally.cohort) if guarantee.votes(self.world.round + 1) else None
        if not agreement.method.together or self.aggregation.hides:
            return None
        return [n for n, request in tally.cohort.items() if agreement.chooses(request.turn)] or None

    def choose(self, tally: Tally, polled: Mapping[str, Mapping[Block, float]]) -> None:
        """Have all choose alike: by the sum of what was polled, or by what a vote makes of it."""
        guarantee, number = self.agreement.guarantee, self.world.round + 1
        there = set(self.agreement.blocks)
        polled = {name: said for name, said in polled.items() if said.keys() <= there}
        scores = self.aggregation.chosen(number, polled)
        if guarantee is not None and guarantee.vote:
            self.world = replace(self.world, choice=scores)
        elif not scores:
            raise FedplanError(
                f"round {number}: nobody who was asked gave scores that are numbers, so "
                "nothing can be chosen; start the run again to go on with this round"
            )
        self._settle(tally, scores)

    def _settle(self, tally: Tally, scores: Mapping[Block, float] | None) -> None:
        """Have all choose by these scores, if any; what may then be shared is what is summed."""
        if tally.heard:
            raise FedplanError("all choose before anybody is heard, and some were")
        if scores is not None:
            tally.choose(scores)
            tally.total = self._total(self.world.round + 1, scores)

    def _total(self, number: int, scores: Mapping[Block, float] | None) -> OpenSum:
        """The open sum of a round, over all that anybody may share in it."""
        return self.aggregation.begin(
            self.world, lambda: self._shared(number, scores), len(self.roster)
        )

    def _shared(self, number: int, scores: Mapping[Block, float] | None) -> dict[str, Tensor]:
        """What any client may share in a round, whoever is asked: that is public."""
        agreed, turns = self.agreement, self._turns(number, self.world.phase)
        told = [replace(turn, scores=scores) for turn in turns]
        public = agreed.public(*told[:1]) if agreed.in_shares and told else agreed.shared_in(told)
        return {p.key: self.world.values[p.key] for p in public}

    def anew(self, tally: Tally, client: str) -> None:
        """Ask a client again that has lost what it had of the world, and send it all of it."""
        vain = tally.cohort[client]
        tally.vain += vain.nbytes
        request = push(self.agreement, self.world, client, self.roster[client], anew=True)
        turn = replace(request.turn, scores=vain.turn.scores)
        tally.cohort[client] = replace(request, turn=turn, base=vain.base, attempt=vain.attempt)

    def take(self, tally: Tally, update: Update, *, late: bool = False) -> None:
        """Count an update, or write down why not; a late one is heard, and not counted."""
        pull(self.agreement, self.world, tally, update, late=late)

    def end(self, tally: Tally) -> None:
        """Close a round with what has come; `commit` makes it last."""
        reach("round.before_close")
        outcome, later = tally.total.close(), self._later(self.world.round + 1)
        tally.products, tally.defence = outcome.products, outcome.defence
        tally.masked = outcome.masked
        self.world = close(self.agreement, self.world, tally, outcome, later=later)

    def _later(self, number: int) -> set[str]:
        """Keys that some later round may move, in this phase or in one that may still come."""
        phases = self.agreement.method.announce.phases
        still = phases[phases.index(self.world.phase) :] if self.world.phase else ("", *phases)
        moves = (self._last_moves[phase] for phase in still)
        return {key for found in moves for key, last in found.items() if last > number}

    @cached_property
    def _last_moves(self) -> dict[str, dict[str, float]]:
        """The last round that may move each key, in each phase, if a run were never to end.

        A run that is given more rounds later must remember what a longer one would.
        """
        phases = ("", *self.agreement.method.announce.phases)
        return {phase: self._moves(phase) for phase in phases}

    def _moves(self, phase: str) -> dict[str, float]:
        plan, params = self.agreement.method.plan, self.agreement.params
        ahead = rounds_ahead(plan)
        if ahead is None:
            return dict.fromkeys((p.key for p in self.agreement.movable), inf)
        kinds = told_apart(plan, self.roster)
        sayings = {
            plan.settle(turn): (turn, inf if ever else number)
            for number, ever in ahead
            for turn in (Turn(number, name, phase, traits) for name, traits in kinds)
        }
        found = dict[str, float]()
        for turn, last in sayings.values():
            roles = permitted(plan, params, turn)
            shared = [p.key for p in params if roles[p] is Role.SHARE]
            found |= {key: max(last, found.get(key, 0)) for key in shared}
        return found

    def _turns(self, number: int, phase: str) -> list[Turn]:
        """A turn of each kind of client that the plan tells apart: of a large roster, few."""
        kinds = told_apart(self.agreement.method.plan, self.roster)
        return [Turn(number, name, phase, traits) for name, traits in kinds]

    def commit(
        self,
        tally: Tally,
        scores: Mapping[str, Any] | None = None,
        signs: Mapping[str, Any] | None = None,
    ) -> Closed:
        """Write a round down for good: its lines, then the world that it made.

        `scores` are kept beside the ledger, `signs` in the round's own line.
        """
        past, turns = self._past, tuple(tally.lines[name] for name in sorted(tally.lines))
        whole = read_round({**self._whole(tally).json(), **(signs or {})})
        whole = replace(whole, warnings=warnings_of(whole, turns, past.drifts))
        ledger, opening = next_segment(self.ledger, past)
        ledger.append([*opening, *(turn.json() for turn in turns), whole.json()])
        self.ledger = ledger
        reach("round.ledger_written")
        self.metrics.append([{"round": self.world.round, **scores}] if scores else [])
        reach("round.before_commit")
        tensors, meta = self.world.saved()
        meta |= {"run": self.identity.id, "files": self._files(), **self.aggregation.saved()}
        self.store.write(tensors, meta, number=self.world.round)
        reach("round.committed")
        self._let_go()
        past.add(whole, turns, scores or {})
        for each in whole.warnings:
            log.warning("round %d: %s", whole.round, each)
        return self._closed(whole, turns, scores or {}, Metrics(past.metrics))

    def _closed(
        self,
        whole: RoundRecord,
        turns: tuple[TurnRecord, ...],
        scores: Mapping[str, Any],
        metrics: Metrics,
    ) -> Closed:
        """A round as callbacks are told of it."""
        where = self.agreement.experiment, self.identity.id, self.folder, self.aggregation.hides
        return Closed(self.rounds, whole, turns, scores, metrics, *where)

    def _let_go(self) -> None:
        """Forget the start of what the world has moved: whoever lacks it is sent the world's."""
        for key in [key for key in self.start if self.world.versions.get(key, 0)]:
            del self.start[key]

    def score(self, closed: Closed, scores: Mapping[str, Any]) -> Closed:
        """Write down the scores of the last round, which were asked for once it was committed.

        A kill before this line leaves a round without scores, which may be asked for again.
        """
        self.metrics.append([{"round": closed.round, **scores}])
        if (found := self.store.newest()) is not None:
            files = found.meta["files"] | {METRICS: self.metrics.mark}
            self.store.amend(found.meta | {"files": files}, number=found.number)
        self.history[-1] = row_of(closed.whole, closed.turns, scores)
        return replace(closed, scores=scores, metrics=Metrics(self.history))

    def keep_best(self, number: int) -> None:
        """Keep the world beside the run, if this is the number of its round: it is the best yet."""
        if number == self.world.round and number:
            store, world = Store(self.folder / BEST, keep=1), replace(self.world, memory={})
            if number not in store.numbers():
                tensors, meta = world.saved()
                store.write(tensors, meta | {"run": self.identity.id}, number=number)

    @property
    def history(self) -> Metrics:
        """The metrics of every round that was committed."""
        return self._past.metrics

    @cached_property
    def _past(self) -> Past:
        """The numbers of all rounds and the drift of the last ones, from the open segment."""
        return read_past(self.ledger, self.metrics.file)

    def last(self) -> Closed | None:
        """The last round that was committed, as it was told when it was."""
        _, records = read_segment(self.ledger.file)
        if not records or not isinstance(whole := records[-1], RoundRecord):
            return None
        lines = {line["round"]: line for line in read_lines(self.metrics.file)}
        scores = {k: v for k, v in lines.get(whole.round, {}).items() if k != "round"}
        same = (each for each in records if isinstance(each, TurnRecord))
        turns = tuple(turn for turn in same if turn.round == whole.round)
        return self._closed(whole, turns, scores, Metrics(self.history))

    def _whole(self, tally: Tally) -> RoundRecord:
        self.digests.only(self.world.values.values())
        moved = {k for k, v in self.world.versions.items() if v == self.world.round}
        asked, sizes = tally.cohort.values(), self.agreement.sizes
        down = sum(sizes[key] for request in asked for key in request.versions)
        return RoundRecord(
            round=self.world.round,
            phase=self.world.phase,
            counted=tuple(sorted(tally.counted)),
            rejected=dict(sorted(tally.rejected.items())),
            moved={k: self.digests.of(self.world.values[k]) for k in sorted(moved)},
            drift=self.world.drift,
            up=sum(record.up for record in tally.lines.values()),
            down=tally.vain + down,
            products=tally.products,
            defence=tally.defence,
            masked=tally.masked,
        )

    def _files(self) -> dict[str, list[int | str]]:
        """The length and the digest of every file beside the world, for `verify`."""
        files = [self.folder / name for name in SMALL if (self.folder / name).exists()]
        for name in (SECRET, CHARGES) if self.agreement.guarantee else ():
            files += sorted((self.folder / "privacy").rglob(name))
        marks = {str(file.relative_to(self.folder)): self._mark(file) for file in files}
        return marks | {f.file.name: f.mark for f in (self.ledger, self.metrics)}

    def _mark(self, file: Path) -> list[int | str]:
        """The length and the digest of a file, read again only if it was written again."""
        found = file.stat()
        now = (found.st_mtime_ns, found.st_size, found.st_ino)
        if file not in self._marked or self._marked[file][0] != now:
            self._marked[file] = now, mark_of_file(file)
        return self._marked[file][1]

    def world_values(self) -> dict[str, Tensor]:
        """The federation's model: its values, and the start's for what each client keeps."""
        return world_values(self.agreement, self.world, self.start)


def _identity(
    folder: Path,
    agreement: Agreement,
    marks: Mapping[str, str],
    rows: Mapping[str, str],
    found: Generation | None,
) -> Identity:
    """Which run this is; a world without its identity, or with another's, is refused."""
    if found and (not (folder / RUN).exists() or read_identity(folder).id != found.meta["run"]):
        raise FedplanError(
            f"{folder / RUN} is not that of the world beside it: put a copy of it back"
        )
    joint = joined(agreement.params, marks)
    return identified(
        folder, Identity(agreement.run, agreement.study, agreement.start, dict(rows), joint)
    )
