# SPDX-License-Identifier: Apache-2.0
"""Laws of the text: it is the plan, it is Python, and whatever else comes is a PlanError."""

from __future__ import annotations

import pytest
import sentences
from hypothesis import given, settings
from hypothesis import strategies as st
from often import often

import fedplan as fp
from fedplan.errors import PlanError
from fedplan.language import parts
from fedplan.language.parser import FUNCTIONS, parse, parse_part
from fedplan.reader import MAX_DEPTH

PYTHON = {**FUNCTIONS, **{word: parts.Word(word) for word in parts.WORDS}}


@given(sentences.PLANS)
def test_parsing_the_text_gives_the_plan(plan: fp.Plan) -> None:
    assert parse(plan.text) == plan
    assert parse(plan.text).text == plan.text
    assert '"' in plan.text or parse(plan.text.replace(" ", "\n\t")) == plan


@given(sentences.ANY_PART)
def test_parsing_the_text_gives_the_part(part: parts.Part) -> None:
    assert parse_part(part.text) == part


@given(sentences.PLANS)
def test_the_text_is_python_too(plan: fp.Plan) -> None:
    assert eval(plan.text, {"__builtins__": {}}, PYTHON) == plan


SOUP = st.lists(
    st.sampled_from(
        [*FUNCTIONS, *parts.WORDS, *"(){},:&|~'\" \n", "-3", "20", '"a"', "\\", "é", "\x00"]
    ),
    max_size=25,
).map("".join)


@st.composite
def damaged(draw: st.DrawFn) -> str:
    """The text of a plan with a piece cut out, doubled or replaced."""
    text = draw(sentences.PLANS).text
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, len(text)))
    return (
        text[:start] + draw(st.sampled_from(["", text[start:end] * 2, "(", "é", '"'])) + text[end:]
    )


@settings(max_examples=often(2000))
@given(st.one_of(st.text(max_size=80), SOUP, damaged()))
def test_any_string_is_a_plan_or_a_plan_error_with_a_position(text: str) -> None:
    try:
        plan = parse(text)
    except PlanError as error:
        assert error.position is not None
        assert 0 <= error.position <= len(text)
        assert str(error)
    else:
        assert parse(plan.text) == plan


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("chain(share(), frezze(query))", 15, "did you mean freeze?"),
        ("share(qery)", 6, "did you mean query?"),
        ("share", 0, "write share(...)"),
        ("share(", 6, "the text ends here"),
        ("share(query", 5, "never closed"),
        ("by('a', {'x': share()", 8, "never closed"),
        ("share(query | after(3))", 12, "cannot be joined"),
        ("when(share(), share())", 0, "takes a condition such as after(20)"),
        ("best()", 0, "does not take 0 arguments"),
        ("best(0)", 0, "from 1 to"),
        ("after(99999999999)", 6, "too long"),
        ("share() share()", 8, "nothing may follow"),
        ("query", 0, "takes a plan"),
        ('phase("a\\q")', 6, "escape"),
        ('phase("a', 6, "string is never closed"),
        ("by('a', {'x': share(), 'x': keep()})", 26, "a name of its own"),
        ("share(query)\n + 1", 14, "'+' is not part"),
        ("~" * (MAX_DEPTH + 1) + "query", MAX_DEPTH, "nested more than"),
        ("lambda: 0", 0, "no 'lambda' in the plan language; it has adapter"),
        ("after(1.5)", 0, "takes a whole number from"),
        ("best(1.2.3)", 5, "'1.2.3' is not a number"),
    ],
)
def test_errors_point_at_the_character_and_suggest(text: str, position: int, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        parse(text)
    assert (caught.value.position, words in str(caught.value)) == (position, True)


@pytest.mark.parametrize("text", ["\r0", "share(\x1b[2J)", "\x850", "query |\u2028 0"])
def test_the_line_above_the_pointer_cannot_control_a_terminal(text: str) -> None:
    for read in (parse, parse_part):
        with pytest.raises(PlanError) as error:
            read(text)
        assert str(error.value).replace("\n", "").isprintable()


def test_the_pointer_stands_under_the_character() -> None:
    with pytest.raises(PlanError) as caught:
        parse("chain(share(),\n  frezze(query))")
    assert str(caught.value).splitlines()[-2:] == ["    frezze(query))", "    ^"]
