# SPDX-License-Identifier: Apache-2.0
"""Resolve: a plan, the params and a turn become roles; and what a turn could at most share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from math import isnan, nan

from fedplan.errors import PlanError, UnknownArchitecture
from fedplan.language.parts import Part
from fedplan.language.plan import Assign, Best, By, Chain, Cycle, Plan, Role, Roles, Step, When
from fedplan.language.predicates import quoted
from fedplan.language.turn import Turn
from fedplan.models.params import TRAINED, Block, Param, Params

_Possible = dict[Param, frozenset[Role]]
Choose = Callable[[Best, tuple[Block, ...]], frozenset[Block]]


def resolve(plan: Plan, params: Params, turn: Turn) -> Roles:
    """Each param's role for one client in one round. What no plan mentions is FREEZE.

    >>> from fedplan import chain, keep, share
    >>> from fedplan.models.params import Kind, Param
    >>> from fedplan.parts import head
    >>> params = (Param("w", Kind.MLP, (2,)), Param("c", Kind.HEAD, (2,)))
    >>> [role.name for role in resolve(chain(share(), keep(head)), params, Turn()).values()]
    ['SHARE', 'KEEP']
    """
    check(plan, params)
    return _fold(plan.settle(turn), params, by_scores(turn.scores))


def permitted(plan: Plan, params: Params, turn: Turn) -> Roles:
    """The roles if scores could choose every block: what the server must be ready to accept.

    Scores decide whether a param is trained, never whose value it is, so each param has either
    this role or the same one at rest.
    """
    check(plan, params)
    return _fold(plan.settle(turn), params, lambda best, candidates: frozenset(candidates))


def certain(plan: Plan, params: Params, turn: Turn) -> Roles:
    """What is trained whatever the scores: a `best` that may leave blocks out may leave out any."""
    check(plan, params)

    def choose(best: Best, among: tuple[Block, ...]) -> frozenset[Block]:
        return frozenset(among) if best.count >= len(among) else frozenset()

    return _fold(plan.settle(turn), params, choose)


def touched(plan: Plan, params: Params, *roles: Role) -> Params:
    """Params that some turn may give one of these roles, whatever conditions and scores say."""
    possible = _possible(plan, dict.fromkeys(params, frozenset({Role.FREEZE})))
    return tuple(p for p in params if not possible[p].isdisjoint(roles))


def _possible(plan: Plan, before: _Possible) -> _Possible:
    """The roles that each param may have after a plan, given those that it may have before."""
    match plan:
        case Assign(role, part):
            return before | {p: frozenset({role}) for p in before if part.holds(p)}
        case Best(_, part):
            named = [p for p in before if p.at is not None and part.holds(p)]
            return before | {p: before[p] | {role.awake for role in before[p]} for p in named}
        case Chain(steps):
            return reduce(lambda found, step: _possible(step, found), steps, before)
        case When(_, then, otherwise):
            return _either([_possible(each, before) for each in (then, otherwise)])
        case Cycle(plans):
            return _either([_possible(each, before) for each in plans])
        case By(_, cases, otherwise):
            plans = [*(each for _, each in cases), otherwise]
            return _either([_possible(each, before) for each in plans])
        case _:
            raise PlanError(f"{plan!s} is not a plan of this language")


def _either(found: list[_Possible]) -> _Possible:
    return {p: frozenset[Role]().union(*(each[p] for each in found)) for p in found[0]}


class Resolver:
    """`resolve` for very many turns: turns that say the same share one answer."""

    def __init__(self, plan: Plan, params: Params) -> None:
        check(plan, params)
        self.plan, self.params = plan, params
        self._candidates = {p: candidates(p, params) for p in plan.within() if isinstance(p, Best)}
        self._known: dict[tuple[Step | frozenset[Block], ...], Roles] = {}

    def __call__(self, turn: Turn) -> Roles:
        """The same as `resolve(plan, params, turn)`."""
        steps = self.plan.settle(turn)
        choose = by_scores(turn.scores)
        chosen = {s: choose(s, self._candidates[s]) for s in steps if isinstance(s, Best)}
        said = (*steps, *chosen.values())
        if said not in self._known:
            self._known[said] = _fold(steps, self.params, lambda best, _: chosen[best])
        return self._known[said]


def check(plan: Plan, params: Params) -> None:
    """Raise unless every part that a plan speaks of is in the model, in whatever turn."""
    unsure = [param for param in params if param.doubts]
    for step in plan.within():
        if isinstance(step, Assign | Best):
            for param in unsure:
                if step.part.doubtful(param) or (isinstance(step, Best) and _homeless(step, param)):
                    raise UnknownArchitecture(_untold(step.text, step.part, param))
            for part in step.part.alternatives():
                if not any(part.holds(param) for param in params):
                    raise PlanError(_missing(step, part, params))
        if isinstance(step, Best) and step.count > len(candidates(step, params)):
            n = len(candidates(step, params))
            raise PlanError(
                f"{_short(step.text)} chooses {step.count} blocks, and the model has {n}"
            )


def require_told(part: Part, params: Params) -> None:
    """Raise if nobody knows of some param whether it belongs to a part."""
    for param in params:
        if part.doubtful(param):
            raise UnknownArchitecture(_untold(part.text, part, param))


def candidates(best: Best, params: Params) -> tuple[Block, ...]:
    """The blocks that a `best` may choose from."""
    return tuple(dict.fromkeys(p.at for p in params if p.at is not None and best.part.holds(p)))


def by_scores(scores: Mapping[Block, float] | None) -> Choose:
    """Choose the blocks with the highest scores; of equals, the earlier."""

    def choose(best: Best, among: tuple[Block, ...]) -> frozenset[Block]:
        if scores is None:
            raise PlanError(
                f"{best.text} needs the turn's scores, and there are none: give the turn scores, "
                "or ask what is permitted"
            )
        held = {block: scores.get(block, nan) for block in among}
        for block, score in held.items():
            if isnan(score):
                raise PlanError(f"{best.text} needs a score for {block.stack} block {block.number}")
        order = sorted(among, key=lambda block: -held[block])
        return frozenset(order[: best.count])

    return choose


def _fold(steps: Iterable[Step], params: Params, choose: Choose) -> Roles:
    roles = dict.fromkeys(params, Role.FREEZE)
    for step in steps:
        if isinstance(step, Assign):
            roles |= {param: step.role for param in params if step.part.holds(param)}
        else:
            chosen = choose(step, candidates(step, params))
            roles |= {p: roles[p].awake for p in params if p.at in chosen and step.part.holds(p)}
    _require_trainable(roles)
    return roles


def _require_trainable(roles: Roles) -> None:
    for param, role in roles.items():
        if role.trained and param.dtype not in TRAINED:
            raise PlanError(
                f"the plan trains {param.key}, whose numbers are {param.dtype} and cannot be "
                f"trained: freeze it, as in freeze(named({param.name!r})) at the plan's end; of a "
                "quantised model train what is added to it, as in chain(freeze(), share(adapter))"
            )


def _homeless(best: Best, param: Param) -> bool:
    """Whether a param may stand in a block that a `best` chooses from."""
    return "body" in param.doubts and best.part.holds(param)


def _untold(text: str, part: Part, param: Param) -> str:
    """Whose place nobody knows, and what to do about it."""
    atoms = [atom.text for atom in part.atoms() if atom.doubtful(param)] or ["blocks"]
    return (
        f"{text}: no anatomy of this model tells {' and '.join(dict.fromkeys(atoms))}, "
        f"and {param.name!r} may be of it. Either say what the model is like "
        '(model.like = "llama" in a study), or teach its row (fedplan.teach, model.anatomy in a '
        "study); `fedplan propose MODEL` proposes one and checks it. Without an anatomy a plan "
        f"can say everything, bias, norm, adapter and named({quoted(param.name)})"
    )


def _missing(step: Step, part: Part, params: Params) -> str:
    """What was looked for, and what is there instead."""
    what = f"{_short(step.text)}: {_short(part.text)} matches no parameter of this model"
    tied = [p for p in params if p.tied and part.text == "head"]
    if tied:
        return (
            f"{what}, for {tied[0].tied[0]!r} is tied to {tied[0].name!r}: "
            f"say {tied[0].kind} instead"
        )
    words = sorted({word for param in params for word in param.words})
    return f"{what}, which has {', '.join(words)}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
