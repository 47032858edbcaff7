# SPDX-License-Identifier: Apache-2.0
"""Forecasts: what a plan will train, send and cost over a run, from shapes alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from fedplan.errors import PlanError
from fedplan.federation.fare import Fare
from fedplan.language.crowds import Crowd, conditions, kinds_of, phases_in
from fedplan.language.plan import Assign, Best, Plan, Role, Roles, Step
from fedplan.language.resolution import candidates, certain, check, permitted, resolve, touched
from fedplan.language.turn import After, Turn
from fedplan.models.params import Block, Param, Params
from fedplan.reports.views import Forecast, Segment, Span, View

MOMENTS = 2
"""Numbers that AdamW remembers for each one that it trains."""


def forecast(
    plan: Plan,
    params: Params,
    *,
    rounds: int = 100,
    phases: Mapping[str, int] | None = None,
    crowd: Crowd | None = None,
    fare: Fare | None = None,
) -> Forecast:
    """Walk a run without training it. `phases` says after which round each phase is announced.

    Without a `crowd`, clients of every kind may be there; without a `fare`, values travel as they
    are.
    """
    check(plan, params)
    if rounds < 1:
        raise PlanError(f"a run has one or more rounds, not {rounds}")
    announced = dict(phases or {})
    unknown = set(announced) - set(phases_in(plan))
    if unknown:
        raise PlanError(f"the plan speaks of no phase {sorted(unknown)[0]!r}")
    kinds = kinds_of(plan, crowd)
    calendar = _Calendar(plan, params, rounds, announced, kinds, crowd, fare or Fare())
    views = _merged(calendar.view(who, turn) for who, turn in kinds)
    return Forecast(plan, params, rounds, views, tuple(calendar.notes()), calendar.fare)


@dataclass(frozen=True)
class _Saying:
    """What a plan says in a turn: the roles, and what is shared surely and at most."""

    steps: tuple[Step, ...]
    certain: Roles
    permitted: Roles

    @cached_property
    def shared(self) -> tuple[frozenset[Param], frozenset[Param]]:
        return _shared(self.certain), _shared(self.permitted)

    @cached_property
    def federal(self) -> frozenset[Param]:
        """The federation's params."""
        return frozenset(p for p, role in self.permitted.items() if not role.own)


@dataclass
class _Held:
    """When a client that takes part in all rounds last had each param, its riders, and its own.

    There are two of them: to count the least, it has what it may have had; for the most, only what
    it surely had. What is `here` it has from the start, until the server changes it.
    """

    had: dict[Param, int] = field(default_factory=dict[Param, int])
    ridden: dict[Param, int] = field(default_factory=dict[Param, int])
    own: set[Param] = field(default_factory=set[Param])
    here: frozenset[str] = frozenset()

    def lacking(self, param: Param, role: Role, moved: int, riders: int) -> int:
        """The bytes of a param that come down if it last moved in this round."""
        first = not role.own and param not in self.had and param.key not in self.here
        news = first or (moved >= self.had.get(param, 1) and not (role.own and param in self.own))
        rides = role is Role.SHARE and moved >= self.ridden.get(param, 1)
        return param.nbytes * (news + riders * rides)

    def take(self, roles: Roles, number: int, moved: Mapping[Param, int]) -> None:
        """Take a turn, when these had moved by then. What never moved does not come to an own."""
        fresh = (p for p, role in roles.items() if role.own and p not in self.own)
        federal = (p for p, role in roles.items() if not role.own)
        self.had |= dict.fromkeys((p for p in fresh if p in self.had or p in moved), number)
        self.had |= dict.fromkeys(federal, number)
        shared = (p for p, role in roles.items() if role is Role.SHARE)
        self.ridden |= dict.fromkeys(shared, number)
        self.own |= {p for p, role in roles.items() if role.own}


class _Calendar:
    """The turns of a run, and what each says, worked out once per distinct saying."""

    def __init__(
        self,
        plan: Plan,
        params: Params,
        rounds: int,
        announced: Mapping[str, int],
        kinds: list[tuple[str, Turn]],
        crowd: Crowd | None,
        fare: Fare,
    ) -> None:
        self.plan, self.params, self.rounds, self.announced = plan, params, rounds, announced
        self.kinds, self.crowd, self.fare = kinds, crowd, fare
        shared = set(touched(plan, params, Role.SHARE))
        self.folded = frozenset(p for p in params if p.key in fare.folded)
        self.movable = tuple(p for p in params if p in shared or p in self.folded)
        self._said = dict[tuple[Step, ...], _Saying]()
        self._moves = dict[tuple[int, str], tuple[frozenset[Param], frozenset[Param]]]()

    def say(self, turn: Turn) -> _Saying:
        """What the plan says in a turn."""
        steps = self.plan.settle(turn)
        if steps not in self._said:
            roles = (each(self.plan, self.params, turn) for each in (certain, permitted))
            self._said[steps] = _Saying(steps, *roles)
        return self._said[steps]

    def turns(self, turn: Turn) -> Iterator[tuple[str, Turn]]:
        """Each round's turn with its stage's name; then the phases that no round has."""
        for number in range(1, self.rounds + 1):
            yield "", replace(turn, round=number, phase=self._phase(number))
        for phase in phases_in(self.plan):
            if phase not in self.announced:
                yield f'phase "{phase}"', replace(turn, round=self.rounds, phase=phase)

    def _phase(self, number: int) -> str:
        entered = [(after, name) for name, after in self.announced.items() if after < number]
        return max(entered, default=(0, ""))[1]

    def moved(self, turn: Turn) -> tuple[frozenset[Param], frozenset[Param]]:
        """What the federation surely moves in a round, and what it may."""
        if (turn.round, turn.phase) not in self._moves:
            others = (replace(turn, client=t.client, traits=t.traits) for _, t in self.kinds)
            shared = {self.say(other).shared for other in others}
            sure, may = (frozenset[Param]().union(*sets) for sets in zip(*shared, strict=True))
            self._moves[turn.round, turn.phase] = sure, may | (self.folded if may else set())
        sure, may = self._moves[turn.round, turn.phase]
        if self.crowd is None:
            # Who else is there is not known: surely a client moves what it sends itself.
            return self.say(turn).shared[0], may
        return sure if self.crowd.everyone else frozenset(), may

    def view(self, who: str, turn: Turn) -> View:
        """A run as this client sees it."""
        sayings: dict[tuple[str, tuple[Step, ...]], list[Turn]] = {}
        for name, each in self.turns(turn):
            sayings.setdefault((name, self.plan.settle(each)), []).append(each)
        stages = tuple(self._stage(name, turns) for (name, _), turns in sayings.items())
        ups = {number: stage.up_span for stage in stages for number in stage.rounds}
        rounds = [each for name, each in self.turns(turn) if not name]
        return View(who, stages, tuple(ups[t.round] for t in rounds), tuple(self._downs(rounds)))

    def _downs(self, turns: list[Turn]) -> Iterator[Span]:
        """Bytes that come down in each round: what moved since the client last had it."""
        moved: tuple[dict[Param, int], dict[Param, int]] = ({}, {})
        here = self.fare.folded
        held, before = (_Held(here=here), _Held(here=here)), None
        for turn in turns:
            said = self.say(turn)
            roles = {p: said.permitted[p] for p in self.movable}
            least, most = (
                sum(client.lacking(p, roles[p], last.get(p, 0), self.fare.riders) for p in roles)
                for client, last in zip(held, moved, strict=True)
            )
            yield least + self._returned(before, said, turn.round - 1, moved[0]), most
            for client, last in zip(held, reversed(moved), strict=True):
                client.take(roles, turn.round, last)
            for last, found in zip(moved, self.moved(turn), strict=True):
                last |= dict.fromkeys(found, turn.round)
            before = said

    def _returned(
        self, before: _Saying | None, said: _Saying, number: int, sure: Mapping[Param, int]
    ) -> int:
        """The least that returns of what the client itself chose in the round before."""
        if before is None or (self.crowd is not None and not self.crowd.everyone):
            return 0
        chosen = (before.shared[1] - before.shared[0]) & said.federal
        fresh = {p for p in chosen if sure.get(p, 0) < number}
        return self._chosen(before.steps, fresh, lambda p: self._size(said, p))[0]

    def _size(self, said: _Saying, param: Param) -> int:
        """What a param that moved takes on its way down."""
        return param.nbytes * (1 + self.fare.riders * (said.permitted[param] is Role.SHARE))

    def _stage(self, name: str, turns: list[Turn]) -> Segment:
        turn, said = turns[0], self.say(turns[0])
        rounds = () if name else tuple(t.round for t in turns)
        up = self._span(said, lambda role: role is Role.SHARE, self.fare.up)
        trained = self._span(said, lambda role: role.trained, lambda p: p.numel)
        kept = self._span(said, lambda role: role.trained, lambda p: MOMENTS * p.nbytes)
        backs = [self._back(self.say(each), self.moved(each)) for each in turns]
        return Segment(
            name=name or _rounds(rounds),
            rounds=rounds,
            steps=said.steps,
            certain=said.certain,
            permitted=said.permitted,
            heaviest=self._heaviest(said, turn),
            up_span=up,
            down_span=(min(least for least, _ in backs), max(most for _, most in backs)),
            trained=trained[1],
            optimiser=kept[1],
        )

    def _back(self, said: _Saying, moved: tuple[frozenset[Param], frozenset[Param]]) -> Span:
        """What of a round's moves a client wants."""
        least, most = (sum(self._size(said, p) for p in found & said.federal) for found in moved)
        return least, most

    def _span(
        self, said: _Saying, counts: Callable[[Role], bool], size: Callable[[Param], int]
    ) -> Span:
        """The sizes of params whose role counts, for the lightest and the heaviest choice."""
        sure = sum(size(p) for p, role in said.certain.items() if counts(role))
        left = {p for p in self.params if counts(said.permitted[p]) and not counts(said.certain[p])}
        least, most = self._chosen(said.steps, left, size)
        return sure + least, sure + most

    def _chosen(
        self, steps: tuple[Step, ...], params: set[Param], size: Callable[[Param], int]
    ) -> Span:
        """The sizes of those of some params that scores choose."""
        least, most = 0, 0
        for best, reached in _choices(steps, params):
            sizes = dict.fromkeys(candidates(best, self.params), 0)
            for p in reached:
                sizes[_block(p)] += size(p)
            order = sorted(sizes.values())
            least = max(least, sum(order[: best.count]))
            most += sum(order[-best.count :])
        return least, min(most, sum(map(size, params)))

    def _heaviest(self, said: _Saying, turn: Turn) -> Roles:
        sizes = dict.fromkeys((p.at for p in self.params if p.at), 0.0)
        for p in said.shared[1] - said.shared[0]:
            sizes[_block(p)] += self.fare.up(p)
        return resolve(self.plan, self.params, replace(turn, scores=sizes))

    def notes(self) -> Iterator[str]:
        """What the forecast leaves open."""
        for phase in phases_in(self.plan):
            if phase not in self.announced:
                yield f'the totals leave out phase "{phase}": say after which round it is announced'
        ends = [c.rounds for c in conditions(self.plan) if isinstance(c, After)]
        if any(end >= self.rounds for end in ends):
            yield f"after({max(ends)}) lies beyond the last of {self.rounds} rounds"
        if self.crowd is not None and not self.crowd.everyone:
            yield "not all take part in each round: the totals are of a client that does"


def _choices(steps: tuple[Step, ...], params: set[Param]) -> Iterator[tuple[Best, list[Param]]]:
    """Each `best` of a turn with those of some params that no later step takes from it."""
    for i, step in enumerate(steps):
        if isinstance(step, Best):
            later = [each.part for each in steps[i + 1 :] if isinstance(each, Assign)]
            held = [p for p in params if p.at is not None and step.part.holds(p)]
            yield step, [p for p in held if not any(part.holds(p) for part in later)]


def _block(param: Param) -> Block:
    assert param.at is not None
    return param.at


def _shared(roles: Roles) -> frozenset[Param]:
    return frozenset(p for p in roles if roles[p] is Role.SHARE)


def _merged(views: Iterable[View]) -> tuple[View, ...]:
    """Views that are the same but for who, as one."""
    same: dict[tuple[object, ...], View] = {}
    for view in views:
        stages = tuple((s.name, s.steps, s.up_span, s.down_span) for s in view.stages)
        said = (stages, view.ups, view.downs)
        known = same.get(said)
        same[said] = replace(view, who=f"{known.who}; {view.who}") if known else view
    return tuple(same.values())


def _rounds(rounds: tuple[int, ...]) -> str:
    """Round numbers in words: `rounds 1-20`, `round 7`, `rounds 1, 13, 25 ... 97`."""
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    if rounds[-1] - rounds[0] == len(rounds) - 1:
        return f"rounds {rounds[0]}-{rounds[-1]}"
    shown = ", ".join(map(str, rounds[:3]))
    return f"rounds {shown} ... {rounds[-1]}" if len(rounds) > 3 else f"rounds {shown}"
