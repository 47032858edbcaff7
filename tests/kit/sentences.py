# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies for the plan language: parts, conditions, plans and turns."""

from __future__ import annotations

import random
from functools import cache

from hypothesis import strategies as st

import fedplan as fp
from fedplan.errors import PlanError
from fedplan.language import parts as p
from fedplan.language.resolution import check_plan
from fedplan.models.params import Block, Params

NAMES = st.sampled_from(["north", "south", "St. Élie", 'a "b" c', "x,y|z", "7"])
SMALL = st.integers(0, 12)


def part_strategy(words: list[str]) -> st.SearchStrategy[p.Part]:
    """Parts over some words."""
    atoms = st.one_of(
        st.sampled_from(words).map(p.Word),
        st.lists(st.integers(-3, 3), min_size=1, max_size=3).map(lambda ns: p.blocks(*ns)),
        st.integers(1, 4).map(p.first),
        st.integers(1, 4).map(p.last),
        st.sampled_from(["*.0.*", "*weight", "nothing", 'a"b\\c']).map(p.named),
    )
    return st.recursive(
        atoms,
        lambda inner: st.one_of(
            st.builds(lambda a, b: a | b, inner, inner),
            st.builds(lambda a, b: a & b, inner, inner),
            inner.map(lambda a: ~a),
            inner.map(p.on),
        ),
        max_leaves=4,
    )


CONDITIONS = st.recursive(
    st.one_of(
        SMALL.map(fp.after),
        NAMES.map(fp.phase),
        st.lists(NAMES, min_size=1, max_size=2).map(lambda ns: fp.client_in(*ns)),
        st.builds(fp.trait, NAMES, NAMES),
    ),
    lambda inner: st.one_of(
        st.builds(lambda a, b: a | b, inner, inner),
        st.builds(lambda a, b: a & b, inner, inner),
        inner.map(lambda a: ~a),
    ),
    max_leaves=3,
)


def plan_strategy(part: st.SearchStrategy[p.Part]) -> st.SearchStrategy[fp.Plan]:
    """Plans over some parts."""
    assigns = [fp.share, fp.keep, fp.freeze, fp.hold]
    steps = st.one_of(
        st.builds(lambda f, a: f(a), st.sampled_from(assigns), part),
        st.sampled_from(assigns).map(lambda f: f()),
        st.builds(fp.best, st.integers(1, 2)),
        st.builds(fp.best, st.integers(1, 2), part),
    )
    return st.recursive(
        steps,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda ps: fp.chain(*ps)),
            st.builds(fp.when, CONDITIONS, inner),
            st.builds(fp.when, CONDITIONS, inner, inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda ps: fp.cycle(*ps)),
            st.builds(fp.by, NAMES, st.dictionaries(NAMES, inner, min_size=1, max_size=2), inner),
        ),
        max_leaves=5,
    )


@cache
def fitting(params: Params) -> list[p.Part]:
    """Parts of many forms, each true of something in a model."""
    words = sorted({word for param in params for word in param.words})
    atoms = [*map(p.Word, words), p.blocks(0, -1), p.first(1), p.last(1), p.named("*weight")]
    pairs = [pair for a in atoms for b in atoms for pair in (a | b, a & b, a & ~b, ~a | b)]
    some = random.Random(0).sample(pairs, 200)
    return [part for part in atoms + some if fits(fp.share(part), params)]


def fits(plan: fp.Plan, params: Params) -> bool:
    """Whether a model has every part that a plan speaks of."""
    try:
        check_plan(plan, params)
    except PlanError:
        return False
    return True


ANY_PART = part_strategy([*p.WORDS])
PLANS = plan_strategy(ANY_PART)


def turns(params: Params) -> st.SearchStrategy[fp.Turn]:
    """Turns of a model, each with scores for all of its blocks."""
    blocks: list[Block] = sorted({q.block_id for q in params if q.block_id})
    return st.builds(
        fp.Turn,
        round=st.integers(1, 20),
        client=NAMES,
        phase=NAMES,
        traits=st.dictionaries(NAMES, NAMES, max_size=2),
        scores=st.fixed_dictionaries({b: st.floats(-9, 9) for b in blocks}),
    )
