# SPDX-License-Identifier: Apache-2.0
"""Coverage of a plan by the turns of a run: branches that no turn reaches, steps without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedplan.language.parts import everything
from fedplan.language.plan import Assign, By, Chain, Cycle, Plan, When, chain
from fedplan.language.predicates import After, Phase, Turn, quote_string
from fedplan.language.resolution import Participants, client_classes
from fedplan.models.params import Params


@dataclass(frozen=True)
class UnreachedBranch:
    """A branch `plan` of a when, cycle or by that no turn reaches.

    `condition` is the text of the condition, which never holds (or, for the second plan of a when,
    always holds), of the round of a cycle, or of a trait. `phases` are the phases in the condition.
    `after` is the number of rounds after which the branch applies, 0 if it does not depend on it.
    """

    plan: Plan
    condition: str
    phases: tuple[str, ...] = ()
    after: int = 0


def unreached_branches(plan: Plan, turns: Sequence[Turn]) -> Iterator[UnreachedBranch]:
    """Yield each outermost branch of a plan that none of `turns` reaches.

    A plan for all other clients, in `by`, may stay unused.
    """
    branches = list[tuple[UnreachedBranch, list[Turn]]]()
    match plan:
        case Chain(steps):
            for step in steps:
                yield from unreached_branches(step, turns)
        case When(condition, then, otherwise):
            atoms = list(condition.atoms())
            phases = tuple(atom.name for atom in atoms if isinstance(atom, Phase))
            after = max((atom.rounds for atom in atoms if isinstance(atom, After)), default=0)
            first = UnreachedBranch(then, f"{condition.text} never holds", phases, after)
            second = UnreachedBranch(otherwise, f"{condition.text} always holds")
            branches = [
                (first, [turn for turn in turns if condition.holds(turn)]),
                (second, [turn for turn in turns if not condition.holds(turn)]),
            ]
        case Cycle(plans):
            for number, each in enumerate(plans):
                branch = UnreachedBranch(each, f"it begins in round {number + 1}", after=number)
                branches.append(
                    (branch, [t for t in turns if (t.round - 1) % len(plans) == number])
                )
        case By(trait, cases, otherwise):
            for value, each in cases:
                branch = UnreachedBranch(each, f"no client has {trait} = {quote_string(value)}")
                branches.append((branch, [t for t in turns if t.traits.get(trait) == value]))
            values = {value for value, _ in cases}
            others = [turn for turn in turns if turn.traits.get(trait) not in values]
            yield from unreached_branches(otherwise, others) if others else ()
        case _:
            pass
    for branch, reaching in branches:
        if reaching:
            yield from unreached_branches(branch.plan, reaching)
        elif branch.plan != chain():
            yield branch


def overridden_steps(plan: Plan, params: Params, turns: Sequence[Turn]) -> list[Assign]:
    """Return the assignments of a part that later ones replace wherever they apply.

    An assignment of all params is a base that later ones are meant to replace, and is left out; so
    is one that is replaced by the same role.
    """
    effective, replaced = set[Assign](), dict[Assign, None]()
    for steps in dict.fromkeys(plan.active_steps(turn) for turn in turns):
        final = dict[str, Assign]()
        assigns = [step for step in steps if isinstance(step, Assign)]
        for step in assigns:
            final |= {p.key: step for p in params if step.part.holds(p)}
        effective |= set(final.values())
        for step in assigns:
            roles = {final[p.key].role for p in params if step.part.holds(p)}
            if step.part != everything and roles != {step.role}:
                replaced[step] = None
    return [step for step in replaced if step not in effective]


def planned_turns(
    plan: Plan,
    rounds: int,
    phases: Mapping[str, int],
    unknown_phases: Sequence[str] = (),
    participants: Participants | None = None,
) -> list[Turn]:
    """Return a turn of each class of clients in each round of a run, before the run.

    `phases` maps each phase to the round after which it begins. A phase of `unknown_phases` may
    begin in any round. Without `participants`, there is a client of each class that the plan
    distinguishes.
    """
    turns, classes = list[Turn](), client_classes(plan, participants)
    order = sorted(phases, key=phases.__getitem__)
    for number in range(1, rounds + 1):
        begun = [name for name in order if phases[name] < number]
        for name in (begun[-1] if begun else "", *unknown_phases):
            turns += [Turn(number, turn.client, name, turn.traits) for _, turn in classes]
    return turns
