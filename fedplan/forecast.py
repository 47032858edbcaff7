# SPDX-License-Identifier: Apache-2.0
"""Forecasts: what a plan will train, send and cost over a run, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from fedplan.errors import PlanError
from fedplan.params import Param, Params
from fedplan.plan import Best, By, Plan, Role, Roles, Step, When
from fedplan.predicates import Predicate
from fedplan.resolution import certain, check, permitted, resolve, touched
from fedplan.turn import After, ClientIn, Phase, Trait, Turn

MOMENTS = 2
"""Numbers that AdamW remembers for each one that it trains."""


@dataclass(frozen=True)
class Stage:
    """Rounds in which a plan says the same to a client.

    `moved` are the params that the federation may change. Where scores choose blocks, `up`
    is the heaviest choice and `up_least` the lightest; `down` is what comes back if the clients
    choose differently, `down_least` if all choose alike.
    """

    name: str
    rounds: tuple[int, ...]
    steps: tuple[Step, ...]
    certain: Roles
    permitted: Roles
    heaviest: Roles
    moved: frozenset[Param]
    up: int
    up_least: int
    down: int
    down_least: int
    trained: int
    optimiser: int

    def choice(self, param: Param) -> Best | None:
        """The `best` that decides whether a param is trained, if one does."""
        if self.certain[param] is self.permitted[param]:
            return None
        chosen = [s for s in self.steps if isinstance(s, Best) and s.part.holds(param)]
        return chosen[-1]


@dataclass(frozen=True)
class View:
    """A run as one kind of client sees it: its stages and its bytes in all."""

    who: str
    stages: tuple[Stage, ...]
    first: int
    up: int
    down: int


@dataclass(frozen=True)
class Forecast:
    """What a plan will do with a model over a run."""

    plan: Plan
    params: Params
    rounds: int
    views: tuple[View, ...]
    notes: tuple[str, ...]

    @cached_property
    def nbytes(self) -> int:
        """The whole model: what `share()` sends up in each round."""
        return sum(p.nbytes for p in self.params)


def forecast(
    plan: Plan,
    params: Params,
    *,
    rounds: int = 100,
    phases: Mapping[str, int] | None = None,
) -> Forecast:
    """Walk a run without training it. `phases` says after which round each phase is announced."""
    check(plan, params)
    if rounds < 1:
        raise PlanError(f"a run has one or more rounds, not {rounds}")
    announced = dict(phases or {})
    unknown = set(announced) - set(phases_in(plan))
    if unknown:
        raise PlanError(f"the plan speaks of no phase {sorted(unknown)[0]!r}")
    calendar = _Calendar(plan, params, rounds, announced)
    views = _merged(calendar.view(who, turn) for who, turn in _clients(plan))
    return Forecast(plan, params, rounds, views, tuple(calendar.notes()))


class _Calendar:
    """The turns of a run, and what each says, worked out once per distinct saying."""

    def __init__(
        self, plan: Plan, params: Params, rounds: int, announced: Mapping[str, int]
    ) -> None:
        self.plan, self.params, self.rounds, self.announced = plan, params, rounds, announced

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

    def view(self, who: str, turn: Turn) -> View:
        """A run as this client sees it."""
        sayings: dict[tuple[str, tuple[Step, ...]], list[Turn]] = {}
        for name, each in self.turns(turn):
            sayings.setdefault((name, self.plan.settle(each)), []).append(each)
        stages = tuple(self._stage(name, turns) for (name, _), turns in sayings.items())
        downs = self._downs(stages)
        return View(who, stages, downs[0], sum(s.up * len(s.rounds) for s in stages), sum(downs))

    def _downs(self, stages: Iterable[Stage]) -> list[int]:
        """Bytes that come down in each round to a client that takes part in all of them."""
        of_round = {number: stage for stage in stages for number in stage.rounds}
        movable = touched(self.plan, self.params, Role.SHARE)
        versions, known, downs = dict.fromkeys(movable, 0), dict[Param, int](), list[int]()
        for number, stage in sorted(of_round.items(), key=lambda item: item[0]):
            wanted = [p for p in movable if not stage.permitted[p].own]
            lacking = [p for p in wanted if known.get(p, -1) < versions[p]]
            known |= {p: versions[p] for p in lacking}
            downs.append(sum(p.nbytes for p in lacking))
            versions |= dict.fromkeys(stage.moved, number)
        return downs

    def _stage(self, name: str, turns: list[Turn]) -> Stage:
        turn, plan, params = turns[0], self.plan, self.params
        rounds = () if name else tuple(t.round for t in turns)
        most = permitted(plan, params, turn)
        sizes = dict.fromkeys((p.at for p in params if p.at), 0.0)
        for p in params:
            if p.at and most[p].trained:
                sizes[p.at] += p.nbytes
        turn = replace(turn, scores=sizes)
        heaviest = resolve(plan, params, turn)
        lightest = resolve(plan, params, replace(turn, scores={b: -n for b, n in sizes.items()}))
        others = [self._as(turn, client) for _, client in _clients(plan)]
        moved = _shared(permitted(plan, params, other) for other in others)
        alike = _shared(resolve(plan, params, other) for other in others)
        trained = [p for p in params if heaviest[p].trained]
        return Stage(
            name=name or _rounds(rounds),
            rounds=rounds,
            steps=plan.settle(turn),
            certain=certain(plan, params, turn),
            permitted=most,
            heaviest=heaviest,
            moved=moved,
            up=_sent(heaviest),
            up_least=_sent(lightest),
            down=sum(p.nbytes for p in moved - _own(most)),
            down_least=sum(p.nbytes for p in alike - _own(most)),
            trained=sum(p.numel for p in trained),
            optimiser=MOMENTS * sum(p.nbytes for p in trained),
        )

    def _as(self, turn: Turn, client: Turn) -> Turn:
        return replace(turn, client=client.client, traits=client.traits)

    def notes(self) -> Iterator[str]:
        """What the forecast leaves open."""
        for phase in phases_in(self.plan):
            if phase not in self.announced:
                yield f'the totals leave out phase "{phase}": say after which round it is announced'
        ends = [c.rounds for c in _conditions(self.plan) if isinstance(c, After)]
        if any(end >= self.rounds for end in ends):
            yield f"after({max(ends)}) lies beyond the last of {self.rounds} rounds"


def _shared(all_roles: Iterable[Roles]) -> frozenset[Param]:
    return frozenset(p for roles in all_roles for p in roles if roles[p] is Role.SHARE)


def _own(roles: Roles) -> frozenset[Param]:
    return frozenset(p for p in roles if roles[p].own)


def _sent(roles: Roles) -> int:
    return sum(p.nbytes for p, role in roles.items() if role is Role.SHARE)


def _merged(views: Iterable[View]) -> tuple[View, ...]:
    """Views that are the same but for who, as one."""
    same: dict[tuple[object, ...], View] = {}
    for view in views:
        said = tuple((stage.name, stage.steps, stage.down) for stage in view.stages)
        known = same.get(said)
        same[said] = replace(view, who=f"{known.who}; {view.who}") if known else view
    return tuple(same.values())


def _clients(plan: Plan) -> list[tuple[str, Turn]]:
    """One turn for each kind of client that a plan tells apart."""
    names = sorted({n for c in _conditions(plan) if isinstance(c, ClientIn) for n in c.names})
    traits: dict[str, set[str]] = {}
    for c in _conditions(plan):
        if isinstance(c, Trait):
            traits.setdefault(c.name, set()).add(c.value)
    for p in plan.within():
        if isinstance(p, By):
            traits.setdefault(p.trait, set()).update(value for value, _ in p.cases)
    said = [[(t, v) for v in (*sorted(values), "")] for t, values in sorted(traits.items())]
    return [
        (_who(name, held), Turn(client=name, traits={t: v for t, v in held if v}))
        for name, held in product((*names, ""), product(*said))
    ]


def _who(name: str, held: tuple[tuple[str, str], ...]) -> str:
    words = [name] if name else []
    return ", ".join(words + [f"{t} {v}" for t, v in held if v]) or "any other client"


def phases_in(plan: Plan) -> list[str]:
    """The phases that a plan speaks of."""
    return sorted({c.name for c in _conditions(plan) if isinstance(c, Phase)})


def _conditions(plan: Plan) -> Iterator[Predicate[Turn]]:
    for each in plan.within():
        if isinstance(each, When):
            yield from each.condition.atoms()


def _rounds(rounds: tuple[int, ...]) -> str:
    """Round numbers in words: `rounds 1-20`, `round 7`, `rounds 1, 13, 25 ... 97`."""
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    if rounds[-1] - rounds[0] == len(rounds) - 1:
        return f"rounds {rounds[0]}-{rounds[-1]}"
    shown = ", ".join(map(str, rounds[:3]))
    return f"rounds {shown} ... {rounds[-1]}" if len(rounds) > 3 else f"rounds {shown}"
