# SPDX-License-Identifier: Apache-2.0
"""A method's info says its paper, every setting in a sentence, and a plan that can be read."""

from __future__ import annotations

import re
from inspect import signature

import pytest
from commands import run

from fedplan.language.parser import parse
from fedplan.methods import METHODS, method_by_name
from fedplan.methods.registry import SETTING_DESCRIPTIONS, method_info

UNPUBLISHED = ("local-only", "head-only")
"""Floors that have no paper of their own."""


@pytest.mark.parametrize("name", METHODS)
def test_method_info_has_paper_settings_and_plan(name: str) -> None:
    info = method_info(name)
    takes = signature(METHODS[name]).parameters
    assert [each.name for each in info.settings] == list(takes)
    for each in info.settings:
        assert each.default == takes[each.name].default
        assert re.fullmatch(r"[A-Z].*\.", each.description), each
    assert name in UNPUBLISHED or re.search(r"\b20\d\d\b|Not published", info.source)
    assert parse(info.plan) == method_by_name(name).plan
    code, out = run("methods", name)
    assert code == 0 and all(line in out for line in info.lines), out


def test_no_sentence_is_of_a_setting_that_nobody_has() -> None:
    had = {each for make in METHODS.values() for each in signature(make).parameters}
    assert had == set(SETTING_DESCRIPTIONS)
