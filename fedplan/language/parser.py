# SPDX-License-Identifier: Apache-2.0
"""The parser of the plan language: text to plans and parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fedplan.errors import PlanError
from fedplan.language import parts, plan, predicates
from fedplan.language.parts import Part
from fedplan.language.plan import Plan, require_plan
from fedplan.language.predicates import join_predicates, require_predicate, require_same_subject
from fedplan.reader import Grammar

FUNCTIONS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(plan.share, plan.keep, plan.freeze, plan.hold, plan.best),
        *(plan.chain, plan.when, plan.cycle, plan.by),
        *(predicates.after, predicates.phase, predicates.client_in, predicates.trait),
        *(parts.blocks, parts.first, parts.last, parts.named, parts.on),
    )
}
"""The functions of the plan language, by name. Every plan text is also valid Python."""

MAX_PLAN_LENGTH = 50_000
"""Most characters of a plan, both as written and as printed."""


def parse(text: str) -> Plan:
    """Return the plan that a text describes, without evaluating any code.

    Raises PlanError, with the position in the text, if the text is not a plan or longer than
    MAX_PLAN_LENGTH.

    >>> parse("chain(share(), when(after(20), freeze(query | key)))").text
    'chain(share(), when(after(20), freeze(query | key)))'
    """
    parsed: Plan = PLAN_GRAMMAR.read(text, lambda value: require_plan(value, "a plan"))
    # The printed text is parsed again elsewhere, and may be longer: it has more spaces.
    PLAN_GRAMMAR.require_short(parsed.text)
    return parsed


def parse_part(text: str) -> Part:
    """Return the part that a text such as `query & ~bias` describes; else raise PlanError."""
    return PLAN_GRAMMAR.read(text, lambda value: parts.require_part(value, "a part"))


PLAN_GRAMMAR = Grammar(
    name="the plan language",
    calls=FUNCTIONS,
    error=PlanError,
    max_length=MAX_PLAN_LENGTH,
    remedy="name groups of clients by a trait, and parts by a word or a pattern",
    constants={word: parts.Word(word) for word in parts.WORDS},
    prefix={"~": lambda value: ~require_predicate(value)},
    infix={operator: partial(join_predicates, operator) for operator in "|&"},
    check_pair=require_same_subject,
)
