# SPDX-License-Identifier: Apache-2.0
"""Text: the plan language as a table, and from its texts to plans and parts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fedplan.errors import PlanError
from fedplan.language import parts, plan, turn
from fedplan.language.parts import Part
from fedplan.language.plan import Plan, a_plan
from fedplan.language.predicates import a_predicate, joined, require_alike
from fedplan.reader import Table

CALLS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(plan.share, plan.keep, plan.freeze, plan.hold, plan.best),
        *(plan.chain, plan.when, plan.cycle, plan.by),
        *(turn.after, turn.phase, turn.client_in, turn.trait),
        *(parts.blocks, parts.first, parts.last, parts.named, parts.on),
    )
}
"""The functions of the language. Every text is also Python that gives the same plan."""

LONGEST = 50_000
"""Characters of a plan, as it is said and as it is printed."""


def parse(text: str) -> Plan:
    """Read a plan. Nothing is evaluated; errors point.

    >>> parse("chain(share(), when(after(20), freeze(query | key)))").text
    'chain(share(), when(after(20), freeze(query | key)))'
    """
    made: Plan = TABLE.read(text, lambda value: a_plan(value, "a plan"))
    # What is printed is read again elsewhere: it has spaces that what was said may lack.
    TABLE.require_short(made.text)
    return made


def parse_part(text: str) -> Part:
    """Read a part, such as `query & ~bias`."""
    return TABLE.read(text, lambda value: parts.a_part(value, "a part"))


TABLE = Table(
    name="the plan language",
    calls=CALLS,
    error=PlanError,
    longest=LONGEST,
    remedy="name groups of clients by a trait, and parts by a word or a pattern",
    words={word: parts.Word(word) for word in parts.WORDS},
    prefix={"~": lambda value: ~a_predicate(value)},
    infix={sign: partial(joined, sign) for sign in "|&"},
    alike=require_alike,
)
