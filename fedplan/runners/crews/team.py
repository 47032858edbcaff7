# SPDX-License-Identifier: Apache-2.0
"""Teams: a crew of resident workers, each with a queue of clients and a partial sum of its own.

The longest turns are given out first. A worker that dies is replaced, and every client of the round
whose update was in its sum is played again, which gives the same bits and moves no home twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedplan.errors import FedplanError
from fedplan.federation.codes import meant
from fedplan.federation.evaluation import Scores, question
from fedplan.federation.messages import Request, request_header, scored
from fedplan.federation.partial import Sent, emptied, merge, opening
from fedplan.federation.record import read_turn
from fedplan.federation.rounds import Tally
from fedplan.federation.server import Server
from fedplan.federation.states import SiteState
from fedplan.federation.status import Status
from fedplan.models.params import Block
from fedplan.runners.clients import Clients
from fedplan.runners.crews.player import Words
from fedplan.runners.crews.workers import Hands
from fedplan.tensors.sums import SumError

BEAT = 1.0
"""Seconds after which a run tells that it is there, though no worker has answered."""
MOST_LOST = 5
"""How often a worker may die of one client, or one after the other while it starts."""

STARTING, SUMMING = "before it could play anybody", "with a sum that it was to hand over"
"""When a worker died, if not of a client."""


@dataclass
class Errand:
    """One client that is to be played: what is asked, the request if there is one, and its place
    among the others. What costs most is given out first.
    """

    do: str
    client: str
    request: Request | None = None
    place: int = 0
    late: bool = False
    cost: float = 0.0


@dataclass
class Seat:
    """One worker as its server sees it.

    `has` are the versions of the world that it holds, `tables` what it was told that many clients
    share. `out` are the messages that it has not answered, with the job of each; `told` is what it
    said of the clients in its sum, until that comes.
    """

    ready: bool = False
    has: dict[str, int] = field(default_factory=dict[str, int])
    batch: int = -1
    tables: dict[str, dict[Any, int]] = field(default_factory=dict[str, dict[Any, int]])
    out: list[Errand | None] = field(default_factory=list["Errand | None"])
    told: list[tuple[Errand, Words]] = field(default_factory=list[tuple[Errand, Words]])
    open: bool = False


class Crowded(FedplanError):
    """Updates that are too large to be summed in any order: they are taken one by one."""


class Team:
    """Workers that play the clients of a run; `begin` is what each is told when it starts."""

    server: Server
    clients: Clients
    status: Status

    def __init__(self, hands: Hands, begin: Mapping[str, Any]) -> None:
        self.hands, self.begin = hands, begin
        self.seats = dict[int, Seat]()
        self.seconds, self.lost = dict[str, float](), Counter[str]()
        self._batch, self._pace, self._shared = 0, 1.0, dict[tuple[str, ...], object]()

    def hired(self, server: Server, clients: Clients, status: Status) -> Team:
        """The same team, at work for a server."""
        self.server, self.clients, self.status = server, clients, status
        return self

    def start(self) -> None:
        """Start all workers that are not there: they build the study while others work."""
        for number in range(self.hands.count):
            if number not in self.seats:
                self._start(number)

    def _start(self, number: int) -> None:
        self.seats[number] = Seat(out=[None])
        self.hands.start(number, self.begin)

    def close(self) -> None:
        """End all workers."""
        self.seats.clear()
        self._shared.clear()
        self.hands.close()

    def polled(self, tally: Tally, names: Sequence[str]) -> dict[str, Mapping[Block, float]]:
        """What each of these clients would choose."""
        found = dict[str, Mapping[Block, float]]()

        def take(job: Errand, said: Words) -> Errand | None:
            if said.get("lacking"):
                return self._anew(tally, job)
            found[job.client] = scored(said["scores"])
            return None

        self._work([Errand("poll", name, tally.cohort[name]) for name in names], take)
        return {name: found[name] for name in names}

    def play(self, tally: Tally, names: Sequence[str], late: Collection[str]) -> None:
        """Play the turns of these clients, longest first; the tally is told in their order."""
        jobs = [
            Errand("turn", name, tally.cohort[name], place, name in late)
            for place, name in enumerate(names)
        ]
        before = tally.vain, dict(tally.cohort), dict(tally.rejected)
        try:
            self._play(tally, [replace(job, cost=self._cost(job.client)) for job in jobs])
        except Crowded:
            tally.vain, tally.cohort, tally.rejected = before
            self._play(tally, jobs, lone=True)
        counted = set(tally.counted)
        tally.heard = [name for name in names if name in tally.lines]
        tally.counted = [name for name in tally.heard if name in counted]

    def _play(self, tally: Tally, jobs: Sequence[Errand], *, lone: bool = False) -> None:
        """Play turns by all workers; by a `lone` one, in their order, into one sum."""
        tally.lines, tally.counted = {}, []
        whole = emptied(tally.total)

        def take(job: Errand, said: Words) -> Errand | None:
            if said.get("lacking"):
                return self._anew(tally, job)
            if said["crowded"] and not lone:
                raise Crowded(f"the update of {job.client} had no room in a part of the sum")
            self.status.site(job.client, SiteState.ANSWERED)
            self._note(job, said["seconds"])
            return None

        def join(told: list[tuple[Errand, Words]], part: Sent) -> None:
            try:
                merge(whole, *part)
            except SumError as error:
                raise Crowded(str(error)) from error
            for job, said in told:
                _told(tally, job.client, said)

        self._work(jobs, take, total=opening(whole), join=join, lone=lone)
        tally.total = whole

    def scored(self, names: Sequence[str]) -> tuple[dict[str, Scores], dict[str, str]]:
        """What each says of the models of the last round; who says nothing, and why."""
        said, silent = dict[str, Scores](), dict[str, str]()

        def take(job: Errand, answer: Words) -> Errand | None:
            if answer.get("lacking"):
                return replace(job, request=self._question(job.client, anew=True))
            if "refused" in answer:
                silent[job.client] = meant("refused", answer["refused"])
            else:
                said[job.client] = answer["scores"]
            return None

        self._work([Errand("scores", name, self._question(name)) for name in names], take)
        order = [name for name in names if name in said]
        return {name: said[name] for name in order}, silent

    def own_scores(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        """The scores of each client's own model on its own rows."""
        found = dict[str, dict[str, float]]()

        def take(job: Errand, answer: Words) -> None:
            found[job.client] = answer["scores"]

        self._work([Errand("own", name) for name in names], take)
        return {name: found[name] for name in names}

    def _question(self, name: str, *, anew: bool = False) -> Request:
        traits = self.server.roster[name]
        return question(self.server.agreement, self.server.world, name, traits, anew=anew)

    def _anew(self, tally: Tally, job: Errand) -> Errand:
        self.server.anew(tally, job.client)
        return replace(job, request=tally.cohort[job.client])

    def _cost(self, name: str) -> float:
        """The seconds of a turn: the client's last one's, or else by its steps."""
        steps = self.server.agreement.pace.steps_of(len(self.clients.rows[name]))
        return self.seconds.get(name, self._pace * steps)

    def _note(self, job: Errand, seconds: float) -> None:
        steps = self.server.agreement.pace.steps_of(len(self.clients.rows[job.client]))
        self.seconds[job.client], self._pace = seconds, seconds / max(steps, 1)

    def _work(
        self,
        jobs: Sequence[Errand],
        take: Callable[[Errand, Words], Errand | None],
        *,
        total: Words | None = None,
        join: Callable[[list[tuple[Errand, Words]], Sent], None] | None = None,
        lone: bool = False,
    ) -> None:
        """Give out jobs until each is answered and every sum is here.

        `take` may ask for a job again, by another request. A `total` is opened by each worker
        before its first turn, and `join` takes what came of it.
        """
        self.start()
        self._batch, self._shared = self._batch + 1, {}
        self.lost.clear()
        try:
            self._worked(list(jobs), take, total, join, lone=lone)
        except BaseException:
            self.close()  # else what they still say would be heard in another round
            raise

    def _worked(
        self,
        queue: list[Errand],
        take: Callable[[Errand, Words], Errand | None],
        total: Words | None,
        join: Callable[[list[tuple[Errand, Words]], Sent], None] | None,
        *,
        lone: bool,
    ) -> None:
        again = True
        while True:
            if again:
                # The last is given out first: the longest, or by one worker who stands first.
                queue.sort(key=lambda job: (job.cost, -job.place))
            self._give(queue, total, 1 if lone else self.hands.count)
            left = len(queue)
            if not left and not any(seat.out for seat in self.seats.values() if seat.ready):
                return
            answers = self.hands.heard(BEAT)
            self.status.beat()
            for number, answer in answers:
                if answer is None:
                    queue += self._again(number)
                elif (job := self._heard(number, answer, take, join)) is not None:
                    queue.append(job)
            again = len(queue) > left

    def _give(self, queue: list[Errand], total: Words | None, few: int) -> None:
        """Give each worker that has nothing to do the next job, or ask it for its sum."""
        # With one more at hand a worker does not wait for us, while there are many left.
        ahead = 2 if len(queue) > 2 * few else 1
        for number, seat in self.seats.items():
            if not seat.ready or number >= few:
                continue
            while queue and len(seat.out) < ahead:
                self._ask(number, seat, queue.pop(), total)
            if not queue and not seat.out and seat.told:
                seat.out.append(Errand("sum", ""))
                self.hands.send(number, {"do": "sum"})

    def _ask(self, number: int, seat: Seat, job: Errand, total: Words | None) -> None:
        if seat.batch != self._batch:
            self._sync(number, seat)
        if total is not None and not seat.open:
            self._send(number, seat, {"do": "open", "total": total})
            seat.open = True
        if job.do == "turn":
            self.status.site(job.client, SiteState.ASKED)
        seat.out.append(job)
        self.hands.send(number, self._worded(seat, job))

    def _sync(self, number: int, seat: Seat) -> None:
        """Send a worker what has changed of the world since it was last told."""
        world, agreement = self.server.world, self.server.agreement
        fresh = {k: n for k, n in world.versions.items() if seat.has.get(k, 0) != n}
        said = {"do": "world", "run": agreement.run, "agreed": agreement.fingerprint}
        said |= {"round": world.round, "phase": world.phase, "versions": fresh}
        keys = tuple(fresh)
        if keys and keys not in self._shared:
            self._shared[keys] = self.hands.share({key: world.values[key] for key in keys})
        seat.has, seat.batch, seat.open = dict(world.versions), self._batch, False
        seat.tables = {"versions": {}, "held": {}}
        self._send(number, seat, said, self._shared.get(keys))

    def _send(self, number: int, seat: Seat, said: Words, shared: object = None) -> None:
        seat.out.append(None)
        self.hands.send(number, said, shared)

    def _worded(self, seat: Seat, job: Errand) -> Words:
        """A job as a message; what many clients have in common is said to a worker once."""
        said: Words = {"do": job.do, "client": job.client, "late": job.late}
        if job.request is None:
            return said
        world = self.server.world
        known = world.known_by(job.client)
        held = [key for key, number in known.items() if number == world.versions[key]]
        versions = job.request.versions
        said |= request_header(job.request)
        said["versions"] = _entry(seat.tables["versions"], tuple(versions.items()), versions)
        said["held"] = _entry(seat.tables["held"], tuple(held), held)
        return said

    def _heard(
        self,
        number: int,
        answer: Sent,
        take: Callable[[Errand, Words], Errand | None],
        join: Callable[[list[tuple[Errand, Words]], Sent], None] | None,
    ) -> Errand | None:
        """Take an answer to the first message that a worker has not answered."""
        seat, (tensors, said) = self.seats[number], answer
        job = seat.out.pop(0)
        if not seat.ready:
            seat.ready = True
            del self.lost[STARTING]  # a worker can start: whatever killed others was none of it
        if "error" in said and not ("refused" in said and job and job.do == "scores"):
            who = f"client {job.client!r}: " if job and job.client else ""
            code = said.get("code") or said.get("refused")
            fault = FedplanError(f"{who}{said['error']}")
            raise fault.coded(code) if code else fault
        if job is None:
            return None
        if job.do == "sum":
            told, seat.told, seat.open = seat.told, [], False
            if join is not None:
                join(told, (tensors, said))
            return None
        again = take(job, said)
        if again is None and job.do == "turn":
            seat.told.append((job, said))
        return again

    def _again(self, number: int) -> list[Errand]:
        """Put another worker in a dead one's place; the jobs that have to be done again."""
        seat = self.seats.pop(number)
        asked = [job for job in seat.out if job is not None and job.client]
        about = f"while it played {asked[0].client!r}" if asked else SUMMING
        about = about if seat.ready else STARTING
        self.lost[about] += 1
        self.status.tell("worker died", f"worker {number}, {about}")
        if self.lost[about] > MOST_LOST:
            raise FedplanError(
                f"a worker died {MOST_LOST + 1} times {about}: see what it wrote to stderr; if "
                "memory ran out, take fewer workers or smaller batches"
            )
        self._start(number)
        return [*asked, *(job for job, _ in seat.told)]


def _entry(table: dict[Any, int], key: Any, value: object) -> list[Any]:
    """How a worker is told a value that it may know: `[number]`, or `[number, value]` at first."""
    if key in table:
        return [table[key]]
    table[key] = len(table)
    return [table[key], value]


def _told(tally: Tally, client: str, said: Words) -> None:
    """What a worker said of a client, in the tally of the round."""
    if said["line"] is not None:
        tally.lines[client] = read_turn(said["line"])
    if said["counted"]:
        tally.counted.append(client)
    if said["rejected"] is not None:
        tally.rejected.setdefault(client, said["rejected"])
