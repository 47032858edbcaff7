# SPDX-License-Identifier: Apache-2.0
"""The reference is made of the schemas and the sources, and nothing in them is without a sentence."""

from __future__ import annotations

import re
import runpy
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

ROOT = Path(__file__).parent.parent
made = runpy.run_path(str(ROOT / "docs" / "reference.py"))
FIELDS = [
    (f"{schema.__name__}.{path}.{name}".replace("..", "."), field)
    for schema in made["files"]().values()
    for path, section in made["sections"](schema)
    for name, field in section.model_fields.items()
]


@cache
def wanted() -> dict[str, str]:
    return made["pages"]()


def test_every_field_has_a_sentence() -> None:
    assert len(FIELDS) > 130
    without = [
        name for name, f in FIELDS if not re.fullmatch(r"(?s)[A-Z].+\.", f.description or "")
    ]
    assert not without, "write a docstring below the field"


@pytest.mark.parametrize("schema", made["files"]().values())
def test_every_section_says_what_it_is(schema: type[BaseModel]) -> None:
    for path, section in made["sections"](schema):
        assert section.__doc__, path


def test_the_pages_are_current() -> None:
    kept = {p.name: p.read_text() for p in (ROOT / "docs" / "reference").glob("*.*")}
    kept.pop("glossary.md", None)  # written by hand
    assert kept.keys() == wanted().keys()
    for name, text in wanted().items():
        assert kept[name] == text, f"make reference writes {name} anew"


def test_every_name_of_a_face_has_a_sentence() -> None:
    for name, text in wanted().items():
        if name in ("study.md", "site.md", "index.md") or name.endswith(".json"):
            continue
        for entry in re.split(r"^##+ ", text, flags=re.M)[1:]:
            head, _, rest = entry.partition("\n")
            told = re.sub(r"```py\n.*?\n```", "", rest, flags=re.S).strip()
            assert told, f"{name}: {head} says nothing of itself"
