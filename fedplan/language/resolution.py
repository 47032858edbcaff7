# SPDX-License-Identifier: Apache-2.0
"""Resolution of a plan: the role of each param by client and round, and checks of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from itertools import islice, product
from math import isnan, lcm, nan

from fedplan.errors import PlanError, UnknownArchitecture
from fedplan.language.parts import Part
from fedplan.language.plan import Assign, Best, By, Chain, Cycle, Plan, Role, Roles, Step, When
from fedplan.language.predicates import After, ClientIn, Phase, Predicate, Trait, Turn, quote_string
from fedplan.models.params import TRAINABLE_DTYPES, Block, Param, Params


@dataclass(frozen=True)
class Participants:
    """The clients of a run: `roster` has the traits of each client by name.

    `full_participation`: whether all clients take part in each round.
    """

    roster: Mapping[str, Mapping[str, str]]
    full_participation: bool = True


def client_classes(plan: Plan, participants: Participants | None) -> list[tuple[str, Turn]]:
    """Return (label, turn) for each class of clients that a plan distinguishes.

    A class is one combination of the client names and trait values that the plan mentions, where
    each may also be "any other". With `participants`, only classes with at least one of these
    clients; None gives all. A turn has the class's client name and traits, and the default round.
    """
    names, traits = _mentioned(plan)
    choices = [[(t, v) for v in (*sorted(values), "")] for t, values in sorted(traits.items())]
    classes = dict[tuple[object, ...], tuple[str, Turn]]()
    for name, pairs in product((*names, ""), product(*choices)):
        named = {t: v for t, v in pairs if v}
        words = ([name] if name else []) + [f"{t} {v}" for t, v in named.items()]
        label = ", ".join(words) or "any other client"
        classes[name, *sorted(named.items())] = label, Turn(client=name, traits=named)
    if participants is None:
        return list(classes.values())
    present = dict[tuple[object, ...], tuple[str, Turn]]()
    for name, client_traits in participants.roster.items():
        mentioned = {t: client_traits[t] for t in traits if client_traits.get(t, "") in traits[t]}
        key = (name if name in names else "", *sorted(mentioned.items()))
        present[key] = classes[key]
    return list(present.values())


def class_representatives(
    plan: Plan, roster: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, Mapping[str, str]]]:
    """Return (name, traits) of the first client of each class that a plan distinguishes.

    `roster`: traits by client name. If the plan mentions no client and no trait, the result is the
    first client of the roster.
    """
    names, traits = _mentioned(plan)
    if not names and not traits:
        return list(islice(roster.items(), 1))
    first, mentioned_names = dict[tuple[str, ...], tuple[str, Mapping[str, str]]](), set(names)
    for name, client_traits in roster.items():
        values = (v if (v := client_traits.get(t, "")) in traits[t] else "" for t in traits)
        key = (name if name in mentioned_names else "", *values)
        first.setdefault(key, (name, client_traits))
    return list(first.values())


def _mentioned(plan: Plan) -> tuple[list[str], dict[str, set[str]]]:
    """Return (sorted client names that a plan mentions, mentioned values of each trait)."""
    names = sorted({n for c in plan_conditions(plan) if isinstance(c, ClientIn) for n in c.names})
    traits: dict[str, set[str]] = {}
    for condition in plan_conditions(plan):
        if isinstance(condition, Trait):
            traits.setdefault(condition.name, set()).add(condition.value)
    for inner in plan.walk():
        if isinstance(inner, By):
            traits.setdefault(inner.trait, set()).update(value for value, _ in inner.cases)
    return names, traits


def phase_names(plan: Plan) -> list[str]:
    """Return the names of the phases that a plan mentions, sorted."""
    return sorted({c.name for c in plan_conditions(plan) if isinstance(c, Phase)})


def plan_conditions(plan: Plan) -> Iterator[Predicate[Turn]]:
    """Yield every elementary condition of a plan in order of the text; repeated ones repeatedly."""
    for inner in plan.walk():
        if isinstance(inner, When):
            yield from inner.condition.atoms()


MAX_ROUNDS_CHECKED = 2000
"""Most rounds that are checked one by one; with more, a plan counts as unpredictable."""


def rounds_to_check(plan: Plan) -> list[tuple[int, bool]] | None:
    """Return rounds that cover all behaviour of a plan, as pairs (number, whether it recurs).

    Between two `after` conditions a plan repeats with the common period of all cycles, so the last
    period before each `after` is enough. Also the first period after the last `after`; its rounds
    recur, as they stand for all later rounds. None if that may be more than MAX_ROUNDS_CHECKED.
    """
    ends = sorted({c.rounds for c in plan_conditions(plan) if isinstance(c, After) and c.rounds})
    period = lcm(*(len(inner.plans) for inner in plan.walk() if isinstance(inner, Cycle)))
    if period * (len(ends) + 1) > MAX_ROUNDS_CHECKED:
        return None
    rounds = list[tuple[int, bool]]()
    for start, end in zip((0, *ends), ends, strict=False):
        rounds += [(number, False) for number in range(max(start, end - period) + 1, end + 1)]
    last = ends[-1] if ends else 0
    return rounds + [(number, True) for number in range(last + 1, last + period + 1)]


_PossibleRoles = dict[Param, frozenset[Role]]

BlockChooser = Callable[[Best, tuple[Block, ...]], frozenset[Block]]
"""From a `best` and its candidate blocks to the chosen blocks."""


def resolve(plan: Plan, params: Params, turn: Turn) -> Roles:
    """Return the role of each param in a turn; params that the plan does not mention are FREEZE.

    Raises PlanError and UnknownArchitecture as `check_plan`. Raises PlanError also if a `best`
    lacks scores in the turn, or if a param of a dtype that cannot be trained has a trained role.

    >>> from fedplan import chain, keep, share
    >>> from fedplan.models.params import Kind, Param
    >>> from fedplan.parts import head
    >>> params = (Param("w", Kind.MLP, (2,)), Param("c", Kind.HEAD, (2,)))
    >>> [role.name for role in resolve(chain(share(), keep(head)), params, Turn()).values()]
    ['SHARE', 'KEEP']
    """
    check_plan(plan, params)
    return _assign_roles(plan.active_steps(turn), params, choose_by_scores(turn.scores))


def permitted_roles(plan: Plan, params: Params, turn: Turn) -> Roles:
    """Return the role of each param in a turn if every `best` of the plan chose all candidates.

    An upper bound on the trained params that does not depend on scores. The role by `resolve` is
    either the same, or the untrained one: FREEZE for SHARE, HOLD for KEEP. Raises as `resolve`,
    except for missing scores.
    """
    check_plan(plan, params)
    return _assign_roles(plan.active_steps(turn), params, lambda _best, blocks: frozenset(blocks))


def certain_roles(plan: Plan, params: Params, turn: Turn) -> Roles:
    """Return the role of each param in a turn if `best` chose only blocks that are certain.

    Blocks are certain if a `best` has at most `count` candidate blocks, so that any scores choose
    them all; a `best` with more candidates chooses none here. A lower bound on the trained params
    that does not depend on scores. Raises as `resolve`, except for missing scores.
    """
    check_plan(plan, params)

    def choose(best: Best, blocks: tuple[Block, ...]) -> frozenset[Block]:
        return frozenset(blocks) if best.count >= len(blocks) else frozenset()

    return _assign_roles(plan.active_steps(turn), params, choose)


def params_with_roles(plan: Plan, params: Params, *roles: Role) -> Params:
    """Return the params that may have one of `roles` in some turn, of any client."""
    possible = _possible_roles(plan, dict.fromkeys(params, frozenset({Role.FREEZE})))
    return tuple(p for p in params if not possible[p].isdisjoint(roles))


def _possible_roles(plan: Plan, before: _PossibleRoles) -> _PossibleRoles:
    """Return the roles that each param may have after a plan, in any turn; a new dict.

    `before`: the roles that each param may have before the plan. Raises PlanError for a plan of an
    unknown class.
    """
    match plan:
        case Assign(role, part):
            return before | {p: frozenset({role}) for p in before if part.holds(p)}
        case Best(_, part):
            named = [p for p in before if p.block_id is not None and part.holds(p)]
            return before | {
                p: before[p] | {role.trained_role for role in before[p]} for p in named
            }
        case Chain(steps):
            return reduce(lambda roles, step: _possible_roles(step, roles), steps, before)
        case When(_, then, otherwise):
            plans = (then, otherwise)
        case Cycle(plans):
            pass
        case By(_, cases, otherwise):
            plans = (*(each for _, each in cases), otherwise)
        case _:
            raise PlanError(f"{plan!s} is not a plan of this language")
    possible = [_possible_roles(each, before) for each in plans]
    return {p: frozenset[Role]().union(*(each[p] for each in possible)) for p in before}


class Resolver:
    """Callable that resolves many turns of one plan: `Resolver(plan, params)(turn)`.

    Returns the same as `resolve(plan, params, turn)`; turns with the same active steps and chosen
    blocks share one cached result, which callers must not change. The constructor raises as
    `check_plan`.
    """

    def __init__(self, plan: Plan, params: Params) -> None:
        check_plan(plan, params)
        self.plan, self.params = plan, params
        self._candidates = {
            p: candidate_blocks(p, params) for p in plan.walk() if isinstance(p, Best)
        }
        self._cache: dict[tuple[Step | frozenset[Block], ...], Roles] = {}

    def __call__(self, turn: Turn) -> Roles:
        """The same result as `resolve(plan, params, turn)`."""
        steps = self.plan.active_steps(turn)
        choose = choose_by_scores(turn.scores)
        chosen = {s: choose(s, self._candidates[s]) for s in steps if isinstance(s, Best)}
        key = (*steps, *chosen.values())
        if key not in self._cache:
            self._cache[key] = _assign_roles(steps, self.params, lambda best, _: chosen[best])
        return self._cache[key]


def check_plan(plan: Plan, params: Params) -> None:
    """Check for all turns at once that a plan can be used with these params.

    Raises PlanError if a part (or one operand of a union) matches no param, or if the `count` of a
    `best` is above the number of blocks with a param of its part. Raises UnknownArchitecture if,
    without a layer map, it is unknown whether some param belongs to a part.
    """
    uncertain = [param for param in params if param.uncertain_words]
    for step in plan.walk():
        if isinstance(step, Assign | Best):
            for param in uncertain:
                unplaced = isinstance(step, Best) and "body" in param.uncertain_words
                if step.part.is_uncertain(param) or (unplaced and step.part.holds(param)):
                    raise UnknownArchitecture(_uncertain_message(step.text, step.part, param))
            for part in step.part.alternatives():
                if not any(part.holds(param) for param in params):
                    raise PlanError(_missing_message(step, part, params))
        if isinstance(step, Best) and step.count > len(candidate_blocks(step, params)):
            n = len(candidate_blocks(step, params))
            raise PlanError(
                f"{_short(step.text)} chooses {step.count} blocks, and the model has {n}"
            )


def require_known_part(part: Part, params: Params) -> None:
    """Raise UnknownArchitecture if it is unknown whether some param belongs to a part."""
    for param in params:
        if part.is_uncertain(param):
            raise UnknownArchitecture(_uncertain_message(part.text, part, param))


def candidate_blocks(best: Best, params: Params) -> tuple[Block, ...]:
    """Return the blocks with a param of the part of a `best`, in the order of the params."""
    blocks = (p.block_id for p in params if p.block_id is not None and best.part.holds(p))
    return tuple(dict.fromkeys(blocks))


def choose_by_scores(scores: Mapping[Block, float] | None) -> BlockChooser:
    """Return a function that chooses the blocks with the highest scores for a `best`.

    Of equal scores the earlier block is chosen. The function takes a `best` and the candidate
    blocks, and raises PlanError if `scores` is None, or a candidate has no score or a NaN.
    """

    def choose(best: Best, blocks: tuple[Block, ...]) -> frozenset[Block]:
        if scores is None:
            raise PlanError(
                f"{best.text} needs the turn's scores, and there are none: give the turn scores, "
                "or ask what is permitted"
            )
        block_scores = {block: scores.get(block, nan) for block in blocks}
        for block, score in block_scores.items():
            if isnan(score):
                raise PlanError(f"{best.text} needs a score for {block.stack} block {block.number}")
        ranking = sorted(blocks, key=lambda block: -block_scores[block])
        return frozenset(ranking[: best.count])

    return choose


def _assign_roles(steps: Iterable[Step], params: Params, choose: BlockChooser) -> Roles:
    """Return the role of each param after applying `steps` in order, starting from FREEZE for all.

    `choose`: chooses blocks for a `best`. Raises PlanError if a param with a trained role has a
    dtype that cannot be trained.
    """
    roles = dict.fromkeys(params, Role.FREEZE)
    for step in steps:
        if isinstance(step, Assign):
            roles |= {param: step.role for param in params if step.part.holds(param)}
        else:
            chosen = choose(step, candidate_blocks(step, params))
            trained = [p for p in params if p.block_id in chosen and step.part.holds(p)]
            roles |= {p: roles[p].trained_role for p in trained}
    for param, role in roles.items():
        if role.is_trained and param.dtype not in TRAINABLE_DTYPES:
            raise PlanError(
                f"the plan trains {param.key}, whose dtype {param.dtype} cannot be "
                f"trained: freeze it, as in freeze(named({param.name!r})) at the plan's end; of a "
                "quantized model train the adapters, as in chain(freeze(), share(adapter))"
            )
    return roles


def _uncertain_message(text: str, part: Part, param: Param) -> str:
    """Return the message that it is unknown whether a param belongs to a part, with remedies.

    `text`: the part or the step with the part, to begin the message with.
    """
    atoms = [atom.text for atom in part.atoms() if atom.is_uncertain(param)] or ["blocks"]
    return (
        f"{text}: this model has no layer map, so it is unknown whether {param.name!r} belongs to "
        f"{' and '.join(dict.fromkeys(atoms))}. Name a similar architecture "
        '(model.layer_map_like = "llama" in a study), or give a layer map '
        "(fedplan.register_layer_map, or model.layer_map in a study); `fedplan propose MODEL` "
        "proposes one and checks it. Without a layer map a plan "
        f"can use everything, bias, norm, adapter and named({quote_string(param.name)})"
    )


def _missing_message(step: Step, part: Part, params: Params) -> str:
    """Return the message that a part of a step matches no param, with the words of all params."""
    problem = f"{_short(step.text)}: {_short(part.text)} matches no parameter of this model"
    tied = [p for p in params if p.tied and part.text == "head"]
    if tied:
        return (
            f"{problem}, for {tied[0].tied[0]!r} is tied to {tied[0].name!r}: "
            f"say {tied[0].kind} instead"
        )
    words = sorted({word for param in params for word in param.words})
    return f"{problem}, which has {', '.join(words)}"


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
