# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a person makes: each is told in words, and leaves nothing in the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from mistakes import MISTAKES, Mistake, asked, made, message

PAGE = (Path(__file__).parent.parent / "docs" / "troubleshooting.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("mistakes")
    made(place)
    return place


def held(folder: Path) -> dict[str, bytes]:
    files = (each for each in folder.rglob("*") if each.is_file())
    return {str(each.relative_to(folder)): each.read_bytes() for each in files}


def test_there_are_thirty_of_them() -> None:
    assert len(MISTAKES) >= 30 and len({each.what for each in MISTAKES}) == len(MISTAKES)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda each: each.what)
def test_a_mistake_is_told_and_leaves_nothing_behind(mistake: Mistake, folder: Path) -> None:
    before, there = held(folder), sorted(folder.rglob("*"))
    code, words = asked(folder, mistake.command)
    told = message(words, folder)
    assert code == 2 and "Traceback" not in words, words
    for each in mistake.says:
        assert each in " ".join(told.split()), (each, words)
    assert f"$ fedplan {mistake.command}\n{told}\n" in PAGE, "python docs/troubleshooting.py"
    assert held(folder) == before
    assert sorted(folder.rglob("*")) == there, "nothing stands in the way of the next try"


def test_the_next_try_works(folder: Path) -> None:
    code, words = asked(folder, "run study.toml --output next --set train.rounds=1")
    assert code == 0, words
