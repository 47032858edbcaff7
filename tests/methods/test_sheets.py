# SPDX-License-Identifier: Apache-2.0
"""A method's sheet says its paper, every setting in a sentence, and a plan that can be read."""

from __future__ import annotations

import re
from inspect import signature

import pytest
from commands import run

from fedplan.language.parser import parse
from fedplan.methods import METHODS, method_named
from fedplan.methods.sheets import SENTENCES, sheet_of

UNPUBLISHED = ("local-only", "head-only")
"""Floors that have no paper of their own."""


@pytest.mark.parametrize("name", METHODS)
def test_a_sheet_says_paper_settings_and_plan(name: str) -> None:
    sheet = sheet_of(name)
    takes = signature(METHODS[name]).parameters
    assert [each.name for each in sheet.settings] == list(takes)
    for each in sheet.settings:
        assert each.default == takes[each.name].default
        assert re.fullmatch(r"[A-Z].*\.", each.about), each
    assert name in UNPUBLISHED or re.search(r"\b20\d\d\b|composition of ours", sheet.source)
    assert parse(sheet.plan) == method_named(name).plan
    code, out = run("methods", name)
    assert code == 0 and all(line in out for line in sheet.lines), out


def test_no_sentence_is_of_a_setting_that_nobody_has() -> None:
    had = {each for make in METHODS.values() for each in signature(make).parameters}
    assert had == set(SENTENCES)
