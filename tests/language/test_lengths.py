# SPDX-License-Identifier: Apache-2.0
"""A plan of any legal length is read, printed and resolved in work that grows as its length does."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import fedplan as fp
from fedplan.errors import PlanError
from fedplan.language.parser import MAX_PLAN_LENGTH
from fedplan.reader import MAX_DEPTH

PARAMS = fp.params_of("vit-tiny-16")[:20]
SCORES = {p.block_id: 1.0 for p in PARAMS if p.block_id}


def many(before: str, unit: str, sign: str, after: str) -> Callable[[int], str]:
    def text(length: int) -> str:
        count = (length - len(before) - len(after)) // (len(unit) + len(sign))
        return before + sign.join([unit] * max(count, 1)) + after

    return text


def numbered(before: str, unit: str, after: str) -> Callable[[int], str]:
    def text(length: int) -> str:
        count = (length - len(before) - len(after)) // (len(unit) + 6)
        return before + ", ".join(unit.format(number) for number in range(count)) + after

    return text


def nested(before: str, after: str, inner: Callable[[int], str]) -> Callable[[int], str]:
    deep = (MAX_DEPTH - 6) // (2 if before == "~(" else 1)

    def text(length: int) -> str:
        return before * deep + inner(length - deep * len(before + after)) + after * deep

    return text


SHARES = many("chain(", "share()", ", ", ")")
LONG: dict[str, Callable[[int], str]] = {
    "or": many("share(", "query", " | ", ")"),
    "and of ors": many("share(", "(query | key)", " & ", ")"),
    "or of ands": many("share(", "query & ~bias", " | ", " | key)"),
    "not": many("share(", "~query", " | ", ")"),
    "on": many("share(", "on(~key)", " | ", " | key)"),
    "names": many("share(", 'named("*")', " | ", ")"),
    "stars": lambda length: f'share(named("{"*" * (length - 17)}"))',
    "blocks": numbered("share(blocks(", "{}", "))"),
    "chain": many("chain(", "keep()", ", ", ")"),
    "best": many("chain(share(), ", "best(1)", ", ", ")"),
    "cycle": many("cycle(", "share()", ", ", ")"),
    "when": many("chain(", "when(after(1), share(), keep())", ", ", ")"),
    "conditions": many("when(", "after(1)", " | ", ", share(), keep())"),
    "cases": numbered('by("site", {{'.replace("{{", "{"), '"{}": share()', "})"),
    "clients": numbered("when(client_in(", '"c{}"', "), keep(), share())"),
    "deep chains": nested("chain(", ")", SHARES),
    "deep whens": nested("when(after(1), ", ")", SHARES),
    "deep cycles": nested("cycle(share(), ", ")", SHARES),
    "deep brackets": lambda n: f"share({nested('(', ')', many('', 'query', ' | ', ''))(n - 7)})",
    "deep opposites": lambda n: f"share({nested('~(', ')', many('', 'query', ' | ', ''))(n - 99)})",
}  # fmt: skip


def cost(task: Callable[[], Any]) -> tuple[int, Any]:
    """How many calls of Python a task makes, and what it gives: the same on every machine."""
    count, before = [0], sys.getprofile()

    def seen(*_: Any) -> None:
        count[0] += 1

    sys.setprofile(seen)
    try:
        found = task()
    finally:
        sys.setprofile(before)
    return count[0], found


def resolved(plan: fp.Plan) -> Any:
    try:
        return fp.resolve(plan, PARAMS, fp.Turn(round=2, scores=SCORES))
    except PlanError as error:
        return len(str(error)) < 1000


@pytest.mark.parametrize("name", LONG)
def test_work_grows_as_the_plan_does(name: str) -> None:
    costs = list[tuple[int, int, int]]()
    for length in (1500, 6000):
        text = LONG[name](length)
        assert 0.5 * length < len(text) <= length
        reading, plan = cost(lambda text=text: fp.parse(text))
        printing, printed = cost(lambda plan=plan: (plan.text, plan.fingerprint)[0])
        assert fp.parse(printed) == plan and fp.parse(printed).text == printed
        resolving, answer = cost(lambda plan=plan: resolved(plan))
        assert answer
        assert reading < 150 * length and printing < 30 * length
        assert resolving < 30 * length * len(PARAMS)
        costs.append((reading, printing, resolving))
    for short, long in zip(*costs, strict=True):
        assert long < 8 * short + 1000  # of a text that is four times as long


@pytest.mark.parametrize("name", LONG)
def test_a_plan_of_the_longest_length_is_read_and_reads_back(name: str) -> None:
    plan = fp.parse(LONG[name](MAX_PLAN_LENGTH))
    assert fp.parse(plan.text) == plan


def test_what_is_longer_or_deeper_is_refused_by_name() -> None:
    for text in ("share(" + "a" * MAX_PLAN_LENGTH, " " * (MAX_PLAN_LENGTH + 1)):
        with pytest.raises(PlanError, match=f"longer than {MAX_PLAN_LENGTH}: name groups"):
            fp.parse(text)
    # as it is said it is short enough, and as it is printed it is not
    with pytest.raises(PlanError, match="longer than"):
        fp.parse(many("share(", "query", "|", ")")(MAX_PLAN_LENGTH))
    for text in ("(" * 8000, "chain(" * 8000, "~" * 8000 + "query", "share(" + "(" * 8000):
        with pytest.raises(PlanError, match="nested more than"):
            fp.parse(text)
