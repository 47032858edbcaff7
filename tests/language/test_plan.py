# SPDX-License-Identifier: Apache-2.0
"""Laws of the plan algebra, each over random plans on several architectures."""

from __future__ import annotations

from functools import cache

import pytest
import sentences
import zoo
from hypothesis import assume, given
from hypothesis import strategies as st

import fedplan as fp
from fedplan.errors import PlanError
from fedplan.language.parts import head, query
from fedplan.language.plan import Role, Roles
from fedplan.language.resolution import Resolver, certain_roles, permitted_roles
from fedplan.models.params import Params

MODELS = ("bert", "t5", "gpt2", "clip")


@cache
def params_of(name: str) -> Params:
    return fp.describe(zoo.build(name))


@cache
def plans_of(name: str) -> st.SearchStrategy[fp.Plan]:
    """Plans about parts that the model has."""
    return sentences.plan_strategy(st.sampled_from(sentences.fitting(params_of(name))))


@st.composite
def cases(draw: st.DrawFn, plans: int = 1) -> tuple[Params, fp.Turn, list[fp.Plan]]:
    """A model, a turn, and plans that fit the model."""
    name = draw(st.sampled_from(MODELS))
    params = params_of(name)
    found = [draw(plans_of(name)) for _ in range(plans)]
    assume(all(sentences.fits(plan, params) for plan in found))
    return params, draw(sentences.turns(params)), found


@given(sentences.PLANS, sentences.PLANS, sentences.PLANS)
def test_chain_is_associative_and_chain_of_nothing_is_its_identity(
    a: fp.Plan, b: fp.Plan, c: fp.Plan
) -> None:
    assert fp.chain(a, fp.chain(b, c)) == fp.chain(fp.chain(a, b), c) == fp.chain(a, b, c)
    assert fp.chain(a, fp.chain()) == a == fp.chain(fp.chain(), a)


@given(cases(plans=3))
def test_chain_is_associative_in_what_it_does(
    case: tuple[Params, fp.Turn, list[fp.Plan]],
) -> None:
    params, turn, (a, b, c) = case
    left, right = fp.chain(fp.chain(a, b), c), fp.chain(a, fp.chain(b, c))
    assert fp.resolve(left, params, turn) == fp.resolve(right, params, turn)


@given(cases(plans=1), st.sampled_from([fp.share, fp.keep, fp.freeze, fp.hold]), st.data())
def test_the_later_is_heard(
    case: tuple[Params, fp.Turn, list[fp.Plan]], say: object, data: st.DataObject
) -> None:
    params, turn, (plan,) = case
    part = data.draw(st.sampled_from(sentences.fitting(params)))
    before = fp.resolve(plan, params, turn)
    after = fp.resolve(fp.chain(plan, say(part)), params, turn)
    for p in params:
        expected = say(part).role if part.holds(p) else before[p]
        assert after[p] is expected


@given(cases())
def test_resolve_is_total_and_starts_from_freeze(
    case: tuple[Params, fp.Turn, list[fp.Plan]],
) -> None:
    params, turn, (plan,) = case
    roles = fp.resolve(plan, params, turn)
    assert tuple(roles) == params
    steps = plan.active_steps(turn)
    silent = [p for p in params if not any(step.part.holds(p) for step in steps)]
    assert all(roles[p] is Role.FREEZE for p in silent)
    assert set(fp.resolve(fp.chain(), params, turn).values()) == {Role.FREEZE}


@given(cases(), st.data())
def test_scores_decide_what_is_trained_and_never_whose_it_is(
    case: tuple[Params, fp.Turn, list[fp.Plan]], data: st.DataObject
) -> None:
    params, turn, (plan,) = case
    scores = data.draw(sentences.turns(params)).scores
    other = fp.Turn(turn.round, turn.client, turn.phase, turn.traits, scores)
    one, two = fp.resolve(plan, params, turn), fp.resolve(plan, params, other)
    most, least = permitted_roles(plan, params, turn), certain_roles(plan, params, turn)
    for p in params:
        assert (
            one[p].is_personal == two[p].is_personal == most[p].is_personal == least[p].is_personal
        )
        assert least[p].is_trained <= one[p].is_trained <= most[p].is_trained


@given(cases())
def test_the_resolver_for_many_turns_gives_the_same(
    case: tuple[Params, fp.Turn, list[fp.Plan]],
) -> None:
    params, turn, (plan,) = case
    resolver = Resolver(plan, params)
    first = resolver(turn)
    assert first == fp.resolve(plan, params, turn)
    assert resolver(turn) is first


@given(sentences.PLANS, sentences.PLANS)
def test_two_plans_are_equal_just_when_their_fingerprints_are(a: fp.Plan, b: fp.Plan) -> None:
    assert (a == b) == (a.text == b.text) == (a.fingerprint == b.fingerprint)
    assert hash(a) == hash(fp.parse(a.text))


def roles_of(plan: fp.Plan, turn: fp.Turn, name: str = "bert") -> Roles:
    return fp.resolve(plan, params_of(name), turn)


def test_after_counts_rounds_that_are_done() -> None:
    plan = fp.chain(fp.share(), fp.when(fp.after(20), fp.freeze(query)))
    last, first = (roles_of(plan, fp.Turn(round=r)) for r in (20, 21))
    kernel = [p for p in params_of("bert") if p.kind == "query"]
    assert {last[p] for p in kernel} == {Role.SHARE}
    assert {first[p] for p in kernel} == {Role.FREEZE}


def test_a_cycle_takes_its_plans_in_turn() -> None:
    plan = fp.cycle(fp.share(head), fp.share(query), fp.keep(head))
    said = [plan.active_steps(fp.Turn(round=r))[0] for r in (1, 2, 3, 4)]
    assert said == [fp.share(head), fp.share(query), fp.keep(head), fp.share(head)]


def test_by_follows_a_trait_and_otherwise_says_the_rest() -> None:
    plan = fp.by("capacity", {"small": fp.best(1), "large": fp.best(2)}, fp.freeze())
    for value, expected in (("small", fp.best(1)), ("large", fp.best(2)), ("odd", fp.freeze())):
        assert plan.active_steps(fp.Turn(traits={"capacity": value})) == (expected,)
    assert plan.active_steps(fp.Turn()) == (fp.freeze(),)


def test_of_equal_scores_the_earlier_block_is_chosen() -> None:
    params = params_of("t5")
    scores = {p.block_id: 1.0 for p in params if p.block_id}
    roles = fp.resolve(fp.best(1), params, fp.Turn(scores=scores))
    assert {p.block_id for p in params if roles[p] is Role.SHARE} == {("encoder", 0)}


def test_best_wakes_what_a_client_holds_without_taking_it_away() -> None:
    params = params_of("bert")
    scores = {p.block_id: float(p.block or 0) for p in params if p.block_id}
    roles = fp.resolve(fp.chain(fp.hold(query), fp.best(1)), params, fp.Turn(scores=scores))
    said = {(p.block, roles[p]) for p in params if p.kind == "query"}
    assert said == {(0, Role.HOLD), (1, Role.KEEP)}


@pytest.mark.parametrize(
    ("plan", "name", "words"),
    [
        (fp.keep(head), "gpt2", ["'lm_head.weight' is tied to 'transformer.wte.weight'", "embed"]),
        (fp.parse("share(bias | head)"), "llama", ["share(bias | head)", "bias matches no"]),
        (fp.parse("share(prompt)"), "bert", ["share(prompt)", "which has bias, body, embed"]),
        (fp.best(3), "bert", ["best(3) chooses 3 blocks", "has 2"]),
        (fp.when(fp.after(900), fp.keep(head)), "gpt2", ["tied"]),
    ],
)
def test_a_part_that_matches_nothing_is_an_error(
    plan: fp.Plan, name: str, words: list[str]
) -> None:
    with pytest.raises(PlanError) as caught:
        fp.resolve(plan, params_of(name), fp.Turn())
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("scores", [None, {}, {("encoder", 0): 1.0}])
def test_best_without_scores_is_an_error(scores: object) -> None:
    with pytest.raises(PlanError, match="best"):
        fp.resolve(fp.best(1), params_of("bert"), fp.Turn(scores=scores))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: fp.share(fp.after(3)),
        lambda: fp.when(query, fp.share()),
        lambda: fp.when(fp.after(3), query),
        lambda: fp.chain(query),
        lambda: fp.cycle(),
        lambda: fp.best(0),
        lambda: fp.best(True),
        lambda: fp.best(1.5),
        lambda: fp.after(-1),
        lambda: fp.phase(""),
        lambda: fp.phase("a\nb"),
        lambda: fp.client_in(),
        lambda: fp.by("x", {}),
        lambda: fp.by("x", [fp.share()]),
        lambda: query | 3,
        lambda: query | fp.after(3),
        lambda: query and head,
    ],
)
def test_wrong_words_are_a_plan_error(wrong: object) -> None:
    with pytest.raises(PlanError):
        wrong()
